// y = act(x W^T + bias) for few rows of x: weights are the A operand of mma.m16n8k16, tokens its n = 8.
//
// A warp takes one band of 32 weight rows and a share of K; per window of 64 columns a lane needs 2 x 128 bits of codes and 32 bits
// of scales: the layout already is the fragment. They come by cp.async, PREFETCH windows ahead, into a ring that is private to the lane,
// so that waiting takes no barrier. (Prefetching into registers does not work: the compiler gives all loads one scoreboard, and
// waiting for the oldest waits for the newest.) ROW_WARPS warps stand side by side and share x in shared memory; K_WARPS take turns at the
// windows, SPLITS blocks of a cluster split K further; sums meet in shared memory (the cluster's for SPLITS) and are added in
// a fixed order.
//
// x is staged by chunks of K in fragment order [window][half][token][lane of quad][16 bytes], so that a fragment is one
// conflict-free 128-bit load. Columns beyond K are zeros there, which lets warps read any valid weights past the end.
// Tokens beyond M are never written nor read back: columns of an mma do not mix.
//
// Set by the launcher: FP16, TOKENS (a power of two), ROW_WARPS, K_WARPS, SPLITS, PREFETCH, PASS_TOKENS, MIN_BLOCKS, OUT32.
#define NB (TOKENS < 8 ? 1 : TOKENS / 8)
#define ROWS (32 * ROW_WARPS)
#define THREADS (32 * ROW_WARPS * K_WARPS)
#define RED_STRIDE (ROWS + 4)
#define PASSES ((TOKENS + PASS_TOKENS - 1) / PASS_TOKENS)
#define PASS_NB (PASS_TOKENS < 8 ? 1 : PASS_TOKENS / 8)
#define WINDOW_BYTES 1152  // codes of the upper 16 rows, of the lower 16 rows, scales

// The window at `w_address` (this lane's 16 bytes) times 64 columns of x at `x_address`.
DEVICE void compute(float (*acc)[NB][4], u32 w_address, u32 scale_address, u32 x_address) {
    u32 a[2][4][4];  // [half][step of 16 columns][fragment]
    const u32 scales = load_shared_word(scale_address);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint4 q = load_shared(w_address + h * 512);
        const u32 upper = scale_pair(scales, 2 * h), lower = scale_pair(scales, 2 * h + 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 top[4], bottom[4];
            decode(i ? q.y : q.x, upper, top);
            decode(i ? q.w : q.z, lower, bottom);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                a[h][2 * i + (j >> 1)][2 * (j & 1)] = top[j];
                a[h][2 * i + (j >> 1)][2 * (j & 1) + 1] = bottom[j];
            }
        }
    }
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        const uint4 b0 = load_shared(x_address + nb * 512), b1 = load_shared(x_address + nb * 512 + TOKENS * 64);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            mma(acc[h][nb], a[h][0], b0.x, b0.y);
            mma(acc[h][nb], a[h][1], b0.z, b0.w);
            mma(acc[h][nb], a[h][2], b1.x, b1.y);
            mma(acc[h][nb], a[h][3], b1.z, b1.w);
        }
    }
}

// A chunk of x into shared memory: columns [first, first + 64 * windows), tokens [0, tokens).
DEVICE void stage(u32 shared, const u16* x, int tokens, int K, int first, int windows, int tid) {
    const int granules = windows * 8, step_m = THREADS / granules, step_c = THREADS % granules;
    int m = tid / granules, c = tid % granules;
    while (m < tokens) {
        const int k = first + c * 8;
        const u32 to = shared + (((c >> 3) * 2 + (c & 1)) * TOKENS + m) * 64 + ((c >> 1) & 3) * 16;
        copy_async(to, x + (u64)m * K + min(k, K - 8), k < K ? 16 : 0);
        m += step_m;
        c += step_c;
        if (c >= granules) {
            c -= granules;
            m++;
        }
    }
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
fp4_mma(const u16* x, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M, int N,
        int K, int activation, int chunk_windows, int chunks) {
    SHARED_MEMORY(memory);
    let_next_start();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int band = min((int)blockIdx.x * ROW_WARPS + row_warp, bands - 1);
    const int m0 = blockIdx.z * TOKENS, tokens = min(TOKENS, M - m0);

    // Shared memory: a ring for each warp, then x (two buffers if there are several chunks); later the sums.
    const u32 ring = shared_address(memory) + warp * (PREFETCH * WINDOW_BYTES);
    const u32 shared_x = shared_address(memory) + ROW_WARPS * K_WARPS * PREFETCH * WINDOW_BYTES;
    const u32 buffer_bytes = chunk_windows * TOKENS * 128;
    const int per_warp = chunk_windows / K_WARPS;
    const int first = blockIdx.y * chunks * chunk_windows;  // first window of this block
    const u8* band_codes = codes + (u64)band * windows * 1024 + lane * 16;
    const u8* band_scales = scales + (u64)band * windows * 128 + lane * 4;

    int next = first + k_warp, todo = per_warp * chunks;  // the next window to load, and how many remain
    auto load = [&](u32 slot) {
        if (todo-- > 0) {
            const u32 at = min(next, windows - 1);
            const u8* from = band_codes + (u64)at * 1024;
            copy_async(slot + lane * 16, from, 16);
            copy_async(slot + lane * 16 + 512, from + 512, 16);
            copy_async_word(slot + 1024 + lane * 4, band_scales + (u64)at * 128, 4);
            next += K_WARPS;
        }
        copy_commit();
    };
#pragma unroll
    for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
    const float unit = tensor_scale[0] * WEIGHT_UNIT;

    wait_for_previous();
    x += (u64)m0 * K;
    stage(shared_x, x, tokens, K, first * 64, chunk_windows, tid);
    copy_wait_all();

    float acc[2][NB][4];
#pragma unroll
    for (int i = 0; i < 2 * NB * 4; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] = 0.0f;

    const u32 token = TOKENS < 8 ? min(lane >> 2, TOKENS - 1) : lane >> 2;
    const u32 x_lane = token * 64 + (lane & 3) * 16 + k_warp * TOKENS * 128;
    u32 slot = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (chunk > 0) copy_wait<PREFETCH - 1>();  // x of this chunk came with a group at least PREFETCH windows old
        __syncthreads();
        if (chunk + 1 < chunks)
            stage(shared_x + ((chunk + 1) & 1) * buffer_bytes, x, tokens, K, (first + (chunk + 1) * chunk_windows) * 64,
                  chunk_windows, tid);
        u32 x_address = shared_x + (chunk & 1) * buffer_bytes + x_lane;
#pragma unroll 2
        for (int i = 0; i < per_warp; i++) {
            const u32 at = ring + slot;
            copy_wait<PREFETCH - 1>();
            compute(acc, at + lane * 16, at + 1024 + lane * 4, x_address);
            load(at);
            x_address += K_WARPS * TOKENS * 128;
            slot = slot == (PREFETCH - 1) * WINDOW_BYTES ? 0 : slot + WINDOW_BYTES;
        }
    }
    copy_wait_all();

    float* red = (float*)memory;  // [K_WARPS][PASS_TOKENS][RED_STRIDE]
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        __syncthreads();
#pragma unroll
        for (int b = 0; b < PASS_NB; b++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int t = b * 8 + (lane & 3) * 2 + (c & 1);
                    const int row = row_warp * 32 + h * 16 + (c >> 1) * 8 + (lane >> 2);
                    if (TOKENS >= 8 || t < TOKENS)
                        red[(k_warp * PASS_TOKENS + t) * RED_STRIDE + row] = acc[h][pass * PASS_NB + b][c];
                }
        __syncthreads();
        const int count = min(PASS_TOKENS, tokens - pass * PASS_TOKENS) * (ROWS / 4);  // groups of four rows
#if SPLITS > 1
        for (int e = tid; e < count; e += THREADS) {
            float* at = red + e / (ROWS / 4) * RED_STRIDE + e % (ROWS / 4) * 4;
            float4 sum = *(float4*)at;
            for (int j = 1; j < K_WARPS; j++) add4(sum, *(float4*)(at + j * PASS_TOKENS * RED_STRIDE));
            *(float4*)at = sum;
        }
        cluster_sync();
        const int rank = cluster_rank();
#else
        const int rank = 0;
#endif
        for (int e = tid + rank * THREADS; e < count; e += THREADS * SPLITS) {
            const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
            float* at = red + t * RED_STRIDE + row;
#if SPLITS > 1
            float4 sum = load_remote(shared_address(at), 0);
#pragma unroll
            for (int s = 1; s < SPLITS; s++) add4(sum, load_remote(shared_address(at), s));
#else
            float4 sum = *(float4*)at;
            for (int j = 1; j < K_WARPS; j++) add4(sum, *(float4*)(at + j * PASS_TOKENS * RED_STRIDE));
#endif
            if (n < N) store4(y, m0 + pass * PASS_TOKENS + t, n, N, sum, unit, bias, activation);
        }
#if SPLITS > 1
        cluster_sync();
#endif
    }
}
