// A tiled weight to a row-major one: (code * scale) * tensor_scale in fp32, rounded once to bf16, fp16 or fp32 (OUT 0,
// 1, 2). With PARTS (1; or 0) the weight has fine codes as well (kernels/fp4/layout.py).
//
// A warp takes one tile of 32 rows by 64 columns, a block eight (four for fp32) neighbouring ones, so that the writes
// of a block are runs of whole cache lines. Lanes own 16 columns of 4 rows; shared memory turns that into rows
// (granules of 16 bytes, xor-swizzled).
#define WARPS (OUT == 2 ? 4 : 8)
#if OUT == 2
#define ELEMENT_BYTES 4
#else
#define ELEMENT_BYTES 2
#endif
#if OUT == 1
#define TO_PAIR to_fp16_pair
#else
#define TO_PAIR to_bf16_pair
#endif
#define ROW_GRANULES (64 * ELEMENT_BYTES / 16)

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp4_dequantize(const u8* codes,
#if PARTS
               const u8* fine,
#endif
               const u8* scales, const float* tensor_scale, u8* w, int N, int K) {
    SHARED_MEMORY(memory);
    let_next_start();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int windows = (K + 63) / 64, window = blockIdx.x * WARPS + warp;
    const int band = blockIdx.y;
    if (window >= windows) return;
    uint4* tile_rows = (uint4*)memory + warp * 32 * ROW_GRANULES;
    const u64 tile = (u64)band * windows + window;
    const u8* from = codes + tile * 1024 + lane * 16;
    const uint4 halves[2] = {load_weights(from), load_weights(from + 512)};
#if PARTS
    const u8* fine_from = fine + tile * 1024 + lane * 16;
    const uint4 fine_halves[2] = {load_weights(fine_from), load_weights(fine_from + 512)};
#endif
    const u32 packed = load_scales(scales + tile * 128 + lane * 4);
    const float unit = tensor_scale[0] * WEIGHT_UNIT;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint4 q = halves[r >> 1];
        const u32 scale = scale_pair(packed, r);
        u32 pairs[8];
#if PARTS
        const uint4 f = fine_halves[r >> 1];
        const float factor = as_float(scale << 16);  // times a code it is exact
        decode_parts(r & 1 ? q.z : q.x, r & 1 ? f.z : f.x, 1, pairs);
        decode_parts(r & 1 ? q.w : q.y, r & 1 ? f.w : f.y, 1, pairs + 4);
#else
        const float factor = 1.0f;
        decode_row(q, r, scale, pairs);
#endif
        float v[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[2 * i] = as_float(pairs[i] << 16) * factor * unit;
            v[2 * i + 1] = as_float(pairs[i] & 0xFFFF0000u) * factor * unit;
        }
        uint4* row = tile_rows + (r * 8 + g) * ROW_GRANULES;
#if OUT == 2
#pragma unroll
        for (int i = 0; i < 4; i++)
            row[(4 * t + i) ^ g] = make_uint4(as_bits(v[4 * i]), as_bits(v[4 * i + 1]),
                                              as_bits(v[4 * i + 2]), as_bits(v[4 * i + 3]));
#else
#pragma unroll
        for (int i = 0; i < 2; i++)
            row[(2 * t + i) ^ g] = make_uint4(TO_PAIR(v[8 * i], v[8 * i + 1]), TO_PAIR(v[8 * i + 2], v[8 * i + 3]),
                                              TO_PAIR(v[8 * i + 4], v[8 * i + 5]), TO_PAIR(v[8 * i + 6], v[8 * i + 7]));
#endif
    }
    warp_sync();
    wait_for_previous();  // w may lie where the previous kernel still reads
    const u64 pitch = (u64)K * ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < ROW_GRANULES; i++) {
        const int at = i * 32 + lane, row = at / ROW_GRANULES, granule = at % ROW_GRANULES, n = band * 32 + row;
        const uint4 v = tile_rows[row * ROW_GRANULES + (granule ^ (row & 7))];
        const int k = window * 64 + granule * (16 / ELEMENT_BYTES);
        if (n >= N || k >= K) continue;
        u8* to = w + n * pitch + (u64)k * ELEMENT_BYTES;
        if (pitch % 16 == 0) {
            *(uint4*)to = v;
        } else {
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            for (int b = 0; b < 16 / ELEMENT_BYTES && k + b < K; b++)
                for (int c = 0; c < ELEMENT_BYTES; c++) {
                    const int byte = b * ELEMENT_BYTES + c;
                    to[byte] = (u8)(words[byte >> 2] >> (8 * (byte & 3)));
                }
        }
    }
}
