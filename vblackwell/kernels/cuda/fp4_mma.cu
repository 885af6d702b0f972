// y = act(x W^T + bias) for few rows of x: weights are the A operand of mma.m16n8k16, tokens its n = 8.
//
// A warp takes one band of 32 weight rows and a share of K; per 64 columns it loads 2 x 128 bits of codes and 32 bits of
// scales a lane, PREFETCH windows ahead, straight into registers: the layout already is the fragment. ROW_WARPS warps stand side by
// side and share x in shared memory; K_WARPS split K inside the block, SPLITS blocks of a cluster split it further; sums
// meet in shared memory (the cluster's for SPLITS) and are added in a fixed order.
//
// x is staged by chunks of K in fragment order [window][half][token][lane of quad][16 bytes], so that a fragment is one
// conflict-free 128-bit load. Columns beyond K are zeros there, which lets warps read any valid weights past the end.
// Tokens beyond M are never written nor read back: columns of an mma do not mix.
//
// Set by the launcher: FP16, TOKENS (a power of two), ROW_WARPS, K_WARPS, SPLITS, PREFETCH, PASS_TOKENS, MIN_BLOCKS, NORM, OUT32.
#define NB (TOKENS < 8 ? 1 : TOKENS / 8)
#define ROWS (32 * ROW_WARPS)
#define THREADS (32 * ROW_WARPS * K_WARPS)
#define RED_STRIDE (ROWS + 4)
#define PASSES ((TOKENS + PASS_TOKENS - 1) / PASS_TOKENS)
#define PASS_NB (PASS_TOKENS < 8 ? 1 : PASS_TOKENS / 8)

struct Window {
    uint4 half0, half1;
    u32 scales;
};

DEVICE float activate(float z, int activation) {
    if (activation == 1) return z < 0.0f ? 0.0f : z;
    if (activation == 2) return 0.5f * z * (1.0f + erff(z * 0.70710678118654752f));
    if (activation == 3) return z / (1.0f + expf(-z));
    return z;
}

// One window: 32 rows by 64 columns of W times 64 columns of x at `x_address`.
DEVICE void compute(float (*acc)[NB][4], const Window& w, u32 x_address) {
    u32 a[2][4][4];  // [half][step of 16 columns][fragment]
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint4 q = h ? w.half1 : w.half0;
        const u32 upper = scale_pair(w.scales, 2 * h), lower = scale_pair(w.scales, 2 * h + 1);
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

// Chunk `chunk` of x into shared memory: columns [first, first + 64 * windows), tokens [0, tokens).
DEVICE void stage(u32 shared, const u16* x, int tokens, int K, int first, int windows, int tid) {
    const int granules = windows * 8;
    for (int m = 0; m < tokens; m++)
        for (int c = tid; c < granules; c += THREADS) {
            const int k = first + c * 8;
            const u32 to = shared + (((c >> 3) * 2 + (c & 1)) * TOKENS + m) * 64 + ((c >> 1) & 3) * 16;
            const int inside = k < K;
            copy_async(to, x + (u64)m * K + (inside ? k : 0), inside ? 16 : 0);
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
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int band = min((int)blockIdx.x * ROW_WARPS + row_warp, bands - 1);
    const int m0 = blockIdx.z * TOKENS, tokens = min(TOKENS, M - m0);
    x += (u64)m0 * K;

    const u32 shared = shared_address(memory);
    const u32 buffer_bytes = chunk_windows * TOKENS * 128;
    const int per_warp = chunk_windows / K_WARPS;
    const int first = blockIdx.y * chunks * chunk_windows;  // first window of this block
    const u8* band_codes = codes + (u64)band * windows * 1024 + lane * 16;
    const u8* band_scales = scales + (u64)band * windows * 128 + lane * 4;

    stage(shared, x, tokens, K, first * 64, chunk_windows, tid);

    Window buffer[PREFETCH];
    int next = first + k_warp * per_warp, left = per_warp;  // the next window to load, and how many of this chunk remain
    int todo = per_warp * chunks;
#define LOAD(slot)                                                        \
    if (todo-- > 0) {                                                     \
        const u64 at = (u32)min(next, windows - 1);                       \
        buffer[slot].half0 = load_weights(band_codes + at * 1024);        \
        buffer[slot].half1 = load_weights(band_codes + at * 1024 + 512);  \
        buffer[slot].scales = load_scales(band_scales + at * 128);        \
        next++;                                                           \
        if (--left == 0) {                                                \
            next += chunk_windows - per_warp;                             \
            left = per_warp;                                              \
        }                                                                 \
    }
#pragma unroll
    for (int d = 0; d < PREFETCH; d++) LOAD(d)

    float acc[2][NB][4];
#pragma unroll
    for (int i = 0; i < 2 * NB * 4; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] = 0.0f;

    const u32 token = TOKENS < 8 ? min(lane >> 2, TOKENS - 1) : lane >> 2;
    const u32 x_lane = token * 64 + (lane & 3) * 16 + k_warp * per_warp * TOKENS * 128;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copy_wait_all();
        __syncthreads();
        if (chunk + 1 < chunks)
            stage(shared + ((chunk + 1) & 1) * buffer_bytes, x, tokens, K, (first + (chunk + 1) * chunk_windows) * 64,
                  chunk_windows, tid);
        u32 x_address = shared + (chunk & 1) * buffer_bytes + x_lane;
        for (int base = 0; base < per_warp; base += PREFETCH) {
#pragma unroll
            for (int d = 0; d < PREFETCH; d++) {
                if (base + d >= per_warp) break;
                compute(acc, buffer[d], x_address);
                x_address += TOKENS * 128;
                LOAD(d)
            }
        }
    }

    const float unit = tensor_scale[0] * WEIGHT_UNIT;
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
        const int count = min(PASS_TOKENS, tokens - pass * PASS_TOKENS) * ROWS;
#if SPLITS > 1
        for (int e = tid; e < count; e += THREADS) {
            float* at = red + e / ROWS * RED_STRIDE + e % ROWS;
            float sum = at[0];
            for (int j = 1; j < K_WARPS; j++) sum += at[j * PASS_TOKENS * RED_STRIDE];
            at[0] = sum;
        }
        cluster_sync();
        const int rank = cluster_rank();
#else
        const int rank = 0;
#endif
        for (int e = tid + rank * THREADS; e < count; e += THREADS * SPLITS) {
            const int t = e / ROWS, row = e % ROWS, n = blockIdx.x * ROWS + row;
            float* at = red + t * RED_STRIDE + row;
            float sum = 0.0f;
#if SPLITS > 1
#pragma unroll
            for (int s = 0; s < SPLITS; s++) sum += load_remote(shared_address(at), s);
#else
            for (int j = 0; j < K_WARPS; j++) sum += at[j * PASS_TOKENS * RED_STRIDE];
#endif
            if (n < N) {
                float z = sum * unit;
                if (bias) z += half_to_float(bias[n]);
                z = activate(z, activation);
                const u64 out = (u64)(m0 + pass * PASS_TOKENS + t) * N + n;
#if OUT32
                ((float*)y)[out] = z;
#else
                ((u16*)y)[out] = float_to_half(z);
#endif
            }
        }
#if SPLITS > 1
        cluster_sync();
#endif
    }
}
