// y = act(x W^T + bias) for tens to hundreds of rows of x (sm_90a): weights are the A operand of wgmma, decoded into registers,
// tokens its n, from shared memory.
//
// A block takes 64 * GROUPS weight rows and TOKENS tokens; each of its GROUPS warpgroups owns 64 rows, and KGROUPS such sets share the windows
// of 64 columns. Codes and scales come by cp.async, PREFETCH windows ahead, into a ring that is private to the lane, so that waiting
// for them takes no barrier; the next window is decoded into registers while the tensor cores work on this one. One more
// warpgroup brings x, STAGES windows deep.
//
// SPLITS == 1: the sets take turns at windows; their sums meet in shared memory. More: SPLITS blocks of a cluster share TILES tiles of rows, and
// every set has one part of PARTS of one tile's windows, in a row. A set sends the others of its tile their shares of the tokens, whose bytes a
// barrier counts in, adds what it was sent to its own, and writes its share. All is added in a fixed order.
//
// A stage of x is TOKENS rows of 128 bytes with the 128-byte swizzle, columns inside a window permuted as the tiled layout
// permutes them, zeros beyond K. A kernel before this one (`arrange`) has written that form, and a stage is one bulk copy.
//
// Set by the launcher: FP16, TOKENS, GROUPS, KGROUPS, SPLITS, TILES, STAGES (of each K group the same, two or more), PREFETCH (even),
// REGISTERS (a consumer thread's), OUT32, AT_LAUNCH: every thread's registers when a block starts. They leave room for a block of `arrange`,
// that of the next product, which waits beside this kernel; so the next one's weights are on their way while its x is arranged.
static_assert(KGROUPS == 1 || (STAGES % KGROUPS == 0 && STAGES >= 2 * KGROUPS), "a stage belongs to one K group");
#define PARTS (SPLITS * KGROUPS / TILES)  // of a tile's windows
static_assert(SPLITS * KGROUPS % TILES == 0 && (SPLITS > 1 || TILES == 1), "parts of tiles are whole sets of warpgroups");
static_assert(SPLITS == 1 || TOKENS % (8 * PARTS) == 0, "sets share whole groups of 8 tokens");
static_assert(PREFETCH % 2 == 0, "slots of the ring and the two sets of fragments go round together");
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS * KGROUPS)
#define THREADS (CONSUMERS + 128)  // registers move between warpgroups, so the copying warp costs a whole one
#define ARRANGE_THREADS 128
#define STAGE_BYTES (TOKENS * 128)
#define WINDOW_BYTES 640  // codes of 16 rows, scales of 32
#define COPY_REGISTERS 40
#define RINGS (STAGES * STAGE_BYTES)
#define RED_STRIDE (ROWS + 4)
#define TILE_PITCH (ROWS * 2 + 16)
#define MAIN_BYTES (RINGS + 4 * GROUPS * KGROUPS * PREFETCH * WINDOW_BYTES)
#if SPLITS > 1
#define SHARE (TOKENS / PARTS)  // tokens whose outputs a set writes
#define MAIL_BYTES ((PARTS - 1) * SHARE * ROWS * 4)  // to a set
#define BARRIERS (MAIN_BYTES + KGROUPS * MAIL_BYTES)
#define SCRATCH_PITCH 48     // bytes of a token's 16 rows, of halves
#define SCRATCH_PITCH_32 20  // floats
#else
#define SUM_BYTES (KGROUPS * TOKENS * RED_STRIDE * 4)
#define BARRIERS (MAIN_BYTES > SUM_BYTES ? MAIN_BYTES : SUM_BYTES)
#endif

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__maxnreg__(AT_LAUNCH)  // without which registers do not move between warpgroups
fp4_wgmma(const u8* x, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M,
          int N, int K, int activation) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = warp_uniform(tid >> 5);
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;
    x += (u64)blockIdx.z * windows * STAGE_BYTES;

    if (tid == 0) {
#if SPLITS > 1
        for (int g = 0; g < KGROUPS; g++) {
            barrier_init(empty + 8 * (STAGES + g), 1);
            barrier_expect(empty + 8 * (STAGES + g), MAIL_BYTES);
        }
#endif
        ring_init<STAGES>(full, empty, 4 * GROUPS);
    }
    __syncthreads();
#if SPLITS > 1
    cluster_arrive_started();
    const int first_set = cluster_rank() * KGROUPS;  // of this block, in the cluster
#endif
    let_next_start();

    if (warp >= 4 * GROUPS * KGROUPS) {
        give_registers<COPY_REGISTERS>();
        if (tid == CONSUMERS) {
            wait_for_previous();
#if SPLITS > 1
            const int most = (windows + PARTS - 1) / PARTS;
            for (int i = 0; i < most * KGROUPS; i++) {
                const int part = (first_set + i % KGROUPS) % PARTS, stage = i % STAGES;
                const int window = windows * part / PARTS + i / KGROUPS;
                if (window >= windows * (part + 1) / PARTS) continue;
                barrier_wait(empty + 8 * stage, ((i / STAGES) & 1) ^ 1);  // a fresh barrier counts as released
                barrier_expect(full + 8 * stage, STAGE_BYTES);
                copy_bulk(shared + stage * STAGE_BYTES, x + (u64)window * STAGE_BYTES, STAGE_BYTES, full + 8 * stage);
            }
#else
            ring_fill<STAGES, STAGE_BYTES>(shared, full, empty, x, windows);
#endif
        }
#if SPLITS > 1
        warp_sync();
        cluster_wait_started();  // who arrives waits, too
#endif
    } else {
        take_registers<REGISTERS>();
        const int k_group = KGROUPS == 1 ? 0 : warp / (4 * GROUPS), row_warp = warp - k_group * 4 * GROUPS;
#if SPLITS > 1
        const int set = first_set + k_group, part = set % PARTS, row_tile = blockIdx.x * TILES + set / PARTS;
        const int begin = windows * part / PARTS, mine = windows * (part + 1) / PARTS - begin;  // windows of this warp
        constexpr int STRIDE = 1;
#else
        const int row_tile = blockIdx.x, begin = k_group, mine = (windows - k_group + KGROUPS - 1) / KGROUPS;
        constexpr int STRIDE = KGROUPS;
#endif
        const int row16 = row_tile * (ROWS / 16) + row_warp, band = min(row16 >> 1, bands - 1), half = row16 & 1;
        const u64 first = (u64)band * windows + begin;
        const u8* from_codes = codes + first * 1024 + half * 512 + lane * 16;
        const u8* from_scales = scales + first * 128 + lane * 4;
        const u32 ring_codes = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES) + lane * 16;
        const u32 ring_scales = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES) + 512 + lane * 4;
        // A window of this warp to a slot of its ring, by how many windows it lies behind the pointers.
        auto load = [&](int slot, int behind, bool wanted) {
            if (wanted) {
                copy_async(ring_codes + slot * WINDOW_BYTES, from_codes + behind * (STRIDE * 1024), 16);
                copy_async_word(ring_scales + slot * WINDOW_BYTES, from_scales + behind * (STRIDE * 128), 4);
            }
            copy_commit();
        };
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) load(d, d, d < mine);
        float acc[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
        u32 a[2][4][4];
        copy_wait<PREFETCH - 1>();
        if (mine > 0) decode_window(load_shared(ring_codes), load_shared_word(ring_scales), half, a[0]);
        int stage = k_group, previous = 0;
        u32 parity = 0;
        for (int i = 0; i < mine; i += PREFETCH) {
#pragma unroll
            for (int d = 0; d < PREFETCH; d++) {
                if (i + d >= mine) break;
                load(d, d + PREFETCH, i + d + PREFETCH < mine);  // its slot was decoded before
                barrier_wait(full + 8 * stage, parity);
                const u64 b = wgmma_operand(shared + stage * STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) wgmma(acc, a[d & 1][s], b + 2 * s);
                wgmma_commit();
                copy_wait<PREFETCH - 1>();
                const int slot = (d + 1) % PREFETCH;
                const uint4 q = load_shared(ring_codes + slot * WINDOW_BYTES);
                const u32 packed = load_shared_word(ring_scales + slot * WINDOW_BYTES);
                wgmma_wait<1>();
                if (lane == 0 && i + d > 0) barrier_arrive(empty + 8 * previous);
                previous = stage;
                stage += KGROUPS;
                if (stage >= STAGES) {
                    stage -= STAGES;
                    parity ^= 1;
                }
                if (i + d + 1 < mine) decode_window(q, packed, half, a[(d & 1) ^ 1]);
            }
            from_codes += PREFETCH * STRIDE * 1024;
            from_scales += PREFETCH * STRIDE * 128;
        }
        copy_wait_all();
        wgmma_wait<0>();

        const float unit = tensor_scale[0] * WEIGHT_UNIT;  // here: while windows pass, every register is somebody's
#if SPLITS > 1
        constexpr int VECTORS = TOKENS / 8, LANES = 128 * GROUPS, MINE = VECTORS / PARTS;  // of four sums, of 8 tokens and 16 rows
        const int at_lane = tid - k_group * LANES;
        cluster_wait_started();
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int to = set - part + p, slot = part < p ? part : part - 1;
            const u32 mail = shared + MAIN_BYTES + to % KGROUPS * MAIL_BYTES + (slot * MINE * LANES + at_lane) * 16;
            if (p != part)
#pragma unroll
                for (int v = 0; v < MINE; v++) {
                    const float* sum = acc + 4 * (p * MINE + v);
                    send(mail + v * LANES * 16, empty + 8 * (STAGES + to % KGROUPS), to / KGROUPS, float4{sum[0], sum[1], sum[2], sum[3]});
                }
        }
#pragma unroll
        for (int i = 4 * MINE; i < 4 * VECTORS; i++)
            if (i / (4 * MINE) == part) acc[i % (4 * MINE)] = acc[i];
        barrier_wait_cluster(empty + 8 * (STAGES + k_group), 0);
        const float4* mail = (const float4*)(memory + MAIN_BYTES + k_group * MAIL_BYTES) + at_lane;  // [PARTS - 1][MINE][LANES]
#pragma unroll
        for (int v = 0; v < MINE; v++) {
            const float4 own = {acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]};
            float4 sum = part == 0 ? own : mail[v * LANES];
#pragma unroll
            for (int p = 1; p < PARTS; p++) add4(sum, p == part ? own : mail[((p < part ? p : p - 1) * MINE + v) * LANES]);
            acc[4 * v] = sum.x;
            acc[4 * v + 1] = sum.y;
            acc[4 * v + 2] = sum.z;
            acc[4 * v + 3] = sum.w;
        }
        // To rows of tokens through what was the warp's ring, 16 tokens at a time.
        const u32 scratch = ring_codes - lane * 16;
        const int m0 = blockIdx.z * TOKENS + part * SHARE, n0 = row_tile * ROWS + row_warp * 16;
#if !OUT32
        if (activation == 0 && N % 8 == 0) {  // what needs no look at single outputs
            const int n = n0 + (lane >> 2);
            const float upper = bias && n < N ? half_to_float(bias[n]) : 0.0f;
            const float lower = bias && n + 8 < N ? half_to_float(bias[n + 8]) : 0.0f;
            auto pair = [&](int i, float more) { return to_half_pair(acc[i] * unit + more, acc[i + 1] * unit + more); };
#pragma unroll
            for (int v = 0; v < MINE; v += 2) {
                const int next = MINE == 1 ? v : v + 1;
                warp_sync();
                store_columns(scratch + ((lane >> 4) * 8 + (lane & 7)) * SCRATCH_PITCH + ((lane >> 3) & 1) * 16, pair(4 * v, upper),
                              pair(4 * v + 2, lower), pair(4 * next, upper), pair(4 * next + 2, lower));
                warp_sync();
                const int t = lane >> 1, m = m0 + v * 8 + t, column = n0 + (lane & 1) * 8;
                if (t < SHARE && m < M && column < N)
                    *(uint4*)((u16*)y + (u64)m * N + column) = load_shared(scratch + t * SCRATCH_PITCH + (lane & 1) * 16);
            }
            return;
        }
#endif
        float* rows = (float*)(memory + (scratch - shared));  // [16][SCRATCH_PITCH_32]
#pragma unroll
        for (int v = 0; v < MINE; v += 2) {
            warp_sync();
#pragma unroll
            for (int i = 0; i < (MINE == 1 ? 4 : 8); i++)
                rows[((i >> 2) * 8 + (lane & 3) * 2 + (i & 1)) * SCRATCH_PITCH_32 + ((i >> 1) & 1) * 8 + (lane >> 2)] = acc[4 * v + i];
            warp_sync();
#pragma unroll
            for (int e = lane; e < 64; e += 32) {
                const int t = e >> 2, row = (e & 3) * 4, m = m0 + v * 8 + t;
                if (t < SHARE && m < M && n0 + row < N)
                    store4(y, m, n0 + row, N, *(float4*)(rows + t * SCRATCH_PITCH_32 + row), unit, bias, activation);
            }
        }
#else
        block_part_sync<CONSUMERS>();
#if !OUT32
        if (activation == 0 && N % 8 == 0) {  // what needs no look at single outputs
            // Sums of the other K groups, as their lanes have them, to the first; then halves, in rows of tokens, which all copy out.
            constexpr int VECTORS = TOKENS / 8, LANES = 128 * GROUPS;
            float4* sums = (float4*)memory;  // [KGROUPS - 1][VECTORS][LANES]
            const u32 tile = shared + (KGROUPS - 1) * VECTORS * LANES * 16;
            if (KGROUPS > 1) {
                if (k_group > 0)
#pragma unroll
                    for (int v = 0; v < VECTORS; v++)
                        sums[((k_group - 1) * VECTORS + v) * LANES + row_warp * 32 + lane] =
                            float4{acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]};
                block_part_sync<CONSUMERS>();
            }
            if (k_group == 0) {
                for (int j = 0; j < KGROUPS - 1; j++)
#pragma unroll
                    for (int v = 0; v < VECTORS; v++) {
                        const float4 more = sums[(j * VECTORS + v) * LANES + row_warp * 32 + lane];
                        acc[4 * v] += more.x;
                        acc[4 * v + 1] += more.y;
                        acc[4 * v + 2] += more.z;
                        acc[4 * v + 3] += more.w;
                    }
                const int n = blockIdx.x * ROWS + row_warp * 16 + (lane >> 2);
                const float upper = bias && n < N ? half_to_float(bias[n]) : 0.0f;
                const float lower = bias && n + 8 < N ? half_to_float(bias[n + 8]) : 0.0f;
                const u32 to = tile + ((lane >> 4) * 8 + (lane & 7)) * TILE_PITCH + (row_warp * 16 + ((lane >> 3) & 1) * 8) * 2;
                auto pair = [&](int i, float more) { return to_half_pair(acc[i] * unit + more, acc[i + 1] * unit + more); };
#pragma unroll
                for (int v = 0; v < VECTORS; v += 2)
                    store_columns(to + v * 8 * TILE_PITCH, pair(4 * v, upper), pair(4 * v + 2, lower), pair(4 * v + 4, upper),
                                  pair(4 * v + 6, lower));
            }
            block_part_sync<CONSUMERS>();
            const int m0 = blockIdx.z * TOKENS, granules = min(TOKENS, M - m0) * (ROWS / 8);
#pragma unroll 4
            for (int e = tid; e < granules; e += CONSUMERS) {
                const int t = e / (ROWS / 8), c = e % (ROWS / 8), n = blockIdx.x * ROWS + c * 8;
                if (n < N) *(uint4*)((u16*)y + (u64)(m0 + t) * N + n) = load_shared(tile + t * TILE_PITCH + c * 16);
            }
            return;
        }
#endif
        float* red = (float*)memory;  // [KGROUPS][TOKENS][RED_STRIDE]
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = row_warp * 16 + ((i >> 1) & 1) * 8 + (lane >> 2);
            red[(k_group * TOKENS + token) * RED_STRIDE + row] = acc[i];
        }
        block_part_sync<CONSUMERS>();
        const int m0 = blockIdx.z * TOKENS, groups = min(TOKENS, M - m0) * (ROWS / 4);  // groups of four rows
        for (int e = tid; e < groups; e += CONSUMERS) {
            const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
            float* at = red + t * RED_STRIDE + row;
            float4 sum = *(float4*)at;
#pragma unroll
            for (int j = 1; j < KGROUPS; j++) add4(sum, *(float4*)(at + j * TOKENS * RED_STRIDE));
            if (n < N) store4(y, m0 + t, n, N, sum, unit, bias, activation);
        }
#endif
    }
}

// x to the image that fp4_wgmma reads. One thread writes 16 bytes twice; neighbours write, and nearly read, one row.
extern "C" __global__ void __launch_bounds__(ARRANGE_THREADS, 16) arrange(const u16* x, u8* image, int M, int K) {
    const int windows = (K + 63) / 64, m0 = blockIdx.y * TOKENS;
    let_next_start();
    wait_for_previous();
    u32 out[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = (blockIdx.x * 2 + i) * ARRANGE_THREADS + threadIdx.x;  // [token][window][granule]
        const int granule = at & 7, window = (at >> 3) % windows, token = (at >> 3) / windows;
        const int q = granule ^ (token & 7), m = m0 + token;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int k = window * 64 + 16 * t + 4 * (q >> 1) + 2 * (q & 1);
            out[i][t] = token < TOKENS && m < M && k < K ? *(const u32*)(x + (u64)m * K + k) : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = (blockIdx.x * 2 + i) * ARRANGE_THREADS + threadIdx.x;
        if ((at >> 3) / windows < TOKENS)
            *(uint4*)(image + ((u64)blockIdx.y * windows * TOKENS + (u64)((at >> 3) % windows) * TOKENS + (at >> 3) / windows) * 128 +
                      (at & 7) * 16) = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
    }
}
