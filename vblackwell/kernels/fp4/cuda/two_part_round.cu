// A weight rounded to both parts on kept scales and back (numerics/separation.py: round_to_parts): what training
// multiplies by. A thread takes a block of 16 columns, which has one scale. The arithmetic is the oracle's, operation
// by operation and in fp32; what a compiler may contract is exact either way. NaN stays, and a scale of NaN shows.
//
// Set by the launcher: FP16 (0), IN and OUT: 0 bf16, 1 fp16, 2 fp32.
#define ROUND_THREADS 256

// E4M3 without its sign: steps of 2^-9 below exponent 1, NaN at 0x7F.
DEVICE float e4m3_magnitude(u32 code) {
    code &= 0x7F;
    if (code == 0x7F) return as_float(0x7FC00000u);
    return code < 8 ? (float)code * 0.001953125f : as_float((((code >> 3) + 120) << 23) | ((code & 7) << 20));
}

DEVICE float round_to_parts(float w, float divisor, float scale, float tensor_scale) {
    const float u = fabsf(w) / divisor;
    float position = (u < 2.0f ? u * 2.0f : u < 4.0f ? u + 2.0f : u * 0.5f + 4.0f) * 16.0f;
    if (position > 119.0f) position = 119.0f;
    position = (position + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
    const float low = position * 0.03125f, middle = position * 0.0625f - 2.0f, high = position * 0.125f - 8.0f;
    float value = fmaxf(fmaxf(low, middle), high) * scale * tensor_scale;
    if (u != u) value = u;
    return w < 0.0f ? -value : value;
}

#if IN == 2
typedef float Source;
DEVICE float source_float(Source v) { return v; }
#else
typedef u16 Source;
DEVICE float source_float(Source v) { return IN == 1 ? fp16_to_float(v) : bf16_to_float(v); }
#endif
#if OUT == 2
typedef float Target;
DEVICE Target written(float v) { return v; }
#else
typedef u16 Target;
DEVICE u32 pair(float low, float high) { return OUT == 1 ? to_fp16_pair(low, high) : to_bf16_pair(low, high); }
DEVICE Target written(float v) { return (u16)pair(v, v); }
#endif

// 16 elements at an address of 16 bytes' alignment.
DEVICE void read_block(const Source* from, float* v) {
#pragma unroll
    for (int i = 0; i < sizeof(Source); i++) {
        const uint4 q = ((const uint4*)from)[i];
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
#if IN == 2
            v[4 * i + j] = as_float(words[j]);
#else
            v[8 * i + 2 * j] = source_float((u16)words[j]);
            v[8 * i + 2 * j + 1] = source_float((u16)(words[j] >> 16));
#endif
        }
    }
}
DEVICE void write_block(Target* to, const float* v) {
#pragma unroll
#if OUT == 2
    for (int i = 0; i < 4; i++)
        ((float4*)to)[i] = float4{v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
#else
    for (int i = 0; i < 2; i++)
        ((uint4*)to)[i] = make_uint4(pair(v[8 * i], v[8 * i + 1]), pair(v[8 * i + 2], v[8 * i + 3]),
                                     pair(v[8 * i + 4], v[8 * i + 5]), pair(v[8 * i + 6], v[8 * i + 7]));
#endif
}

// `aligned`: whether every block of both matrices begins at a multiple of 16 bytes and is whole.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
two_part_round(const Source* w, const u8* scales, const float* tensor_scale, Target* out, int N, int K, int row_stride,
               int aligned) {
    let_next_start();
    const u32 blocks = ((u32)K + 15) / 16;
    const u64 index = (u64)blockIdx.x * ROUND_THREADS + threadIdx.x;
    wait_for_previous();
    if (index >= (u64)N * blocks) return;
    const u32 row = (u32)(index / blocks), block = (u32)(index - (u64)row * blocks);
    const float scale = e4m3_magnitude(scales[index]), unit = tensor_scale[0];
    const float divisor = scale == 0.0f ? as_float(0x7F800000u) : scale * unit;
    const u64 from = (u64)row * row_stride + block * 16, to = (u64)row * K + block * 16;
    if (aligned) {
        float v[16];
        read_block(w + from, v);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = round_to_parts(v[i], divisor, scale, unit);
        write_block(out + to, v);
    } else {
        for (int i = 0; i < min(16, K - (int)(block * 16)); i++)
            out[to + i] = written(round_to_parts(source_float(w[from + i]), divisor, scale, unit));
    }
}

// -- how far a weight has drifted from its scales, and new ones (numerics/separation.py: renewed_scales) --------------

// 256 threads' values at `mine`, added or the largest of them, in a fixed order; `memory` has room for them.
DEVICE void reduce_three(float* memory, float* sums, u32* top) {
    const int tid = threadIdx.x;
    float *first = memory, *second = memory + ROUND_THREADS;
    u32* tops = (u32*)(memory + 2 * ROUND_THREADS);
    first[tid] = sums[0], second[tid] = sums[1], tops[tid] = *top;
    for (int half = ROUND_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (tid < half) {
            first[tid] += first[tid + half];
            second[tid] += second[tid + half];
            tops[tid] = max(tops[tid], tops[tid + half]);
        }
    }
    __syncthreads();
    sums[0] = first[0], sums[1] = second[0], *top = tops[0];
}

// The largest magnitude of each block of 16, NaN above all; and for each CTA the sums of |amax - old| and of old, what
// the kept scales were made for, and the largest of all. `scales` may be null.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
two_part_measure(const Source* w, const u8* scales, const float* tensor_scale, float* amax, float* partials, int N,
                 int K, int row_stride, int aligned, int ctas) {
    SHARED_MEMORY(memory);
    let_next_start();
    const u32 blocks = ((u32)K + 15) / 16;
    const u64 total = (u64)N * blocks;
    wait_for_previous();
    const float unit = scales ? tensor_scale[0] * 6.0f : 0.0f;
    float sums[2] = {0.0f, 0.0f};
    u32 top = 0;
    for (u64 index = (u64)blockIdx.x * ROUND_THREADS + threadIdx.x; index < total; index += (u64)ctas * ROUND_THREADS) {
        const u32 row = (u32)(index / blocks), block = (u32)(index - (u64)row * blocks);
        const u64 from = (u64)row * row_stride + block * 16;
        u32 bits = 0;  // of magnitudes, whose order is that of their bits
        if (aligned) {
            float v[16];
            read_block(w + from, v);
#pragma unroll
            for (int i = 0; i < 16; i++) bits = max(bits, as_bits(v[i]) & 0x7FFFFFFFu);
        } else {
            for (int i = 0; i < min(16, K - (int)(block * 16)); i++)
                bits = max(bits, as_bits(source_float(w[from + i])) & 0x7FFFFFFFu);
        }
        amax[index] = as_float(bits);
        top = max(top, bits);
        if (scales) {
            const float old = e4m3_magnitude(scales[index]) * unit;
            sums[0] += fabsf(as_float(bits) - old);
            sums[1] += old;
        }
    }
    reduce_three((float*)memory, sums, &top);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sums[0];
        partials[ctas + blockIdx.x] = sums[1];
        partials[2 * ctas + blockIdx.x] = as_float(top);
    }
}

// 0 to 448, or NaN, to the nearest E4M3, ties to even.
DEVICE u32 e4m3_code(float v) {
    if (v != v) return 0x7F;
    if (v < 0.015625f) return (u32)((v * 512.0f + 12582912.0f) - 12582912.0f);
    const u32 bits = as_bits(v);
    return ((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - (120 << 3);
}

// To `scales` (total) and `tensor_scale`: `kept` where it is not null and may stay, or those of `amax`.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
two_part_renew(const float* amax, const float* partials, const u8* kept, const float* kept_tensor, u8* scales,
               float* tensor_scale, float* drift, int total, int ctas, float threshold) {
    SHARED_MEMORY(memory);
    let_next_start();
    wait_for_previous();
    float sums[2] = {0.0f, 0.0f};
    u32 top = 0;
    for (int i = threadIdx.x; i < ctas; i += ROUND_THREADS) {
        sums[0] += partials[i];
        sums[1] += partials[ctas + i];
        top = max(top, as_bits(partials[2 * ctas + i]));
    }
    reduce_three((float*)memory, sums, &top);
    const float found = sums[0] / (sums[1] < 1.17549435e-38f ? 1.17549435e-38f : sums[1]);
    const bool renews = !kept || !(found <= threshold);
    float unit = as_float(top) / 2688.0f;
    if (unit < 1.17549435e-38f) unit = 1.17549435e-38f;  // 2^-126; NaN stays
    if (top == 0) unit = 1.0f;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *tensor_scale = renews ? unit : *kept_tensor;
        *drift = found;
    }
    const float divisor = 6.0f * unit;
    for (int i = 0; i < 4; i++) {
        const int index = (blockIdx.x * 4 + i) * ROUND_THREADS + threadIdx.x;
        if (index >= total) return;
        float wanted = amax[index] / divisor;
        if (wanted > 448.0f) wanted = 448.0f;
        scales[index] = renews ? (u8)e4m3_code(wanted) : kept[index];
    }
}
