// y = act(x W^T + bias) for tens to hundreds of rows of x (sm_90a): weights are the A operand of wgmma, decoded into
// registers, tokens its n, from shared memory.
//
// A block takes 64 * GROUPS weight rows and TOKENS tokens; each of its GROUPS warpgroups owns 64 rows, and K_GROUPS
// such sets take turns at the windows of 64 columns. Codes and scales come as in fp4_mma.cu, and are decoded into
// registers while the tensor cores work on other windows. One more warpgroup brings x, STAGES windows deep. SPLITS
// blocks of a cluster split K; sums of the K groups meet in shared memory, those of the blocks are sent to the one that
// writes the output; both are added in a fixed order.
//
// A stage of x is TOKENS rows of 128 bytes with the 128-byte swizzle, columns inside a window permuted as the tiled
// layout permutes them, zeros beyond K: one bulk copy of what `swizzle_x` has written before.
//
// Set by the launcher: FP16, OUT32, TOKENS (a multiple of 16), SUMS (half as many), GROUPS, K_GROUPS, SPLITS, PREFETCH
// (even) and
// - FRAGMENTS: sets of decoded weights that a warpgroup holds. With 2 it decodes one while the tensor cores work on the
//   other; with 1 it waits for its products, which others have under way meanwhile;
// - WINDOWS_PER_STEP: windows of a set. Some 300 cycles of waiting and arriving lie between products of two sets;
// - STAGES: of each K group the same, two sets or more;
// - REGISTERS, COPY_REGISTERS: of a thread that multiplies, and of one that copies;
// - LAUNCH_REGISTERS: of every thread when a block starts. They leave room for a block of the next product's
//   `swizzle_x`, which waits while this kernel runs, so that its weights are on their way while its x is swizzled.
#define TURN (K_GROUPS * WINDOWS_PER_STEP)
static_assert(TURN == 1 || (STAGES % TURN == 0 && STAGES >= 2 * TURN), "a stage belongs to one K group");
static_assert(WINDOWS_PER_STEP * FRAGMENTS <= 2, "one window, one pair, or two one after the other");
static_assert(TOKENS % (8 * SPLITS) == 0, "the cluster's blocks share whole tiles of 8 tokens");
static_assert(PREFETCH % 2 == 0, "slots of the ring and the two sets of fragments go round together");
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS * K_GROUPS)
#define THREADS (CONSUMERS + 128)  // registers move between warpgroups, so the copying warp costs a whole one
#define SWIZZLE_THREADS 128
#define STAGE_BYTES (TOKENS * 128)
#define WINDOW_BYTES 640  // codes of 16 rows, scales of 32
#define RINGS (STAGES * STAGE_BYTES)
#define RED_STRIDE (ROWS + 4)
#define TILE_PITCH (ROWS * 2 + 16)
#define SHARE (TOKENS / SPLITS)  // tokens whose outputs a block of the cluster writes
#define MAIN_BYTES (RINGS + 4 * GROUPS * K_GROUPS * PREFETCH * WINDOW_BYTES)
#define GROUP_SUMS (K_GROUPS > 1 ? K_GROUPS * TOKENS * ROWS * 4 : 0)  // of the K groups
#define SUM_BYTES (GROUP_SUMS + SHARE * RED_STRIDE * 4)
#define MAIL (MAIN_BYTES > SUM_BYTES ? MAIN_BYTES : SUM_BYTES)  // sums of the cluster's other blocks
#define BARRIERS (MAIL + (SPLITS - 1) * SHARE * ROWS * 4)

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__maxnreg__(LAUNCH_REGISTERS)  // without which registers do not move between warpgroups
fp4_wgmma(const u8* x, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M,
          int N, int K, int activation, int first_block) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = warp_uniform(tid >> 5);
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int block = first_block + blockIdx.x;
    const int begin = windows * (int)blockIdx.y / SPLITS, count = windows * ((int)blockIdx.y + 1) / SPLITS - begin;
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;
#if SPLITS > 1
    const u32 mail_barrier = empty + 8 * STAGES;
    if (tid == 0) {
        barrier_init(mail_barrier, 1);
        barrier_expect(mail_barrier, (SPLITS - 1) * SHARE * ROWS * 4);
    }
#endif
    if (tid == 0) ring_init<STAGES>(full, empty, 4 * GROUPS);
    __syncthreads();
#if SPLITS > 1
    cluster_arrive_started();
#endif
    let_next_start();

    if (warp >= 4 * GROUPS * K_GROUPS) {
        give_registers<COPY_REGISTERS>();
        if (tid == CONSUMERS) {
            const u8* from = x + ((u64)blockIdx.z * windows + begin) * STAGE_BYTES;
            wait_for_previous();
            ring_fill<STAGES, STAGE_BYTES>(shared, full, empty, from, count);
        }
#if SPLITS > 1
        cluster_wait_started();  // a warp that arrives waits, too
#endif
    } else {
        take_registers<REGISTERS>();
        const int k_group = K_GROUPS == 1 ? 0 : warp / (4 * GROUPS), row_warp = warp - k_group * 4 * GROUPS;
        const int row16 = block * (ROWS / 16) + row_warp, band = min(row16 >> 1, bands - 1), half = row16 & 1;
        const u64 first = (u64)band * windows + begin + WINDOWS_PER_STEP * k_group;
        const u8* from_codes = codes + first * 1024 + half * 512 + lane * 16;
        const u8* from_scales = scales + first * 128 + lane * 4;
        const int all_sets = (count + WINDOWS_PER_STEP - 1) / WINDOWS_PER_STEP;
        const int sets = (all_sets - k_group + K_GROUPS - 1) / K_GROUPS;
        const int missing = k_group + (sets - 1) * K_GROUPS == all_sets - 1 ? all_sets * WINDOWS_PER_STEP - count : 0;
        const int mine = sets * WINDOWS_PER_STEP - missing;  // windows of this warp
        const u32 ring_codes = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES) + lane * 16;
        const u32 ring_scales = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES) + 512 + lane * 4;
        // A window of this warp to a slot of its ring, by how many windows it lies after the pointers.
        auto load = [&](int slot, int offset, bool wanted) {
            if (wanted) {
                const int at = offset / WINDOWS_PER_STEP * WINDOWS_PER_STEP * K_GROUPS + offset % WINDOWS_PER_STEP;
                copy_async(ring_codes + slot * WINDOW_BYTES, from_codes + at * 1024, 16);
                copy_async_word(ring_scales + slot * WINDOW_BYTES, from_scales + at * 128, 4);
            }
            copy_commit();
        };
        auto decode_window = [&](const uint4& q, u32 scales, u32 (*fragments)[4]) {
            const u32 pair = scales >> (16 * half);
            decode_rows(q, scale_pair(pair, 0), scale_pair(pair, 1), fragments);
        };
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) load(d, d, d < mine);
        float acc[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
        u32 a[FRAGMENTS * WINDOWS_PER_STEP][4][4];
        copy_wait<PREFETCH - WINDOWS_PER_STEP>();
#pragma unroll
        for (int w = 0; w < WINDOWS_PER_STEP; w++)
            if (w < mine) {
                const u32 slot = w * WINDOW_BYTES;
                decode_window(load_shared(ring_codes + slot), load_shared_word(ring_scales + slot), a[w]);
            }
        int stage = WINDOWS_PER_STEP * k_group, previous = 0;
        u32 parity = 0;
        for (int i = 0; i < mine; i += PREFETCH) {
#pragma unroll
            for (int d = 0; d < PREFETCH; d += WINDOWS_PER_STEP) {
                if (i + d >= mine) break;
#pragma unroll
                // its slot was decoded before
                for (int w = 0; w < WINDOWS_PER_STEP; w++) load(d + w, d + w + PREFETCH, i + d + w + PREFETCH < mine);
                // fewer in the last set of all
                const int there = WINDOWS_PER_STEP == 1 ? 1 : min(WINDOWS_PER_STEP, mine - i - d);
                barrier_wait(full + 8 * stage, parity);
                if (there > 1) barrier_wait(full + 8 * stage + 8, parity);
                const u64 b = wgmma_operand(shared + stage * STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) wgmma(acc, a[d % FRAGMENTS][s], b + 2 * s);
                if (there > 1)
#pragma unroll
                    for (int s = 0; s < 4; s++) wgmma(acc, a[WINDOWS_PER_STEP - 1][s], b + STAGE_BYTES / 16 + 2 * s);
                wgmma_commit();
                copy_wait<PREFETCH - WINDOWS_PER_STEP>();
                uint4 q[WINDOWS_PER_STEP];
                u32 packed[WINDOWS_PER_STEP];
#pragma unroll
                for (int w = 0; w < WINDOWS_PER_STEP; w++) {
                    const int slot = (d + w + WINDOWS_PER_STEP) % PREFETCH;
                    q[w] = load_shared(ring_codes + slot * WINDOW_BYTES);
                    packed[w] = load_shared_word(ring_scales + slot * WINDOW_BYTES);
                }
                wgmma_wait<FRAGMENTS - 1>();
                if (FRAGMENTS == 1) previous = stage;
                if (lane < there && (FRAGMENTS == 1 || i + d > 0)) barrier_arrive(empty + 8 * (previous + lane));
                previous = stage;
                stage += WINDOWS_PER_STEP * K_GROUPS;
                if (stage >= STAGES) {
                    stage -= STAGES;
                    parity ^= 1;
                }
#pragma unroll
                for (int w = 0; w < WINDOWS_PER_STEP; w++)
                    if (i + d + w + WINDOWS_PER_STEP < mine)
                        decode_window(q[w], packed[w], a[WINDOWS_PER_STEP == 1 ? (d + 1) % FRAGMENTS : w]);
            }
            from_codes += PREFETCH * K_GROUPS * 1024;
            from_scales += PREFETCH * K_GROUPS * 128;
        }
        copy_wait_all();
        wgmma_wait<0>();

        const float unit = tensor_scale[0] * WEIGHT_UNIT;  // here: while windows pass, every register is in use
        // Four sums are 8 tokens and 16 rows of a warp, in the order of its lanes. One K group adds the others' to its
        // own, of some tokens; each has some of every block's share.
        constexpr int VECTORS = TOKENS / 8, LANES = 128 * GROUPS, SHARED = SHARE / 8, UNIT = SHARED % 2 == 0 ? 2 : 1;
        const int at_lane = row_warp * 32 + lane;
        auto adds = [&](int v) { return v % SHARED / UNIT * K_GROUPS / (SHARED / UNIT) == k_group; };
        auto sums_of = [&](int v) { return float4{acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]}; };
        auto set_sums = [&](int v, float4 sum) {
            acc[4 * v] = sum.x;
            acc[4 * v + 1] = sum.y;
            acc[4 * v + 2] = sum.z;
            acc[4 * v + 3] = sum.w;
        };
        block_part_sync<CONSUMERS>();  // rings and stages are free
#if K_GROUPS > 1
        float4* sums = (float4*)memory + at_lane;  // [K_GROUPS][VECTORS][LANES]
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (!adds(v)) sums[(k_group * VECTORS + v) * LANES] = sums_of(v);
        block_part_sync<CONSUMERS>();
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (adds(v)) {
                float4 sum = k_group == 0 ? sums_of(v) : sums[v * LANES];
#pragma unroll
                for (int j = 1; j < K_GROUPS; j++)
                    add4(sum, j == k_group ? sums_of(v) : sums[(j * VECTORS + v) * LANES]);
                set_sums(v, sum);
            }
#endif
#if SPLITS > 1
        const int rank = cluster_rank();
        cluster_wait_started();
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int to = v / SHARED, slot = rank < to ? rank : rank - 1;
            if (to != rank && adds(v))
                send(shared + MAIL + ((slot * SHARED + v % SHARED) * LANES + at_lane) * 16, mail_barrier, to,
                     sums_of(v));
        }
        barrier_wait_cluster(mail_barrier, 0);
        const float4* mail = (const float4*)(memory + MAIL) + at_lane;  // [SPLITS - 1][SHARED][LANES]
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (v / SHARED == rank && adds(v)) {
                float4 sum = rank == 0 ? sums_of(v) : mail[v % SHARED * LANES];
#pragma unroll
                for (int r = 1; r < SPLITS; r++)
                    add4(sum, r == rank ? sums_of(v) : mail[((r < rank ? r : r - 1) * SHARED + v % SHARED) * LANES]);
                set_sums(v, sum);
            }
#else
        const int rank = 0;
#endif
        // none, or fewer, after the last one
        const int m0 = blockIdx.z * TOKENS + rank * SHARE, tokens = min(SHARE, M - m0);
#if !OUT32 && SHARE % 16 == 0
        // what needs no look at single outputs: halves, in rows of tokens, which all copy out
        if (activation == 0 && N % 8 == 0) {
            const u32 tile = shared + GROUP_SUMS;
            const int first_row = block * ROWS + row_warp * 16 + (lane >> 2);
            const float upper = bias && first_row < N ? half_to_float(bias[first_row]) : 0.0f;
            const float lower = bias && first_row + 8 < N ? half_to_float(bias[first_row + 8]) : 0.0f;
            const int token = (lane >> 4) * 8 + (lane & 7), row = row_warp * 16 + ((lane >> 3) & 1) * 8;
            const u32 to = tile + token * TILE_PITCH + row * 2;
            auto pair = [&](int i, float more) { return to_half_pair(acc[i] * unit + more, acc[i + 1] * unit + more); };
#pragma unroll
            for (int v = 0; v < VECTORS; v += 2)
                if (v / SHARED == rank && adds(v))
                    store_columns(to + v % SHARED * 8 * TILE_PITCH, pair(4 * v, upper), pair(4 * v + 2, lower),
                                  pair(4 * v + 4, upper), pair(4 * v + 6, lower));
            block_part_sync<CONSUMERS>();
            const int granules = tokens * (ROWS / 8);
#pragma unroll 4
            for (int e = tid; e < granules; e += CONSUMERS) {
                const int t = e / (ROWS / 8), c = e % (ROWS / 8), n = block * ROWS + c * 8;
                if (n < N) *(uint4*)((u16*)y + (u64)(m0 + t) * N + n) = load_shared(tile + t * TILE_PITCH + c * 16);
            }
            return;
        }
#endif
        float* red = (float*)(memory + GROUP_SUMS);  // [SHARE][RED_STRIDE]
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (v / SHARED == rank && adds(v))
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = v % SHARED * 8 + (lane & 3) * 2 + (i & 1);
                    const int row = row_warp * 16 + (i >> 1) * 8 + (lane >> 2);
                    red[token * RED_STRIDE + row] = acc[4 * v + i];
                }
        block_part_sync<CONSUMERS>();
        const int groups = tokens * (ROWS / 4);  // of four rows
        for (int e = tid; e < groups; e += CONSUMERS) {
            const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = block * ROWS + row;
            if (n < N) store4(y, m0 + t, n, N, *(float4*)(red + t * RED_STRIDE + row), unit, bias, activation);
        }
    }
}

// x in the form that fp4_wgmma reads. One thread writes 16 bytes twice; neighbours write, and nearly read, one row. The
// product waits for all of this: what can be computed before x is there is.
extern "C" __global__ void __launch_bounds__(SWIZZLE_THREADS, 16)
swizzle_x(const u16* x, u8* x_swizzled, int M, int K) {
    const u32 windows = (K + 63) / 64, block = blockIdx.y;
    let_next_start();
    const u16* row[2];
    u8* to[2];
    int column[2];  // the first of the granule's; from K on where there is nothing to read
    bool writes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 at = (blockIdx.x * 2 + i) * SWIZZLE_THREADS + threadIdx.x;  // [token][window][granule]
        const u32 token = (at >> 3) / windows, window = (at >> 3) - token * windows, q = (at & 7) ^ (token & 7);
        const int m = block * TOKENS + token;
        writes[i] = token < TOKENS;
        row[i] = x + (u64)min(m, M - 1) * K;
        column[i] = m < M ? window * 64 + 4 * (q >> 1) + 2 * (q & 1) : K;
        to[i] = x_swizzled + ((u64)block * windows * TOKENS + window * TOKENS + token) * 128 + (at & 7) * 16;
        prefetch_l2(row[i] + min(column[i], K - 1));  // also, the assembler would compute addresses after the wait
    }
    wait_for_previous();
    u32 out[2][4];
    if ((K | (int)((u64)x >> 1)) % 2 == 0) {  // columns begin at multiples of 4 bytes
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int k = column[i / 4] + i % 4 * 16;
            out[i / 4][i % 4] = k < K ? *(const u32*)(row[i / 4] + k) : 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (writes[i]) *(uint4*)to[i] = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
    } else {  // whose addresses are twice as many
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int t = 0; t < 4; t++) out[i][t] = load_pair(row[i], column[i] + 16 * t, K);
            if (writes[i]) *(uint4*)to[i] = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
        }
    }
}
