// y = act(x W^T + bias) on FP8 tensor cores, for many rows of x (sm_90a), x rounded to E4M3 by rows and W from mxfp4,
// exactly. `w4a8` decodes weights and rounds rows while its tensor cores multiply others; `w4a8_head` does that for the
// first ones, and `w4a8` begins as blocks of that end.
//
// A block takes 128 tokens and FEATURES features; two blocks of a cluster take neighbouring tokens and the same
// features, and each brings half of the weights for both. Two warpgroups multiply, 64 tokens each. Tensor cores add up
// the 128 columns of a step, in fewer bits than fp32 has; these parts are added in fp32 registers, half of the features
// at a time, so that one warpgroup adds while the other's products run.
//
// Of the other eight warps the first brings stages, a step of both operands: tiles of 128-byte rows with the 128-byte
// swizzle, each one bulk copy. Seven make those tiles, from one queue for all blocks: the weight's items (32 rows by a
// step), in the order in which products need them, then rows of x. They write E4M3 to global memory, where it stays in
// the L2, and count what is done of a tile. Warps that multiply wait for counts alone, and any block that runs takes
// work until there is no more: none waits for a block that has not started.
//
// Weights of a row are relative to its largest scale, which becomes 2^6; that factor and the token's go onto the sums
// at the end.
//
// Set by the launcher: FP16 (0: decoding is bf16's), X_FP16 (x and y are fp16), KEPT, ROUND_WARPS (4), COLUMNS (half of
// FEATURES), STAGES, SPLITS (2: blocks of a cluster), HEAD_ROWS and HEAD_STEPS (what `w4a8_head` does).
#define FEATURES (2 * COLUMNS)
#define CONSUMERS 256
#define THREADS (CONSUMERS + 256)
#define A_BYTES (128 * 128)
#define B_BYTES (FEATURES * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define OUT_PITCH 144  // of 64 outputs of a row, such that eight rows are in different banks
#define OUT (STAGES * STAGE_BYTES)
// Of this tile and the next one: of two columns what their sums are multiplied by and what is added.
#define UNITS (OUT + 8 * 16 * OUT_PITCH)
#define TOKEN_UNITS (UNITS + 2 * COLUMNS * 16)
#define BARRIERS (TOKEN_UNITS + 2 * 128 * 4)
#define TILE_BANDS (FEATURES / 32)
#define FIRST_COUNTER 32  // the queue has a cache line to itself
#if X_FP16
#define TO_PAIR to_fp16_pair
#else
#define TO_PAIR to_bf16_pair
#endif

// An item of the weight: 32 rows by two windows of the tiled layout.
struct Item {
    uint4 codes[4];
    u32 scales[2], top;  // of row 8 t + g
};
DEVICE void load_item(Item& v, const u8* codes, const u8* scales, const u8* row_top, int band, int step, int lane,
                      int N, int K) {
    const int windows = (K + 63) / 64;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u64 tile = (u64)band * windows + min(2 * step + i, windows - 1);
        v.codes[2 * i] = load_weights(codes + tile * 1024 + lane * 16);
        v.codes[2 * i + 1] = load_weights(codes + tile * 1024 + 512 + lane * 16);
        v.scales[i] = load_scales(scales + tile * 128 + lane * 4);
    }
    v.top = load_byte(row_top + min(band * 32 + (lane & 3) * 8 + (lane >> 2), N - 1));
}
// To its place in the tiles of `w`; zeros beyond K.
DEVICE void store_item(const Item& v, u8* w, int band, int step, int lane, int K) {
    const int g = lane >> 2, t = lane & 3, steps = (K + 127) / 128;
    u32 units[4];
#pragma unroll
    for (int r = 0; r < 4; r++) units[r] = e4m3_unit(shuffle(v.top, (lane & ~3) + r));
    u8* tile = w + ((u64)(band / TILE_BANDS) * steps + step) * B_BYTES + (band % TILE_BANDS * 32 + g) * 128;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool inside = (2 * step + i) * 64 + 16 * t < K;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint4 bytes = e4m3_row(v.codes[2 * i + (r >> 1)], v.scales[i], r, units[r], inside);
            *(uint4*)(tile + r * 8 * 128 + (((4 * i + t) ^ g) << 4)) = bytes;
        }
    }
}
// Where eight elements of row `m` of x go, from column `k` on.
DEVICE u8* place_of_x(u8* x_tiles, int m, int k, int steps) {
    const u64 row = ((u64)(m / 128) * steps + (k >> 7)) * 128 + m % 128;
    return x_tiles + row * 128 + ((((k >> 4) & 7) ^ (m & 7)) << 4) + (k & 8);
}
// A quotient of less than 2^22, by an estimate that is off by one at most.
DEVICE int divide(int a, int b) {
    const int guess = (int)((float)a * (1.0f / (float)b)), rest = a - guess * b;
    return rest < 0 ? guess - 1 : rest >= b ? guess + 1 : guess;
}

extern "C" __global__ void __cluster_dims__(1, SPLITS, 1) __launch_bounds__(THREADS, 1)
w4a8(const u16* x, u8* x_tiles, float* x_scale, const u8* codes, const u8* scales, const float* tensor_scale,
     const u8* row_top, const u16* bias, u16* y, u8* w, u32* counters, int M, int N, int K, int activation,
     int clusters, int chunk) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = warp_uniform(tid >> 5);
    const int bands = (N + 31) / 32, steps = (K + 127) / 128;
    const int columns = (N + FEATURES - 1) / FEATURES, pairs = (M + 255) / 256, tiles = columns * pairs;
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;
    const u32 read = empty + 8 * STAGES;
    const int rank = blockIdx.y;
    u32 *weights_done = counters + FIRST_COUNTER, *rows_done = weights_done + columns * steps;
    if (tid == 0) {
        barrier_init(read, CONSUMERS / 32);
        barrier_init(read + 8, CONSUMERS / 32);
        ring_init<STAGES>(full, empty, SPLITS * CONSUMERS / 32);
    }
    __syncthreads();
    cluster_arrive_started();
    let_next_start();
    // A cluster's tile: four pairs of token tiles go side by side through all columns, then the next four.
    auto place_of = [&](int tile, int& pair, int& column) {
        const int first = divide(tile, 4 * columns) * 4, width = min(4, pairs - first), rest = tile - first * columns;
        column = divide(rest, width);
        pair = first + rest - column * width;
    };

    if (warp >= CONSUMERS / 32) {
        give_registers<56>();
        cluster_wait_started();
        if (warp == CONSUMERS / 32) {
            int stage = 0, turn = 0;
            u32 parity = 1, read_parity = 1;  // a fresh barrier counts as released
            for (int tile = blockIdx.x; tile < tiles; tile += clusters) {
                int pair, column;
                place_of(tile, pair, column);
                const int m_tile = pair * 2 + rank;
                const u8* a = x_tiles + (u64)m_tile * steps * A_BYTES;
                const u8* b = w + (u64)column * steps * B_BYTES + rank * (B_BYTES / 2);
                const u32 tile_bands = min(TILE_BANDS, bands - column * TILE_BANDS);
                const int tile_rows = min(128, M - m_tile * 128);  // none, or fewer, after the last one
                bool rows_ready = false;
                u32 ready = 0;
                for (int i = 0; i < steps; i++) {
                    if (i % 32 == 0) ready = 0;
                    while (!(ready >> (i % 32) & 1) || !rows_ready) {  // of 32 steps, which are there
                        const int at = i / 32 * 32 + lane;
                        const int rows_now = rows_ready ? tile_rows : (int)load_acquire(rows_done + m_tile);
                        const u32 count = at < steps ? load_acquire(weights_done + column * steps + at) : 0;
                        rows_ready = warp_ballot(rows_now >= tile_rows) == 0xFFFFFFFFu;
                        publish_global();
                        ready = warp_ballot(count >= tile_bands);
                        warp_sync();
                    }
                    if (i == min(2, steps - 1)) {  // after the first stages, which are urgent
                        barrier_wait(read + 8 * turn, read_parity);
                        float4* units = (float4*)(memory + UNITS) + turn * COLUMNS;
                        for (int c = lane; c < COLUMNS; c += 32) {
                            float unit[2] = {0.0f, 0.0f}, more[2] = {0.0f, 0.0f};
#pragma unroll
                            for (int j = 0; j < 2; j++) {
                                const int n = column * FEATURES + 2 * c + j;
                                if (n < N) unit[j] = as_float((u32)(127 - 21 + (row_top[n] >> 3)) << 23);
                                if (n < N && bias) more[j] = X_FLOAT(bias[n]);
                            }
                            units[c] = float4{unit[0], unit[1], more[0], more[1]};
                        }
                        float* tokens = (float*)(memory + TOKEN_UNITS) + turn * 128;
                        for (int m = lane; m < tile_rows; m += 32)
                            tokens[m] = x_scale[m_tile * 128 + m] * tensor_scale[0];
                        turn ^= 1;
                        if (turn == 0) read_parity ^= 1;
                        warp_sync();
                    }
                    if (lane == 0) {
                        barrier_wait(empty + 8 * stage, parity);
                        barrier_expect(full + 8 * stage, STAGE_BYTES);
                        const u32 to = shared + stage * STAGE_BYTES, to_b = to + A_BYTES + rank * (B_BYTES / 2);
                        copy_bulk(to, a + (u64)i * A_BYTES, A_BYTES, full + 8 * stage);
                        copy_bulk_to_cluster(to_b, b + (u64)i * B_BYTES, B_BYTES / 2, full + 8 * stage);
                    }
                    warp_sync();
                    next_stage<STAGES>(stage, parity);
                }
            }
            // The other block releases stages here until its products end. Its outputs need not be waited for.
            for (int s = 0; s < STAGES; s++) {
                barrier_wait(empty + 8 * stage, parity);
                next_stage<STAGES>(stage, parity);
            }
            // `w4a8_head` has done all its work, but a kernel after this one may not ask whether it has ended
            wait_for_previous();
        } else {
            const int chunk_bands = chunk * TILE_BANDS, items = bands * steps, work = items + max(0, M - HEAD_ROWS);
            const int head_items = min(HEAD_STEPS, steps) * min(chunk_bands, bands);
            auto claim = [&]() { return lane == 0 ? head_items + (int)add_relaxed(counters, 1) : 0; };
            u32* written = nullptr;  // the counter of what this warp has stored and not yet counted
            auto publish = [&]() {
                publish_global();
                warp_sync();
                if (lane == 0 && written) add_release(written, 1);
            };
            int item = warp_uniform(claim());
            while (item < items) {
                const int first = divide(item, chunk_bands * steps) * chunk_bands, rest = item - first * steps;
                const int count = min(chunk_bands, bands - first), step = divide(rest, count);
                const int band = first + rest - step * count;
                Item now;
                load_item(now, codes, scales, row_top, band, step, lane, N, K);
                const int claimed = claim();
                publish();  // of the one before, while these loads are under way
                store_item(now, w, band, step, lane, K);
                written = weights_done + band / TILE_BANDS * steps + step;
                item = warp_uniform(claimed);
            }
            // x is seen by a warp that has acquired what the head counted after its wait for the kernel that wrote it.
            // The first tile's rows are the head's.
            while (item < work && load_acquire(rows_done) == 0) {
            }
            while (item < work) {
                const int m = HEAD_ROWS + item - items, claimed = claim();
                publish();
                round_row_by_warp(x + (u64)m * K, x_scale + m, K, steps * 128, lane,
                                  [=](int k, uint2 v) { *(uint2*)place_of_x(x_tiles, m, k, steps) = v; });
                written = rows_done + m / 128;
                item = warp_uniform(claimed);
            }
            publish();
        }
    } else {
        take_registers<200>();
        cluster_wait_started();
        const int group = warp / 4;  // of 64 tokens
        int stage = 0, turn = 0;
        u32 parity = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += clusters) {
            float acc[2][COLUMNS / 2], part[COLUMNS / 2];
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) acc[0][i] = acc[1][i] = 0.0f;
            for (int i = 0; i < steps; i++) {
                barrier_wait(full + 8 * stage, parity);
                const u32 at = shared + stage * STAGE_BYTES;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u64 a = wgmma_operand(at + group * 64 * 128);
                    const u64 b = wgmma_operand(at + A_BYTES + half * COLUMNS * 128);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < 4; s++) wgmma_e4m3(part, a + 2 * s, b + 2 * s, s > 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    if (half == 1 && lane < SPLITS) barrier_arrive_at(empty + 8 * stage, lane);
#pragma unroll
                    for (int j = 0; j < COLUMNS / 2; j++) acc[half][j] += part[j];
                }
                next_stage<STAGES>(stage, parity);
            }
            // A warp's 16 tokens by 64 features at a time, through its own memory: fragments come as pairs of columns,
            // rows leave in whole lines.
            int pair, column;
            place_of(tile, pair, column);
            const int m0 = (pair * 2 + rank) * 128 + warp * 16, n0 = column * FEATURES, g = lane >> 2, t = lane & 3;
            const float4* units = (const float4*)(memory + UNITS) + turn * COLUMNS;
            const float* tokens = (const float*)(memory + TOKEN_UNITS) + turn * 128 + warp * 16;
            const float upper = tokens[g], lower = tokens[g + 8];
            const u32 out = shared + OUT + warp * 16 * OUT_PITCH;
            // of stmatrix: a row of one of four tiles
            const u32 to = out + ((lane & 7) + (lane & 8)) * OUT_PITCH + (lane >> 4) * 16;
            auto store = [&](bool plain) {
                auto finish = [=](float z) { return plain ? z : activate(z, activation); };
#pragma unroll
                for (int c = 0; c < FEATURES; c += 64) {
                    const int granules = FEATURES - c < 64 ? 4 : 8;  // of a row
#pragma unroll
                    for (int v = 0; v < 8; v += 2) {
                        if (v >= granules) break;
                        u32 tiles[4];
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int j = (c / 8 + v + i) % (COLUMNS / 8) * 4, half = (c / 8 + v + i) / (COLUMNS / 8);
                            const float4 unit = units[(c / 8 + v + i) * 4 + t];
                            auto pair_of = [&](int first, float scale) {
                                return TO_PAIR(finish(acc[half][j + first] * (scale * unit.x) + unit.z),
                                               finish(acc[half][j + first + 1] * (scale * unit.y) + unit.w));
                            };
                            tiles[2 * i] = pair_of(0, upper);
                            tiles[2 * i + 1] = pair_of(2, lower);
                        }
                        store_rows(to + v * 16, tiles[0], tiles[1], tiles[2], tiles[3]);
                    }
                    warp_sync();
                    const int row = lane / granules, granule = lane % granules, n = n0 + c + granule * 8;
                    u16* y_row = y + (u64)(m0 + row) * N + n;
#pragma unroll
                    for (int i = 0; i < granules / 2; i++)
                        if (m0 + row + i * (32 / granules) < M && n < N)
                            store_streaming(y_row + (u64)i * (32 / granules) * N,
                                            load_shared(out + (row + i * (32 / granules)) * OUT_PITCH + granule * 16));
                    warp_sync();
                }
            };
            if (activation == 0)
                store(true);
            else
                store(false);
            if (lane == 0) barrier_arrive(read + 8 * turn);
            turn ^= 1;
        }
    }
}

// The first HEAD_ROWS rows of x, two a block; the first HEAD_STEPS steps of the first `chunk` columns of tiles, a warp
// an item. `w4a8` waits for counters alone. `stale`: those of the launch before, which are cleared for the next one.
extern "C" __global__ void __launch_bounds__(256, 5)
w4a8_head(const u16* x, u8* x_tiles, float* x_scale, const u8* codes, const u8* scales, const u8* row_top, u8* w,
          u32* counters, u32* stale, int stale_count, int M, int N, int K, int chunk) {
    SHARED_MEMORY(memory);
    const int steps = (K + 127) / 128, columns = (N + FEATURES - 1) / FEATURES;
    const int row_blocks = (min(M, HEAD_ROWS) + 1) / 2;
    const int bands = min(chunk * TILE_BANDS, (N + 31) / 32), items = min(HEAD_STEPS, steps) * bands;
    const int block = blockIdx.x, tid = threadIdx.x;
    u32 *weights_done = counters + FIRST_COUNTER, *rows_done = weights_done + columns * steps;
    if (block >= row_blocks) {
        const int item = (block - row_blocks) * 8 + (tid >> 5), lane = tid & 31;
        const int step = divide(item, bands), band = item - step * bands;
        Item now;
        if (item < items) load_item(now, codes, scales, row_top, band, step, lane, N, K);
        wait_for_previous();  // w may lie where the previous kernel still reads
        let_next_start();     // after the wait: `w4a8` does not wait for what is before this kernel
        if (item >= items) return;
        store_item(now, w, band, step, lane, K);
        publish_global();
        warp_sync();
        if (lane == 0) add_release(weights_done + band / TILE_BANDS * steps + step, 1);
        return;
    }
    wait_for_previous();
    let_next_start();
    for (int i = block * 256 + tid; i < stale_count; i += row_blocks * 256) stale[i] = 0;
    const int half = tid / (32 * ROUND_WARPS), m = min(2 * block + half, M - 1);  // the last row perhaps twice
    auto put = [=](int k, uint2 v) { *(uint2*)place_of_x(x_tiles, m, k, steps) = v; };
    float* tops = (float*)memory + half * ROUND_WARPS;
    round_row(x + (u64)m * K, x_scale + m, K, steps * 128, tid % (32 * ROUND_WARPS), tops, put);
    publish_global();
    __syncthreads();
    if (tid == 0) add_release(rows_done + 2 * block / 128, min(2, M - 2 * block));
}
