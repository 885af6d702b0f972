// Norms on the way through fp4_mma (NORM): gains onto staged x or its fragments, statistics of rows.
#define STATISTICS_BYTES (NORM ? 1024 + 1024 * BULK : 0)  // of shared memory; with BULK, squares of each K warp
#define ROW_THREADS (THREADS / TOKENS)  // threads a token has in its statistics, a power of two
#if BULK
#define X_ROWS (TOKENS + NORM)  // of a slot: tokens, the gain
static_assert(!NORM || K_WARPS * TOKENS <= 256, "squares of each K warp have a kilobyte");
#endif
#if BULK && NORM
// x of a window times its gain; onto `squares`, if asked for, x times itself, by rows and columns of tokens.
DEVICE void take_gain(uint4 (*b)[2], u32 gain_address, bool with_squares, float (*squares)[4]) {
    if (with_squares) {
        auto step = [&](u32 low, u32 low8, u32 high, u32 high8) {  // columns 2 t and 8 + 2 t on, of tokens g and 8 + g
            const u32 a[4] = {low, low8, high, high8};
            mma(squares[0], a, low, high);
            if (NB > 1) mma(squares[NB - 1], a, low8, high8);
        };
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 v = b[0][j], v8 = NB > 1 ? b[NB - 1][j] : make_uint4(0, 0, 0, 0);
            step(v.x, v8.x, v.y, v8.y);
            step(v.z, v8.z, v.w, v8.w);
        }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 gain = load_shared(gain_address + 16 * j);
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
            b[nb][j] = make_uint4(multiply_pair(b[nb][j].x, gain.x), multiply_pair(b[nb][j].y, gain.y),
                                  multiply_pair(b[nb][j].z, gain.z), multiply_pair(b[nb][j].w, gain.w));
    }
}
#endif

#if NORM
struct Statistics {
    float partial[32];  // a warp
    float4 block[32];   // a token: first, sum of squares of this block's columns
    float row[32];      // a token: factor of the sums
};
#endif
#if NORM && !BULK
// The sum of `v` over the threads of a token, to each of them; the order is that of the threads.
DEVICE float row_sum(float v, Statistics* statistics, int tid) {
#pragma unroll
    for (int mask = min(ROW_THREADS, 32) / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
#if ROW_THREADS > 32
    __syncthreads();
    if (tid % 32 == 0) statistics->partial[tid / 32] = v;
    __syncthreads();
    v = 0.0f;
    for (int j = 0; j < ROW_THREADS / 32; j++) v += statistics->partial[tid / ROW_THREADS * (ROW_THREADS / 32) + j];
#endif
    return v;
}
DEVICE void unpack(const uint4 v, float* f) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = half_to_float((u16)words[i]);
        f[2 * i + 1] = half_to_float((u16)(words[i] >> 16));
    }
}
// A staged chunk of x becomes x * gain; its own squares, without gain, are added to `squares`.
DEVICE void apply_gain(u32 shared, const u16* gain, int tokens, int K, int first, int windows, int tid,
                       float& squares) {
    const int m = tid / ROW_THREADS;
    if (m >= tokens) return;
    for (int c = tid % ROW_THREADS; c < windows * 8 && first + c * 8 < K; c += ROW_THREADS) {
        const u32 at = shared + (((c >> 3) * 2 + (c & 1)) * TOKENS + m) * 64 + ((c >> 1) & 3) * 16;
        float f[8], g[8];
        unpack(load_shared(at), f);
        unpack(*(const uint4*)(gain + first + c * 8), g);
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 8; i++) squares += f[i] * f[i];
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = to_half_pair(f[2 * i] * g[2 * i], f[2 * i + 1] * g[2 * i + 1]);
        store_shared(at, make_uint4(out[0], out[1], out[2], out[3]));
    }
}
// From squares of this thread's columns to the row's statistics, over block and cluster. Ends before a barrier.
DEVICE void finish_rows(Statistics* statistics, float squares, int K, float eps, int tid) {
    const int m = tid / ROW_THREADS;
    const bool first = tid % ROW_THREADS == 0;
    squares = row_sum(squares, statistics, tid);
#if SPLITS > 1
    if (first) statistics->block[m] = float4{squares, 0.0f, 0.0f, 0.0f};
    cluster_wait_started();
    cluster_sync();
    squares = 0.0f;
    for (int s = 0; first && s < SPLITS; s++) squares += load_remote(shared_address(&statistics->block[m]), s).x;
#endif
    if (first) statistics->row[m] = 1.0f / sqrtf(squares / K + eps);
}
#endif
