// AdamW with moments of 8 bits on a piece of one parameter; kernels/optimizer/adamw8.py has the formats, the reasons
// and the same bits.
//
// A block of 512 threads takes 4096 elements, a thread eight neighbours, so that a warp holds the 256 elements that
// share a scale: their largest moments are two warp reductions away, and nothing but the scales passes between lanes.
//
// Set by the launcher: WEIGHT (0 bf16 with a 16-bit remainder, 1 fp32, 2 bf16 rounded at random); GRADIENT and PREVIOUS
// for gradient.cuh.
#define SMALLEST 7.888609052210118e-31f  // 2^-100: a block whose largest moment is smaller keeps zeros

// 64 random bits for the counter (low, high): Philox 2x32 of seven rounds.
DEVICE uint2 random_bits(u32 low, u32 high, u32 key) {
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const u64 product = (u64)low * 0xD256D193u;
        low = (u32)(product >> 32) ^ key ^ high;
        high = (u32)product;
        key += 0x9E3779B9u;
    }
    return make_uint2(low, high);
}

// Codes are exponents above MANTISSA bits, relative to the scale: from 1 on a code is the top of fp32's bits, below 1
// steps are even.
template <int MANTISSA>
DEVICE float decoded(u32 code) {
    const u32 shift = 23 - MANTISSA;
    if (code >> MANTISSA) return as_float((code + (126u << MANTISSA)) << shift);
    return __fadd_rn(as_float((code + (127u << MANTISSA)) << shift), -1.0f);
}
// `random`: 23 - MANTISSA bits, which decide between the neighbours of a value in proportion to its distances.
template <int MANTISSA>
DEVICE u32 encoded(float value, u32 random) {
    const u32 shift = 23 - MANTISSA;
    if (value >= 1.0f) return ((as_bits(value) + random) >> shift) - (126u << MANTISSA);
    return ((as_bits(__fadd_rn(value, 1.0f)) + random) >> shift) - (127u << MANTISSA);
}
#define MAX1 124.0f  // the largest value of three exponent and four mantissa bits: the magnitude of m
#define MAX2 126.0f  // and of three and five: sqrt(v)

DEVICE u32 code_at(const u32* words, int i) { return (words[i >> 2] >> (8 * (i & 3))) & 0xFFu; }

// Eight elements of 8 or 16 bits, or of 32.
template <int WHOLE, class Element>
DEVICE void store_narrow(Element* to, int left, const u32* from) {
    constexpr int EACH = 4 / sizeof(Element), BITS = 32 / EACH;
#pragma unroll
    for (int i = 0; i < 8; i += WHOLE ? 2 * EACH : 1) {
        if (WHOLE) *(uint2*)(to + i) = make_uint2(from[i / EACH], from[i / EACH + 1]);
        else if (i < left) to[i] = (Element)(from[i / EACH] >> (BITS * (i % EACH)));
    }
}
template <int WHOLE>
DEVICE void store_words(u32* to, int left, const u32* from) {
#pragma unroll
    for (int i = 0; i < 8; i += WHOLE ? 4 : 1) {
        if (WHOLE) *(uint4*)(to + i) = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
        else if (i < left) to[i] = from[i];
    }
}

template <int WHOLE>
DEVICE void update(void* weight, u16* remainder, u8* codes1, float* scales1, u8* codes2, float* scales2,
                   const void* gradient, const void* previous, const float* factor, int n, u32 first_low,
                   u32 first_high, u32 key, u32 salt, const Numbers& by) {
    const int at = blockIdx.x * 4096 + threadIdx.x * 8, left = n - at;
    if (at - (int)(threadIdx.x & 31) * 8 >= n) return;  // the whole warp
    Loaded loaded[2];
    u32 q1[2], q2[2];
    load_gradient<WHOLE>(loaded[0], gradient, previous, at, left);
    load_gradient<WHOLE>(loaded[1], gradient, previous, at + 4, left - 4);
    load_narrow<WHOLE>(codes1 + at, left, q1);
    load_narrow<WHOLE>(codes2 + at, left, q2);
#if WEIGHT == 1
    u32 w[8];
    load_words<WHOLE>((const u32*)weight + at, left, w);
    load_words<WHOLE>((const u32*)weight + at + 4, left - 4, w + 4);
#else
    u32 w[4], low[4];
    load_narrow<WHOLE>((const u16*)weight + at, left, w);
    load_narrow<WHOLE>((const u16*)weight + at + 4, left - 4, w + 2);
#if WEIGHT == 0
    load_narrow<WHOLE>(remainder + at, left, low);
    load_narrow<WHOLE>(remainder + at + 4, left - 4, low + 2);
#endif
#endif
    float* scale1_at = scales1 + at / 256;
    float* scale2_at = scales2 + at / 256;
    const float old_scale1 = *scale1_at, old_scale2 = *scale2_at, clip = factor ? *factor : 1.0f;

    float m[8], root_v[8], max1 = 0.0f, max2 = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = __fmul_rn(gradient_value(loaded[i >> 2], i & 3), clip);
        const u32 code1 = code_at(q1, i);
        const float magnitude = __fmul_rn(decoded<4>(code1 & 127u), old_scale1);
        const float old_m = code1 & 128u ? -magnitude : magnitude;
        const float old_root = __fmul_rn(decoded<5>(code_at(q2, i)), old_scale2);
        m[i] = __fadd_rn(old_m, __fmul_rn(by.weight1, __fadd_rn(g, -old_m)));
        const float kept = __fmul_rn(__fmul_rn(old_root, old_root), by.beta2);
        root_v[i] = __fsqrt_rn(__fadd_rn(kept, __fmul_rn(__fmul_rn(by.weight2, g), g)));
        if (!WHOLE && i >= left) m[i] = root_v[i] = 0.0f;
        max1 = fmaxf(max1, fabsf(m[i]));
        max2 = fmaxf(max2, root_v[i]);
    }
    // as integers: these are not negative
    max1 = as_float(__reduce_max_sync(0xFFFFFFFFu, as_bits(max1)));
    max2 = as_float(__reduce_max_sync(0xFFFFFFFFu, as_bits(max2)));
    const int some1 = max1 >= SMALLEST, some2 = max2 >= SMALLEST;
    const float up1 = some1 ? __fdiv_rn(MAX1, max1) : 0.0f, up2 = some2 ? __fdiv_rn(MAX2, max2) : 0.0f;

    u32 new1[2] = {0, 0}, new2[2] = {0, 0};
#if WEIGHT != 1
    u32 new_w[4] = {0, 0, 0, 0}, new_low[4] = {0, 0, 0, 0};
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 index = first_low + at + i;  // within the parameter; the launcher keeps pieces from crossing 2^32
        const uint2 random = random_bits(index, first_high ^ salt, key);
        const u32 code1 = encoded<4>(fminf(__fmul_rn(fabsf(m[i]), up1), MAX1), random.y >> 13);
        u32 code2 = encoded<5>(fminf(__fmul_rn(root_v[i], up2), MAX2), (random.x >> 16 << 2) | 2u);
        if (code2 == 0 && some2 && root_v[i] > 0.0f) code2 = 1;
        new1[i >> 2] |= (code1 | (m[i] < 0.0f ? 128u : 0u)) << (8 * (i & 3));
        new2[i >> 2] |= code2 << (8 * (i & 3));

        const float divisor = __fadd_rn(__fdiv_rn(root_v[i], by.root), by.eps);
        const float change = __fdiv_rn(__fmul_rn(by.minus_step_size, m[i]), divisor);
#if WEIGHT == 1
        w[i] = as_bits(__fadd_rn(__fmul_rn(as_float(w[i]), by.decay), change));
#else
        u32 master = half_on_top(w, i);
#if WEIGHT == 0
        master += (u32)((int)half_on_top(low, i) >> 16);
#endif
        master = as_bits(__fadd_rn(__fmul_rn(as_float(master), by.decay), change));
#if WEIGHT == 0
        const u32 half = rounded_half(master);
        new_low[i >> 1] |= (master & 0xFFFFu) << (16 * (i & 1));
#else
        const u32 half = cut_half(master, random.x & 0xFFFFu);
#endif
        new_w[i >> 1] |= half << (16 * (i & 1));
#endif
    }
    store_narrow<WHOLE>(codes1 + at, left, new1);
    store_narrow<WHOLE>(codes2 + at, left, new2);
    if ((threadIdx.x & 31) == 0) {
        *scale1_at = some1 ? __fdiv_rn(max1, MAX1) : 0.0f;
        *scale2_at = some2 ? __fdiv_rn(max2, MAX2) : 0.0f;
    }
#if WEIGHT == 1
    store_words<WHOLE>((u32*)weight + at, left, w);
#else
    store_narrow<WHOLE>((u16*)weight + at, left, new_w);
#if WEIGHT == 0
    store_narrow<WHOLE>(remainder + at, left, new_low);
#endif
#endif
}

// (`first_low`, `first_high`): the piece's first element within its parameter, with `key` and `salt` the counter of its
// random bits.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw8(void* weight, u16* remainder, u8* codes1, float* scales1, u8* codes2, float* scales2, const void* gradient,
       const void* previous, const float* factor, float* square_sums, int n, int aligned, int first_low, int first_high,
       int key, int salt, float decay, float weight1, float beta2, float weight2, float root, float eps,
       float minus_step_size) {
    SHARED_MEMORY(memory);
    let_next_start();
    wait_for_previous();
    const Numbers by = {decay, weight1, beta2, weight2, root, eps, minus_step_size};
    const int whole = aligned && n - (int)blockIdx.x * 4096 >= 4096;
    if (square_sums) {  // reads gradients that come from L1 or L2 below
        if (whole)
            sum_block<1>(gradient, previous, blockIdx.x * 4096, square_sums + blockIdx.x, (float*)memory, n);
        else
            sum_block<0>(gradient, previous, blockIdx.x * 4096, square_sums + blockIdx.x, (float*)memory, n);
    }
    if (whole)
        update<1>(weight, remainder, codes1, scales1, codes2, scales2, gradient, previous, factor, n, first_low,
                  first_high, key, salt, by);
    else
        update<0>(weight, remainder, codes1, scales1, codes2, scales2, gradient, previous, factor, n, first_low,
                  first_high, key, salt, by);
}
