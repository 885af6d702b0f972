// y = act(x W^T + bias) for few rows of x: weights are the A operand of mma.m16n8k16, tokens its n = 8.
//
// A warp takes one band of 32 weight rows and a share of K; per window of 64 columns a lane needs 2 x 128 bits of codes
// and 32 bits of scales: the layout already is the fragment. They come by cp.async, PREFETCH windows ahead, into a ring
// that is private to the lane, so that waiting takes no barrier. (Of prefetches into registers the oldest could not be
// awaited without the newest.) ROW_WARPS warps stand side by side and share x in shared memory; K_WARPS take turns at
// the windows, SPLITS blocks of a cluster split K further; sums of the warps meet in shared memory, those of the blocks
// are sent to the one that writes the output; both are added in a fixed order.
//
// x is staged by chunks of K in fragment order [window][half][token][lane of quad][16 bytes], so that a fragment is one
// conflict-free 128-bit load. Columns beyond K are zeros there, which lets warps read any valid weights past the end.
// Tokens beyond M are never written nor read back: columns of an mma do not mix.
//
// With BULK (sm_90, K a multiple of 64) rows of x come by bulk copies as they are, CHUNK windows at a time, into
// X_STAGES slots that barriers guard. Rows in shared memory are 16 bytes longer than what they hold, so that a
// fragment, 32 contiguous bytes of a row, is still two conflict-free loads. One warp asks for x as slots come free; the
// first product waits for one round of the warps' rings only, and a round is unrolled.
//
// With NORM the rows of x are normalised on the way, by RMSNorm: the gain of columns goes onto staged x, and the factor
// of a row, known when all of x has passed, onto the sums. With BULK the gain comes as one more row of x and goes onto
// fragments; x times itself, as an mma, has the squares on its diagonal.
//
// With PARTS the weight is in two parts (kernels/fp4/layout.py). The decode adds the fine bits to the coarse ones
// before the one multiplication by the scale, which rounds to bf16: 2^-8 of a weight at most, next to the 2^-6 of a
// code that the fine part resolves. Rounds are not unrolled: CHUNK is any multiple of K_WARPS.
//
// With K_BLOCKS above one, so many blocks of the grid split K where there are no clusters. Each leaves its fp32 sums in
// global memory and counts itself in; the last one adds all of them, its own too, in the blocks' order: which is last
// changes no bit.
//
// Set by the launcher: FP16, TOKENS (a power of two), ROW_WARPS, K_WARPS, SPLITS, PREFETCH, PASS_TOKENS, MIN_BLOCKS,
// OUT32; BULK, and with it CHUNK (a multiple of K_WARPS * PREFETCH) and X_STAGES; NORM, PARTS, K_BLOCKS > 1 or none;
// UNALIGNED, without BULK and NORM: K is no multiple of 8.

#define PASSES ((TOKENS + PASS_TOKENS - 1) / PASS_TOKENS)
// Groups of four outputs, of all tokens, that a block of the cluster writes.
#define SHARE (PASS_TOKENS * (ROWS / 4) / SPLITS)
// After the statistics: sums of the cluster's other blocks, their barrier. In whole lines of 128 bytes: cp.async into
// rings that lie across them takes shared memory 12 cycles a warp, not 4.
#define MAIL_BYTES (SPLITS > 1 && !PARTS ? (16 + (SPLITS - 1) * SHARE * 16 + 127) / 128 * 128 : 0)
#define FRONT_BYTES (STATISTICS_BYTES + MAIL_BYTES)
// Of a window: codes of the upper 16 rows, of the lower; fine codes of both; scales.
#define SCALES_AT (PARTS ? 2048 : 1024)
#define WINDOW_BYTES (SCALES_AT + 128)
static_assert(SPLITS == 1 || PASSES == 1, "sums are sent once");
static_assert(K_BLOCKS == 1 || (SPLITS == 1 && !BULK && !NORM && !PARTS), "one way to split K, of plain products");
static_assert(!UNALIGNED || !(BULK || NORM), "rows that begin anywhere come by halves");
static_assert((ROWS / 4) % SPLITS == 0, "blocks of a cluster write equal shares of every number of tokens");
static_assert(FRONT_BYTES % 128 == 0, "rings lie in whole lines");
#if BULK
#define ROUND (PARTS ? CHUNK : K_WARPS * PREFETCH)  // windows that pass while each warp's ring goes round once
static_assert(CHUNK % ROUND == 0, "each chunk begins at the first slot of the rings");
#endif

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
fp4_mma(const u16* x, const u8* codes,
#if PARTS
        const u8* fine,
#endif
        const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M, int N, int K, int activation,
        int chunk_windows, int chunks
#if PARTS
        , u32 one, int shared_bytes
#elif NORM
        , const u16* gain, float eps
#elif K_BLOCKS > 1
        , float4* left_sums, u32* counters, u32* stale, int stale_count
#endif
) {
    SHARED_MEMORY(memory);
    let_next_start();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int band = min((int)blockIdx.x * ROW_WARPS + row_warp, bands - 1);
    const int m0 = blockIdx.z * TOKENS, tokens = min(TOKENS, M - m0);
#if SPLITS > 1
#if !PARTS
    const u32 mail_barrier = shared_address(memory) + STATISTICS_BYTES;
    const int rank = cluster_rank(), share = tokens * (ROWS / 4) / SPLITS;  // of groups of four outputs
    if (tid == 0) {
        barrier_init(mail_barrier, 1);
        barrier_init_done();
        barrier_expect(mail_barrier, (SPLITS - 1) * share * 16);
    }
#endif
    cluster_arrive_started();
#endif

    // Shared memory: statistics of rows, the mail with its barrier, a ring for each warp, then x (two buffers if there
    // are several chunks, with BULK X_STAGES slots and their barriers); later, after the mail, the sums.
    const u32 ring = shared_address(memory) + FRONT_BYTES + warp * (PREFETCH * WINDOW_BYTES);
    const u32 shared_x = shared_address(memory) + FRONT_BYTES + ROW_WARPS * K_WARPS * PREFETCH * WINDOW_BYTES;
#if BULK
    const int first = windows * (int)blockIdx.y / SPLITS, end = windows * ((int)blockIdx.y + 1) / SPLITS;
    chunks = (end - first + CHUNK - 1) / CHUNK;
#else
    const u32 buffer_bytes = chunk_windows * TOKENS * 128;
    const int per_warp = chunk_windows / K_WARPS;
    const int first = blockIdx.y * chunks * chunk_windows;  // first window of this block
    int todo = per_warp * chunks;
#endif
    const u8* band_codes = codes + (u64)band * windows * 1024 + lane * 16;
#if PARTS
    const u8* band_fine = fine + (u64)band * windows * 1024 + lane * 16;
#endif
    const u8* band_scales = scales + (u64)band * windows * 128 + lane * 4;

#if BULK && !PARTS
    const u8* from_codes = band_codes + (u64)(first + k_warp) * 1024;
    const u8* from_scales = band_scales + (u64)(first + k_warp) * 128;
    // windows of this warp from `from_codes` on, that one included
    int left = (end - first - k_warp + K_WARPS - 1) / K_WARPS;
    const u32 ring_codes = ring + lane * 16, ring_scales = ring + 1024 + lane * 4;
    // A window of this warp to a slot of its ring, by how many of its windows it lies after the pointers.
    auto load = [&](int slot, int offset) {
        if (offset < left) {
            const u8* from = from_codes + offset * (K_WARPS * 1024);
            copy_async(ring_codes + slot * WINDOW_BYTES, from, 16);
            copy_async(ring_codes + slot * WINDOW_BYTES + 512, from + 512, 16);
            copy_async_word(ring_scales + slot * WINDOW_BYTES, from_scales + offset * (K_WARPS * 128), 4);
        }
        copy_commit();
    };
#pragma unroll
    for (int d = 0; d < PREFETCH; d++) load(d, d);
#else
    int next = first + k_warp;  // the next window to load
    auto load = [&](u32 slot) {
#if BULK
        if (next < end) {
            const u32 at = next;
#else
        if (todo-- > 0) {
            const u32 at = min(next, windows - 1);
#endif
#if PARTS
            const u8 *from = band_codes + at * 1024, *from_scales = band_scales + at * 128;
#else
            // From the arguments on, which take no registers: 64 tokens leave few of a thread's 128.
            const u32 place = band * windows + at;
            const u8* from = codes + (u64)(place * 64 + lane) * 16;
            const u8* from_scales = scales + (u64)(place * 32 + lane) * 4;
#endif
            copy_async(slot + lane * 16, from, 16);
            copy_async(slot + lane * 16 + 512, from + 512, 16);
#if PARTS
            const u8* fine_from = band_fine + at * 1024;
            copy_async(slot + lane * 16 + 1024, fine_from, 16);
            copy_async(slot + lane * 16 + 1536, fine_from + 512, 16);
#endif
            copy_async_word(slot + SCALES_AT + lane * 4, from_scales, 4);
            next += K_WARPS;
        }
        copy_commit();
    };
#pragma unroll
    for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
#endif
    const float unit = tensor_scale[0] * WEIGHT_UNIT;

    float acc[2][NB][4];
#pragma unroll
    for (int i = 0; i < 2 * NB * 4; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] = 0.0f;
    const u32 token = TOKENS < 8 ? min(lane >> 2, TOKENS - 1) : lane >> 2;
#if NORM
    Statistics* statistics = (Statistics*)memory;
#endif
#if NORM && BULK
    float squares[NB][4];
#pragma unroll
    for (int i = 0; i < NB * 4; i++) squares[i / 4][i % 4] = 0.0f;
#elif NORM
    float squares = 0.0f;
#endif
    // The window at `w_address` (this lane's 16 bytes) times 64 columns of x.
    auto compute = [&](u32 w_address, u32 scale_address, u32 x_address) {
        u32 a[2][4][4];  // [half][step of 16 columns][fragment]
        const u32 scales = load_shared_word(scale_address);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 q = load_shared(w_address + h * 512);
#if PARTS
            const uint4 f = load_shared(w_address + 1024 + h * 512);
            decode_part_rows(q, f, scale_pair(scales, 2 * h), scale_pair(scales, 2 * h + 1), one, a[h]);
#else
            decode_rows(q, scale_pair(scales, 2 * h), scale_pair(scales, 2 * h + 1), a[h]);
#endif
        }
        uint4 b[NB][2];
#pragma unroll
        for (int i = 0; i < 2 * NB; i++) b[i / 2][i % 2] = load_shared(x_address + i / 2 * X_GROUP + i % 2 * X_HALF);
#if BULK && NORM
        take_gain(b, x_address + (TOKENS - token) * X_PITCH, row_warp == 0, squares);
#endif
#pragma unroll
        for (int nb = 0; nb < NB; nb++) multiply_tokens(acc, a, nb, b[nb][0], b[nb][1]);
    };
#if !BULK || PARTS
    u32 slot = 0;
    auto compute_next = [&](u32 x_address) {
        const u32 at = ring + slot;
        copy_wait<PREFETCH - 1>();
        compute(at + lane * 16, at + SCALES_AT + lane * 4, x_address);
        load(at);
        slot = slot == (PREFETCH - 1) * WINDOW_BYTES ? 0 : slot + WINDOW_BYTES;
    };
#endif
    x += (u64)m0 * K;
#if BULK
    const u32 full = shared_x + X_STAGES * X_ROWS * X_PITCH, empty = full + 8 * X_STAGES;
    // The first round of windows, which all warps wait for, has a separate barrier where a chunk is longer.
    const u32 early = CHUNK > ROUND ? empty + 8 * X_STAGES : full;
    if (tid == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, ROW_WARPS * K_WARPS);
        }
        if (CHUNK > ROUND) barrier_init(early, 1);
        barrier_init_done();
    }
    __syncthreads();
    // windows of a chunk, by one warp: a lane asks for a row
    auto fetch = [&](int chunk, int skipped, int most, u32 barrier) {
        const int from = first + chunk * CHUNK + skipped, count = min(most, end - from);
        if (count <= 0) return;
        if (lane == 0) barrier_expect(barrier, (tokens + NORM) * count * 128);
        warp_sync();
        const u32 to = shared_x + chunk % X_STAGES * (X_ROWS * X_PITCH) + skipped * 128;
        if (lane < tokens) copy_bulk(to + lane * X_PITCH, x + (u64)lane * K + from * 64, count * 128, barrier);
#if NORM
        if (lane == 31) copy_bulk(to + TOKENS * X_PITCH, gain + from * 64, count * 128, barrier);
#endif
    };
    if (warp == 0) {
        wait_for_previous();  // the others see x, and with it the previous kernel's end, through the barriers
        fetch(0, 0, ROUND, early);
        fetch(0, ROUND, CHUNK - ROUND, full);
        for (int chunk = 1; chunk < min(X_STAGES, chunks); chunk++) fetch(chunk, 0, CHUNK, full + 8 * chunk);
    }
    const u32 x_lane = shared_x + token * X_PITCH + (lane & 3) * 32 + k_warp * 128;
    int stage = 0, previous = 0;
    u32 parity = 0, previous_parity = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (warp == 0 && chunk > 0 && chunk - 1 + X_STAGES < chunks) {
            barrier_wait(empty + 8 * previous, previous_parity);
            fetch(chunk - 1 + X_STAGES, 0, CHUNK, full + 8 * previous);
        }
        const int size = min(CHUNK, end - first - chunk * CHUNK);
        barrier_wait(chunk == 0 ? early : full + 8 * stage, parity);
        u32 x_address = x_lane + stage * (X_ROWS * X_PITCH);
#if PARTS
        const int mine = size - k_warp;
#pragma unroll 2
        for (int i = 0; i < mine; i += K_WARPS) {
            compute_next(x_address);
            x_address += K_WARPS * 128;
        }
#else
        bool waits = chunk == 0 && size > ROUND;  // for what comes after the first round
        int mine = (size - k_warp + K_WARPS - 1) / K_WARPS;
        auto multiply = [&](int slot, int offset) {
            compute(ring_codes + slot * WINDOW_BYTES, ring_scales + slot * WINDOW_BYTES,
                    x_address + offset * (K_WARPS * 128));
        };
        for (; mine >= PREFETCH; mine -= PREFETCH) {
#pragma unroll
            for (int d = 0; d < PREFETCH; d++) {
                copy_wait<PREFETCH - 1>();
                multiply(d, d);
                load(d, d + PREFETCH);
            }
            left -= PREFETCH;
            from_codes += PREFETCH * K_WARPS * 1024;
            from_scales += PREFETCH * K_WARPS * 128;
            x_address += PREFETCH * K_WARPS * 128;
            if (waits) barrier_wait(full, 0);
            waits = false;
        }
        if (mine > 0) copy_wait_all();
#pragma unroll 1
        for (int d = 0; d < mine; d++) multiply(d, d);  // the last of all
#endif
        warp_sync();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        previous = stage;
        previous_parity = parity;
        next_stage<X_STAGES>(stage, parity);
    }
    copy_wait_all();
#if NORM
    float* parts = (float*)(memory + 1024);  // [K_WARPS][TOKENS]
    const int g = lane >> 2;
    if (row_warp == 0 && (lane & 3) == g >> 1)  // the diagonal
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
            if (g < TOKENS) parts[k_warp * TOKENS + nb * 8 + g] = g & 1 ? squares[nb][2 * nb + 1] : squares[nb][2 * nb];
    __syncthreads();
    float sum = 0.0f;
    if (tid < TOKENS)
        for (int j = 0; j < K_WARPS; j++) sum += parts[j * TOKENS + tid];
#if SPLITS > 1
    if (tid < TOKENS) statistics->block[tid] = float4{sum, 0.0f, 0.0f, 0.0f};
    cluster_wait_started();
    cluster_sync();
    sum = 0.0f;
    if (tid < TOKENS)
        for (int s = 0; s < SPLITS; s++) sum += load_remote(shared_address(&statistics->block[tid]), s).x;
#endif
    if (tid < TOKENS) statistics->row[tid] = 1.0f / sqrtf(sum / K + eps);
#endif
#else
    wait_for_previous();
    stage(shared_x, x, tokens, K, first * 64, chunk_windows, tid);
    copy_wait_all();

    const u32 x_lane = token * 64 + (lane & 3) * 16 + k_warp * TOKENS * 128;
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (chunk > 0) copy_wait<PREFETCH - 1>();  // x of this chunk came with a group at least PREFETCH windows old
        __syncthreads();
        if (chunk + 1 < chunks)
            stage(shared_x + ((chunk + 1) & 1) * buffer_bytes, x, tokens, K, (first + (chunk + 1) * chunk_windows) * 64,
                  chunk_windows, tid);
#if NORM
        apply_gain(shared_x + (chunk & 1) * buffer_bytes, gain, tokens, K, (first + chunk * chunk_windows) * 64,
                   chunk_windows, tid, squares);
        __syncthreads();
#endif
        u32 x_address = shared_x + (chunk & 1) * buffer_bytes + x_lane;
#pragma unroll 2
        for (int i = 0; i < per_warp; i++) {
            compute_next(x_address);
            x_address += K_WARPS * TOKENS * 128;
        }
    }
    copy_wait_all();
#if NORM
    finish_rows(statistics, squares, K, eps, tid);
#endif
#endif

#if SPLITS > 1 && !NORM && !PARTS
    cluster_wait_started();
#endif
    // Group `e` of four outputs of the block, tokens outermost.
    auto finish = [&](int e, float4 sum) {
        const int t = e / (ROWS / 4), n = blockIdx.x * ROWS + e % (ROWS / 4) * 4;
        float scale = unit;
#if NORM
        scale *= statistics->row[t];
#endif
        if (n < N) store4(y, m0 + t, n, N, sum, scale, bias, activation);
    };
#if K_BLOCKS > 1
    const int tile = blockIdx.z * ((bands + ROW_WARPS - 1) / ROW_WARPS) + blockIdx.x, groups = TOKENS * (ROWS / 4);
    left_sums += (u64)tile * K_BLOCKS * groups;  // [K_BLOCKS][groups]
#endif
    float* red = (float*)(memory + FRONT_BYTES);  // [K_WARPS][PASS_TOKENS][RED_STRIDE]
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        __syncthreads();
        put_sums<PASS_TOKENS>(red, acc, pass * (PASS_TOKENS / 8), row_warp, k_warp, lane);
        __syncthreads();
        const int outputs = (PARTS ? tokens : min(PASS_TOKENS, tokens - pass * PASS_TOKENS)) * (ROWS / 4);
        const int before = pass * PASS_TOKENS * (ROWS / 4);
#if K_BLOCKS > 1
        for (int e = tid; e < outputs; e += THREADS)
            left_sums[blockIdx.y * groups + before + e] = block_sum<PASS_TOKENS>(red, e);
#elif SPLITS == 1
        for (int e = tid; e < outputs; e += THREADS) finish(before + e, block_sum<PASS_TOKENS>(red, e));
#elif PARTS
        // Group e is finished by block e % SPLITS, to which each block sends its sum: a place for every block's, beyond
        // all that another one may still be reading. So blocks meet once, and no block waits for an answer.
        const int rank = cluster_rank(), given = shared_bytes - TOKENS * ROWS * 4;
        const u32 place = shared_address(memory) + given;
        cluster_wait_started();
        for (int e = tid; e < outputs; e += THREADS)
            store_remote(place + (rank * SHARE + e / SPLITS) * 16, e % SPLITS, block_sum<TOKENS>(red, e));
        cluster_sync();
        const float4* sums = (const float4*)(memory + given);
        for (int i = tid; i * SPLITS + rank < outputs; i += THREADS) {
            float4 sum = sums[i];
#pragma unroll
            for (int s = 1; s < SPLITS; s++) add4(sum, sums[s * SHARE + i]);
            finish(i * SPLITS + rank, sum);
        }
#else
        // Each block sends the others their shares, and adds, in the blocks' order, what it was sent to its own. No
        // block waits for the end of another: a block sends after all that it reads of others (the statistics of rows),
        // and ends after what all others sent.
        const float4* mail = (const float4*)(memory + STATISTICS_BYTES + 16);  // [SPLITS - 1][share]
        const int own = rank * share;
#pragma unroll
        for (int s = 1; s < SPLITS; s++) {
            const int to = rank + s < SPLITS ? rank + s : rank + s - SPLITS, slot = rank < to ? rank : rank - 1;
            for (int i = tid; i < share; i += THREADS)
                send(mail_barrier + 16 + (slot * share + i) * 16, mail_barrier, to,
                     block_sum<PASS_TOKENS>(red, to * share + i));
        }
        if (tid < share) barrier_wait_cluster(mail_barrier, 0);
        for (int i = tid; i < share; i += THREADS) {
            float4 sum = block_sum<PASS_TOKENS>(red, own + i);
            const float4 block = sum;
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
                const float4 part = s == rank ? block : mail[(s < rank ? s : s - 1) * share + i];
                if (s == 0) sum = part;
                else add4(sum, part);
            }
            finish(own + i, sum);
        }
#endif
    }
#if K_BLOCKS > 1
    if (tile == 0 && blockIdx.y == 0)
        for (int i = tid; i < stale_count; i += THREADS) stale[i] = 0;
    u32* arrived = (u32*)memory;  // how many blocks before this one
    __syncthreads();
    if (tid == 0) *arrived = add_acquire_release(counters + tile, 1);
    __syncthreads();
    if (*arrived < K_BLOCKS - 1) return;
    constexpr int AT_ONCE = 4;  // outputs of a thread whose sums are on their way at the same time
    const int outputs = tokens * (ROWS / 4);
    for (int first_e = tid; first_e < outputs; first_e += AT_ONCE * THREADS) {
        float4 sums[AT_ONCE];
#pragma unroll
        for (int b = 0; b < K_BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float4 part = left_sums[b * groups + min(first_e + i * THREADS, outputs - 1)];
                if (b == 0) sums[i] = part;
                else add4(sums[i], part);
            }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first_e + i * THREADS < outputs) finish(first_e + i * THREADS, sums[i]);
    }
#endif
}
