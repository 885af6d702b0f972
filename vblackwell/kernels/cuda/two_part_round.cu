// A weight rounded to both parts on kept scales and back (numerics/separation.py: round_to_parts), elementwise: what training multiplies by.
//
// A thread takes a block of 16 columns, which has one scale: 32 or 64 contiguous bytes. The arithmetic is the oracle's, operation by operation
// and in fp32; what a compiler may contract is exact either way. NaN stays, and a scale of NaN shows.
//
// Set by the launcher: FP16 (0), IN and OUT: 0 bf16, 1 fp16, 2 fp32.
#define ROUND_THREADS 256

// E4M3 without a sign: steps of 2^-9 below exponent 1, NaN at 0x7F.
DEVICE float e4m3_magnitude(u32 code) {
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

DEVICE float read_one(const void* w, u64 at) {
#if IN == 2
    return ((const float*)w)[at];
#elif IN == 1
    return fp16_to_float(((const u16*)w)[at]);
#else
    return bf16_to_float(((const u16*)w)[at]);
#endif
}
DEVICE void write_one(void* out, u64 at, float v) {
#if OUT == 2
    ((float*)out)[at] = v;
#elif OUT == 1
    ((u16*)out)[at] = (u16)to_fp16_pair(v, v);
#else
    ((u16*)out)[at] = (u16)to_bf16_pair(v, v);
#endif
}

// 16 elements at an address of 16 bytes' alignment.
DEVICE void read_block(const void* w, u64 at, float* v) {
#if IN == 2
    const float4* from = (const float4*)((const float*)w + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 four = from[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
#else
    const uint4* from = (const uint4*)((const u16*)w + at);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 eight = from[i];
        const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
#if IN == 1
            v[8 * i + 2 * j] = fp16_to_float((u16)words[j]);
            v[8 * i + 2 * j + 1] = fp16_to_float((u16)(words[j] >> 16));
#else
            v[8 * i + 2 * j] = as_float(words[j] << 16);
            v[8 * i + 2 * j + 1] = as_float(words[j] & 0xFFFF0000u);
#endif
        }
    }
#endif
}
DEVICE void write_block(void* out, u64 at, const float* v) {
#if OUT == 2
    float4* to = (float4*)((float*)out + at);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = float4{v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
#else
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        words[i] = OUT == 1 ? to_fp16_pair(v[2 * i], v[2 * i + 1]) : to_bf16_pair(v[2 * i], v[2 * i + 1]);
    uint4* to = (uint4*)((u16*)out + at);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
#endif
}

// `aligned`: whether every block of both matrices begins at a multiple of 16 bytes and is whole.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
two_part_round(const void* w, const u8* scales, const float* tensor_scale, void* out, int N, int K, int row_stride, int aligned) {
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
        read_block(w, from, v);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = round_to_parts(v[i], divisor, scale, unit);
        write_block(out, to, v);
    } else {
        for (int i = 0; i < min(16, K - (int)(block * 16)); i++)
            write_one(out, to + i, round_to_parts(read_one(w, from + i), divisor, scale, unit));
    }
}
