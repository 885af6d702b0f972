// What a block of fp4_mma is made of, by what the launcher sets (fp4_mma.cu), and how its shared memory is laid out.
#define NB (TOKENS < 8 ? 1 : TOKENS / 8)
#define ROWS (32 * ROW_WARPS)
#define THREADS (32 * ROW_WARPS * K_WARPS)
#define RED_STRIDE (ROWS + 4)
#define PASSES ((TOKENS + PASS_TOKENS - 1) / PASS_TOKENS)
#define PASS_NB (PASS_TOKENS < 8 ? 1 : PASS_TOKENS / 8)
#ifndef NORM
#define NORM 0
#endif
#define STATISTICS_BYTES (NORM ? 1024 + 1024 * BULK : 0)  // of shared memory, before everything else; with BULK, squares of each K warp
#define SHARE (PASS_TOKENS * (ROWS / 4) / SPLITS)  // groups of four outputs, of all tokens, that a block of the cluster writes
// Behind the statistics: sums of the cluster's other blocks, their barrier. In whole lines of 128 bytes: cp.async into rings that lie across them
// takes shared memory 12 cycles a warp, not 4.
#define MAIL_BYTES (SPLITS > 1 ? (16 + (SPLITS - 1) * SHARE * 16 + 127) / 128 * 128 : 0)
#define FRONT_BYTES (STATISTICS_BYTES + MAIL_BYTES)
static_assert(SPLITS == 1 || PASSES == 1, "sums are sent once");
static_assert((ROWS / 4) % SPLITS == 0, "blocks of a cluster write equal shares of every number of tokens");
#define ROW_THREADS (THREADS / TOKENS)      // threads a token has in its statistics, a power of two
#define PIVOT_COLUMNS 512
#define WINDOW_BYTES 1152  // codes of the upper 16 rows, of the lower 16 rows, scales
static_assert(FRONT_BYTES % 128 == 0, "rings lie in whole lines");
#if BULK
#define ROUND (K_WARPS * PREFETCH)  // windows that pass while each warp's ring goes round once
static_assert(CHUNK % ROUND == 0, "each chunk begins at the first slot of the rings");
static_assert(!NORM || K_WARPS * TOKENS <= 256, "squares of each K warp have a kilobyte");
#define X_ROWS (TOKENS + NORM)  // of a slot: tokens, the gain
#endif
