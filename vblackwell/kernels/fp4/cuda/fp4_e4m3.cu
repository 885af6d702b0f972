// Both operands of an FP8 matmul in one launch: a tiled mxfp4 weight as row-major E4M3, each row relative to its
// largest scale, exact where the row spans no more than 2^14 (others are refused before: `check_packed`), and rows
// of x (fp16 with X_FP16; KEPT is how much of one a thread keeps) rounded to E4M3.
//
// A lane's 16 columns of a row are one vector of 16 bytes, and the four lanes of a quad are neighbours: results leave
// from registers. A warp takes a tile of 32 rows by 64 columns, a block WARPS neighbouring ones. bf16 arithmetic makes
// the bytes: E4M3's exponent and mantissa are bits 10 to 4 of a bf16 that is 2^-120 as large, subnormals included, so a
// code needs no conversion from fp32.
#define WARPS 8
// `row_top`: the E5M3 byte of each row's largest scale, which becomes 2^6; `row_scale` says what a row must be
// multiplied by to be the weight.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
prepare_e4m3(const u8* codes, const u8* scales, const float* tensor_scale, const u8* row_top, u8* w, int N, int K, float* row_scale,
             const u16* x, u8* q, float* x_scale, int M, int row_blocks) {
    SHARED_MEMORY(memory);
    let_next_start();
    const int bands = (N + 31) / 32;
    const int row_block = (int)blockIdx.y - bands, band = bands - 1 - (int)blockIdx.y;
    if (row_block >= 0) {
        wait_for_previous();
        const int columns = (K + 64 * WARPS - 1) / (64 * WARPS);  // of blocks
        // of two rows in turns: a warp that is done with one may be a barrier ahead of the others
        float* tops = (float*)memory;
        for (int m = row_block * columns + blockIdx.x; m < M; m += row_blocks * columns) {
            u8* row = q + (u64)m * K;
            round_row(x + (u64)m * K, x_scale + m, K, K, threadIdx.x, tops, [=](int k, uint2 v) { *(uint2*)(row + k) = v; });
            tops = tops == (float*)memory ? tops + WARPS : (float*)memory;
        }
        return;
    }
    // Bands go backwards: the matmul begins with the first rows, which are the ones still in the L2.
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int windows = (K + 63) / 64, window = blockIdx.x * WARPS + warp;
    const u64 tile = (u64)band * windows + min(window, windows - 1);
    const uint4 halves[2] = {load_weights(codes + tile * 1024 + lane * 16), load_weights(codes + tile * 1024 + 512 + lane * 16)};
    const u32 packed = load_scales(scales + tile * 128 + lane * 4);
    u32 units[4];  // scales are 2^(field - 15), like the row's largest
#pragma unroll
    for (int r = 0; r < 4; r++) units[r] = (E4M3_UNIT - ((u32)(row_top[min(band * 32 + r * 8 + g, N - 1)] >> 3) << 7)) * 0x00010001u;
    wait_for_previous();  // w may lie where the previous kernel still reads
    if (window == 0 && band * 32 + lane < N)
        row_scale[band * 32 + lane] = as_float((u32)(127 - 21 + (row_top[band * 32 + lane] >> 3)) << 23) * tensor_scale[0];
    const int k = window * 64 + 16 * t;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint4 q = halves[r >> 1];
        const int n = band * 32 + r * 8 + g;
        const u32 scale = permute_bytes(packed, 0, 0x4040u + 0x0101u * r) * 16u + units[r];
        u32 pairs[8];
        decode(r & 1 ? q.z : q.x, scale, pairs);
        decode(r & 1 ? q.w : q.y, scale, pairs + 4);
        if (n < N && k < K)
            *(uint4*)(w + (u64)n * K + k) = make_uint4(e4m3_bytes(pairs[0], pairs[1]), e4m3_bytes(pairs[2], pairs[3]),
                                                       e4m3_bytes(pairs[4], pairs[5]), e4m3_bytes(pairs[6], pairs[7]));
    }
}
