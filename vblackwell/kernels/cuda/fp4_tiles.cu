// fp4_wgmma for hundreds of rows of x and more: as many blocks as fit at once, in clusters of two, go through the tiles of y.
//
// The tiles are dealt out in rounds of one a block. What is left for the last round, if a cluster need not take more than one, is split
// between its two blocks along K: 448 tiles on 132 multiprocessors take three rounds and a half instead of four. While a
// block writes a tile, x and weights of its next one are already under way, and each warp turns its own sums by a shared memory of its own.
// Only the sums of a split tile, which is a block's last, meet in the cluster's shared memory, where they are added in a fixed order.
//
// Everything else, the order of x (`arrange`) included, is as in fp4_wgmma.cu. Set by the launcher: FP16, TOKENS, GROUPS, STAGES, PREFETCH,
// REGISTERS, OUT32, and SPLITS as 2.
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS)
#define THREADS (CONSUMERS + 128)
#define STAGE_BYTES (TOKENS * 128)
#define WINDOW_BYTES 640
#define RINGS (STAGES * STAGE_BYTES)
#define RED_STRIDE (ROWS + 4)
#define TURN_TOKENS 32
#define TURN_STRIDE 20  // floats: 16 rows
#define TURNS (RINGS + 4 * GROUPS * PREFETCH * WINDOW_BYTES)
#define MAIN_BYTES (TURNS + 4 * GROUPS * TURN_TOKENS * TURN_STRIDE * 4)
#define SUM_BYTES (TOKENS * RED_STRIDE * 4)
#define BARRIERS (MAIN_BYTES > SUM_BYTES ? MAIN_BYTES : SUM_BYTES)

struct Work {
    int row, column;   // of the tile
    int begin, count;  // windows; a count of 0: there is no such work
    int split;         // whether the cluster's other block has the rest
};
// The `turn`-th work of block `rank` of a cluster.
DEVICE Work work_of(int turn, int cluster, int clusters, int rank, int tiles, int columns, int windows) {
    const int rounds = tiles / (2 * clusters), rest = tiles - rounds * 2 * clusters;
    Work work = {0, 0, 0, 0, 0};
    int tile = (turn * clusters + cluster) * 2 + rank;
    if (turn == rounds && rest <= clusters && windows > 1) {  // a single window cannot be split
        if (cluster >= rest) return work;
        tile = rounds * 2 * clusters + cluster;
        work.split = 1;
        work.begin = windows * rank / 2;
        work.count = windows * (rank + 1) / 2 - work.begin;
    } else {
        if (turn > rounds || tile >= tiles) return work;
        work.count = windows;
    }
    work.row = tile / columns;
    work.column = tile % columns;
    return work;
}

extern "C" __global__ void
__cluster_dims__(1, 2, 1)
__launch_bounds__(THREADS, 1)
fp4_tiles(const u8* x, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M, int N, int K,
          int activation, int clusters) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64, columns = (M + TOKENS - 1) / TOKENS;
    const int tiles = (N + ROWS - 1) / ROWS * columns, rank = cluster_rank();
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;
    auto turn_work = [&](int turn) { return work_of(turn, blockIdx.x, clusters, rank, tiles, columns, windows); };

    if (tid == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    let_next_start();

    if (warp >= 4 * GROUPS) {
        give_registers<40>();
        if (tid == CONSUMERS) {
            int stage = 0;
            u32 parity = 1;
            wait_for_previous();
            for (int turn = 0;; turn++) {
                const Work work = turn_work(turn);
                if (work.count == 0) break;
                const u8* from = x + ((u64)work.column * windows + work.begin) * STAGE_BYTES;
                for (int i = 0; i < work.count; i++) {
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_expect(full + 8 * stage, STAGE_BYTES);
                    copy_bulk(shared + stage * STAGE_BYTES, from + (u64)i * STAGE_BYTES, STAGE_BYTES, full + 8 * stage);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
    } else {
        take_registers<REGISTERS>();
        const int half = warp & 1;
        const u32 ring = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES);
        float* turned = (float*)(memory + TURNS) + warp * (TURN_TOKENS * TURN_STRIDE);
        const u8 *from_codes = codes, *from_scales = scales;
        int loading = -1, todo = 0;  // the turn whose windows are being asked for, and how many it still has
        auto load = [&](u32 slot) {
            if (todo == 0) {
                const Work work = turn_work(++loading);
                const int band = min((work.row * (ROWS / 16) + warp) >> 1, bands - 1);
                const u64 first = (u64)band * windows + work.begin;
                from_codes = codes + first * 1024 + half * 512 + lane * 16;
                from_scales = scales + first * 128 + lane * 4;
                todo = work.count;
            }
            if (todo > 0) {
                copy_async(slot + lane * 16, from_codes, 16);
                copy_async_word(slot + 512 + lane * 4, from_scales, 4);
                from_codes += 1024;
                from_scales += 128;
                todo--;
            }
            copy_commit();
        };
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
        const float unit = tensor_scale[0] * WEIGHT_UNIT;
        float acc[TOKENS / 2];
        u32 a[2][4][4], slot = ring, parity = 0;
        int stage = 0;
        copy_wait<PREFETCH - 1>();
        uint4 q = load_shared(slot + lane * 16);
        u32 packed = load_shared_word(slot + 512 + lane * 4);
        for (int turn = 0;; turn++) {
            const Work work = turn_work(turn);
            const int count = work.count, m0 = work.column * TOKENS;
            if (count == 0) break;
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
            decode_window(q, packed, half, a[0]);
            int previous = 0;
            for (int i = 0; i < count; i += 2) {
#pragma unroll
                for (int d = 0; d < 2; d++) {
                    if (i + d >= count) break;
                    load(slot);
                    slot = slot == ring + (PREFETCH - 1) * WINDOW_BYTES ? ring : slot + WINDOW_BYTES;
                    copy_wait<PREFETCH - 1>();
                    q = load_shared(slot + lane * 16);
                    packed = load_shared_word(slot + 512 + lane * 4);
                    barrier_wait(full + 8 * stage, parity);
                    const u64 b = wgmma_operand(shared + stage * STAGE_BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < 4; s++) wgmma(acc, a[d][s], b + 2 * s);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (lane == 0 && i + d > 0) barrier_arrive(empty + 8 * previous);
                    previous = stage;
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                    if (i + d + 1 < count) decode_window(q, packed, half, a[d ^ 1]);
                }
            }
            wgmma_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * previous);
            if (work.split) {
                copy_wait_all();
                block_part_sync<CONSUMERS>();
                float* red = (float*)memory;  // [TOKENS][RED_STRIDE]
#pragma unroll
                for (int i = 0; i < TOKENS / 2; i++) {
                    const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = warp * 16 + ((i >> 1) & 1) * 8 + (lane >> 2);
                    red[token * RED_STRIDE + row] = acc[i];
                }
                cluster_sync();
                const int groups = min(TOKENS, M - m0) * (ROWS / 4);  // groups of four rows
                for (int e = tid + rank * CONSUMERS; e < groups; e += CONSUMERS * 2) {
                    const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = work.row * ROWS + row;
                    float* at = red + t * RED_STRIDE + row;
                    float4 sum = load_remote(shared_address(at), 0);
                    add4(sum, load_remote(shared_address(at), 1));
                    if (n < N) store4(y, m0 + t, n, N, sum, unit, bias, activation);
                }
                cluster_sync();
                break;
            }
#pragma unroll
            for (int part = 0; part < TOKENS / TURN_TOKENS; part++) {
                warp_sync();
#pragma unroll
                for (int i = 0; i < TURN_TOKENS / 2; i++) {
                    const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = ((i >> 1) & 1) * 8 + (lane >> 2);
                    turned[token * TURN_STRIDE + row] = acc[part * (TURN_TOKENS / 2) + i];
                }
                warp_sync();
#pragma unroll
                for (int e = lane; e < TURN_TOKENS * 4; e += 32) {
                    const int t = e / 4, row = e % 4 * 4, n = work.row * ROWS + warp * 16 + row, m = m0 + part * TURN_TOKENS + t;
                    if (m < M && n < N)
                        store4(y, m, n, N, *(float4*)(turned + t * TURN_STRIDE + row), unit, bias, activation);
                }
            }
        }
        copy_wait_all();
    }
}
