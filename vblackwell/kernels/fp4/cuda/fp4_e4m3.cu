// Both operands of an FP8 matmul in one launch: a tiled mxfp4 weight as row-major E4M3, each row relative to its
// largest scale, exact where the row spans no more than 2^14 (others are refused before: `check_packed`), and rows
// of x (fp16 with X_FP16; KEPT is how much of one a thread keeps, ROUND_WARPS is WARPS) rounded to E4M3.
//
// A warp takes a tile of 32 rows by 64 columns, a block WARPS neighbouring ones; a lane's 16 columns of a row are one
// vector of 16 bytes. `row_top`: the E5M3 byte of each row's largest scale, which becomes 2^6; `row_scale` says what a
// row must be multiplied by to be the weight.
#define WARPS 8
extern "C" __global__ void __launch_bounds__(WARPS * 32)
prepare_e4m3(const u8* codes, const u8* scales, const float* tensor_scale, const u8* row_top, u8* w, int N, int K,
             float* row_scale, const u16* x, u8* q, float* x_scale, int M, int row_blocks) {
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
            auto put = [=](int k, uint2 v) { *(uint2*)(row + k) = v; };
            round_row(x + (u64)m * K, x_scale + m, K, K, threadIdx.x, tops, put);
            tops = tops == (float*)memory ? tops + WARPS : (float*)memory;
        }
        return;
    }
    // Bands go backwards: the matmul begins with the first rows, which are the ones still in the L2.
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int windows = (K + 63) / 64, window = blockIdx.x * WARPS + warp;
    const u64 tile = (u64)band * windows + min(window, windows - 1);
    const u8* from = codes + tile * 1024 + lane * 16;
    const uint4 halves[2] = {load_weights(from), load_weights(from + 512)};
    const u32 packed = load_scales(scales + tile * 128 + lane * 4);
    u32 units[4];
#pragma unroll
    for (int r = 0; r < 4; r++) units[r] = e4m3_unit(row_top[min(band * 32 + r * 8 + g, N - 1)]);
    wait_for_previous();  // w may lie where the previous kernel still reads
    const int first = band * 32 + lane;
    if (window == 0 && first < N)
        row_scale[first] = as_float((u32)(127 - 21 + (row_top[first] >> 3)) << 23) * tensor_scale[0];
    const int k = window * 64 + 16 * t;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int n = band * 32 + r * 8 + g;
        const uint4 bytes = e4m3_row(halves[r >> 1], packed, r, units[r], true);
        if (n < N && k < K) *(uint4*)(w + (u64)n * K + k) = bytes;
    }
}
