// A weight in two parts written out: (code * scale) * tensor_scale in fp32 rounded once, for many rows and for
// backward.
//
// A tile of 32 rows by 64 columns a warp, four of them a block; a lane writes 16 columns of 4 rows, 32 or 64 contiguous
// bytes. OUT 0 is bf16, 1 fp16, 2 fp32.
extern "C" __global__ void __launch_bounds__(128)
two_part_dequantize(const u8* codes, const u8* fine, const u8* scales, const float* tensor_scale, void* w, int N, int K) {
    let_next_start();
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int windows = (K + 63) / 64, window = blockIdx.x * 4 + (threadIdx.x >> 5), band = blockIdx.y;
    if (window >= windows) return;
    const u64 tile = (u64)band * windows + window;
    const u8* from = codes + tile * 1024 + lane * 16;
    const u8* fine_from = fine + tile * 1024 + lane * 16;
    const uint4 coarse_halves[2] = {load_weights(from), load_weights(from + 512)};
    const uint4 fine_halves[2] = {load_weights(fine_from), load_weights(fine_from + 512)};
    const u32 packed = load_scales(scales + tile * 128 + lane * 4);
    const float unit = tensor_scale[0] * WEIGHT_UNIT;
    wait_for_previous();  // w may lie where the previous kernel still reads
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint4 q = coarse_halves[r >> 1], f = fine_halves[r >> 1];
        const float scale = as_float(scale_pair(packed, r) << 16);
        u32 pairs[8];
        decode_parts(r & 1 ? q.z : q.x, r & 1 ? f.z : f.x, 1, pairs);
        decode_parts(r & 1 ? q.w : q.y, r & 1 ? f.w : f.y, 1, pairs + 4);
        float v[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[2 * i] = as_float(pairs[i] << 16) * scale * unit;  // the first product is exact
            v[2 * i + 1] = as_float(pairs[i] & 0xFFFF0000u) * scale * unit;
        }
        const int n = band * 32 + r * 8 + g, k = window * 64 + t * 16;
        if (n >= N) continue;
        const u64 at = (u64)n * K + k;
#if OUT == 2
        float* to = (float*)w + at;
        for (int i = 0; i < 16; i++)
            if (k + i < K) to[i] = v[i];
#else
        u32 words[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            words[i] = OUT == 1 ? to_fp16_pair(v[2 * i], v[2 * i + 1]) : to_bf16_pair(v[2 * i], v[2 * i + 1]);
        u16* to = (u16*)w + at;
        if (K % 16 == 0) {
            ((uint4*)to)[0] = make_uint4(words[0], words[1], words[2], words[3]);
            ((uint4*)to)[1] = make_uint4(words[4], words[5], words[6], words[7]);
        } else {
            for (int i = 0; i < 16; i++)
                if (k + i < K) to[i] = (u16)(words[i >> 1] >> (16 * (i & 1)));
        }
#endif
    }
}
