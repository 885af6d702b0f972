// What a block of `fp4_mma` is made of: x in shared memory, products, and sums.
#define NB (TOKENS < 8 ? 1 : TOKENS / 8)
#define ROWS (32 * ROW_WARPS)
#define THREADS (32 * ROW_WARPS * K_WARPS)
#define RED_STRIDE (ROWS + 4)
// Where a lane finds x in shared memory, for mma.m16n8k16: rows as bulk copies bring them (BULK, CHUNK windows a slot,
// 16 bytes longer than what they hold), or fragments in their order.
#if BULK
#define X_PITCH (CHUNK * 128 + 16)
#define X_GROUP (8 * X_PITCH)  // from a token to the eighth after it
#define X_HALF 16              // from a block's first eight columns to the others
#else
#define X_GROUP 512
#define X_HALF (TOKENS * 64)
#endif

// A chunk of x, columns [first, first + 64 * windows), into shared memory in fragment order; zeros beyond K. UNALIGNED
// rows do not all begin at multiples of 16 bytes, and come by halves.
DEVICE void stage(u32 shared, const u16* x, int tokens, int K, int first, int windows, int tid) {
    const int granules = windows * 8, step_m = THREADS / granules, step_c = THREADS % granules;
    int m = tid / granules, c = tid % granules;
#if !UNALIGNED
    if (step_c == 0) {  // the same columns of other tokens: next to nothing to compute
        const int k = first + c * 8;
        u32 to = shared + (((c >> 3) * 2 + (c & 1)) * TOKENS + m) * 64 + ((c >> 1) & 3) * 16;
        const u16* from = x + (u64)m * K + min(k, K - 8);
#pragma unroll 1
        for (; m < tokens; m += step_m) {
            copy_async(to, from, k < K ? 16 : 0);
            from += step_m * K;
            to += step_m * 64;
        }
        return;
    }
#endif
    while (m < tokens) {
        const int k = first + c * 8;
        const u32 to = shared + (((c >> 3) * 2 + (c & 1)) * TOKENS + m) * 64 + ((c >> 1) & 3) * 16;
#if UNALIGNED
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = load_pair(x + (u64)m * K, k + 2 * i, K);
        store_shared(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
#else
        copy_async(to, x + (u64)m * K + min(k, K - 8), k < K ? 16 : 0);
#endif
        m += step_m;
        c += step_c;
        if (c >= granules) {
            c -= granules;
            m++;
        }
    }
}

// A window's fragments [half][step of 16 columns] times 8 tokens of its 64 columns of x, onto the sums.
DEVICE void multiply_tokens(float (*acc)[NB][4], const u32 (*a)[4][4], int nb, const uint4 b0, const uint4 b1) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        mma(acc[h][nb], a[h][0], b0.x, b0.y);
        mma(acc[h][nb], a[h][1], b0.z, b0.w);
        mma(acc[h][nb], a[h][2], b1.x, b1.y);
        mma(acc[h][nb], a[h][3], b1.z, b1.w);
    }
}

// A warp's sums of TOKENS_NOW tokens, from the first-th eight on, to `red`: [K_WARPS][TOKENS_NOW][RED_STRIDE].
template <int TOKENS_NOW>
DEVICE void put_sums(float* red, const float (*acc)[NB][4], int first, int row_warp, int k_warp, int lane) {
#pragma unroll
    for (int b = 0; b < (TOKENS_NOW < 8 ? 1 : TOKENS_NOW / 8); b++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int t = b * 8 + (lane & 3) * 2 + (c & 1);
                const int row = row_warp * 32 + h * 16 + (c >> 1) * 8 + (lane >> 2);
                if (TOKENS >= 8 || t < TOKENS) red[(k_warp * TOKENS_NOW + t) * RED_STRIDE + row] = acc[h][first + b][c];
            }
}

// A block's sum of group `e` of `put_sums`, four rows of a token, tokens outermost; K warps in their order.
template <int TOKENS_NOW>
DEVICE float4 block_sum(const float* red, int e) {
    const float* at = red + e / (ROWS / 4) * RED_STRIDE + e % (ROWS / 4) * 4;
    float4 sum = *(float4*)at;
    for (int j = 1; j < K_WARPS; j++) add4(sum, *(float4*)(at + j * TOKENS_NOW * RED_STRIDE));
    return sum;
}
