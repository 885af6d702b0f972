// The gradient as AdamW's kernels read it, and its sums of squares; split masters.
//
// Sums of squares are those of blocks of 4096, by 512 threads with twice four neighbours, 2048 apart: in a thread the
// two fours onto each other and then pairs, then lanes 16, 8, 4, 2, 1 apart, then warps 8, 4, 2, 1 apart. Elements
// beyond the end count as zeros. The order depends on an element's place in its block and on nothing else;
// kernels/optimizer/adamw.py has the same.
//
// Set by the launcher: GRADIENT (0 bf16, 1 fp32, 2 fp16) and PREVIOUS (0 none, 1 bf16, 2 fp32), the sum of gradients
// before this one.
#define THREADS 512

struct Numbers { float decay, weight1, beta2, weight2, root, eps, minus_step_size; };

// Four elements of 32 bits, or, packed into two words, four of 16 or eight of 8. WHOLE: by one access; otherwise the
// `left` that exist, others zero.
template <int WHOLE, class Element>
DEVICE void load_narrow(const Element* from, int left, u32* to) {
    if (WHOLE) {
        const uint2 v = *(const uint2*)from;
        to[0] = v.x, to[1] = v.y;
    } else {
        constexpr int EACH = 4 / sizeof(Element), BITS = 32 / EACH;  // of a word
        to[0] = to[1] = 0;
#pragma unroll
        for (int i = 0; i < 2 * EACH; i++)
            if (i < left) to[i / EACH] |= (u32)from[i] << (BITS * (i % EACH));
    }
}
template <int WHOLE>
DEVICE void load_words(const u32* from, int left, u32* to) {
    if (WHOLE) {
        const uint4 v = *(const uint4*)from;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = i < left ? from[i] : 0;
    }
}
// Half i of four, as the upper half of a word: a bf16 as fp32.
DEVICE u32 half_on_top(const u32* words, int i) { return i & 1 ? words[i >> 1] & 0xFFFF0000u : words[i >> 1] << 16; }

// What four elements of the gradient were loaded as, and of the sum of those before it.
struct Loaded { u32 gradient[4], previous[4]; };

template <int WHOLE>
DEVICE void load_gradient(Loaded& to, const void* gradient, const void* previous, int at, int left) {
#if GRADIENT == 1
    load_words<WHOLE>((const u32*)gradient + at, left, to.gradient);
#else
    load_narrow<WHOLE>((const u16*)gradient + at, left, to.gradient);
#endif
#if PREVIOUS == 2
    load_words<WHOLE>((const u32*)previous + at, left, to.previous);
#elif PREVIOUS == 1
    load_narrow<WHOLE>((const u16*)previous + at, left, to.previous);
#endif
}
DEVICE float gradient_value(const Loaded& from, int i) {
#if GRADIENT == 1
    const float g = as_float(from.gradient[i]);
#elif GRADIENT == 2
    const float g = fp16_to_float((u16)(from.gradient[i >> 1] >> (16 * (i & 1))));
#else
    const float g = as_float(half_on_top(from.gradient, i));
#endif
#if PREVIOUS == 2
    return __fadd_rn(as_float(from.previous[i]), g);
#elif PREVIOUS == 1
    return __fadd_rn(as_float(half_on_top(from.previous, i)), g);
#else
    return g;
#endif
}

// The sum of squares of a block of which this thread has g.
DEVICE void write_square_sum(const float (*g)[4], float* partial, float* to) {
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = __fadd_rn(__fmul_rn(g[0][i], g[0][i]), __fmul_rn(g[1][i], g[1][i]));
    float sum = __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
#pragma unroll
    for (int apart = 16; apart > 0; apart >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, apart));
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int apart = THREADS / 64; apart > 0; apart >>= 1)
            for (int w = 0; w < apart; w++) partial[w] = __fadd_rn(partial[w], partial[w + apart]);
        *to = partial[0];
    }
}

// That of the block from element `first` on, of n.
template <int WHOLE>
DEVICE void sum_block(const void* gradient, const void* previous, int first, float* out, float* partial, int n) {
    Loaded loaded[2];
    float g[2][4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int at = first + k * 2048 + threadIdx.x * 4;
        load_gradient<WHOLE>(loaded[k], gradient, previous, at, n - at);
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) g[k][i] = gradient_value(loaded[k], i);
    write_square_sum(g, partial, out);
}

// A split master is its weight's bits on top plus the remainder as signed; its weight is it rounded to nearest, ties
// away from zero, and its remainder the low half. A NaN stays one: the GPU's own, 0x7FFFFFFF, would round up to a zero.
DEVICE u32 cut_half(u32 master, u32 added) {
    return (master & 0x7FFFFFFFu) > 0x7F800000u ? (master >> 16) | 0x40u : (master + added) >> 16;
}
DEVICE u32 rounded_half(u32 master) { return cut_half(master, 0x8000u); }
