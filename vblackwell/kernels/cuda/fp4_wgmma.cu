// y = act(x W^T + bias) for tens to hundreds of rows of x (sm_90a): weights are the A operand of wgmma, decoded into registers,
// tokens its n, from shared memory.
//
// A block takes 64 * GROUPS weight rows and TOKENS tokens; each of its GROUPS warpgroups owns 64 rows, and KGROUPS such sets take turns at
// the windows of 64 columns. Codes and scales come by cp.async, PREFETCH windows ahead, into a ring that is private to the lane, so that waiting
// for them takes no barrier; the next window is decoded into registers while the tensor cores work on this one. One more
// warpgroup brings x, STAGES windows deep. SPLITS blocks of a cluster split K; all sums meet in shared memory and are added in a fixed order.
//
// A stage of x is TOKENS rows of 128 bytes with the 128-byte swizzle, columns inside a window permuted as the tiled layout
// permutes them, zeros beyond K. A kernel before this one (`arrange`) has written that form, and a stage is one bulk copy. With DIRECT
// there is no such kernel: MAKERS warps take turns at windows, of which each loads x as it is into registers and stores it in that
// form. A lane turns four granules of 16 bytes, 4 x 4 words, into four others, which is no work.
//
// Set by the launcher: FP16, TOKENS, DIRECT, GROUPS, KGROUPS, SPLITS, STAGES (of each K group the same, two or more; of each maker, too),
// PREFETCH, REGISTERS (a consumer thread's), MIN_BLOCKS, OUT32.
#define MAKERS (KGROUPS == 3 ? 3 : 4)
static_assert(KGROUPS == 1 || (STAGES % KGROUPS == 0 && STAGES >= 2 * KGROUPS), "a stage belongs to one K group");
static_assert(!DIRECT || STAGES % MAKERS == 0, "a stage belongs to one maker");
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS * KGROUPS)
#define THREADS (CONSUMERS + 128)  // registers move between warpgroups, so the copying warp costs a whole one
#define STAGE_BYTES (TOKENS * 128)
#define WINDOW_BYTES 640  // codes of 16 rows, scales of 32
#define COPY_REGISTERS 40
#define RINGS (STAGES * STAGE_BYTES)
#define RED_STRIDE (ROWS + 4)
#define MAIN_BYTES (RINGS + 4 * GROUPS * KGROUPS * PREFETCH * WINDOW_BYTES)
#define SUM_BYTES (KGROUPS * TOKENS * RED_STRIDE * 4)
#define BARRIERS (MAIN_BYTES > SUM_BYTES ? MAIN_BYTES : SUM_BYTES)

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
fp4_wgmma(const u8* x, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M,
          int N, int K, int activation) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int begin = windows * (int)blockIdx.y / SPLITS, count = windows * ((int)blockIdx.y + 1) / SPLITS - begin;
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;

    if (tid == 0) ring_init<STAGES>(full, empty, 4 * GROUPS);
    __syncthreads();
    let_next_start();

    if (warp >= 4 * GROUPS * KGROUPS) {
#if DIRECT
        const int maker = warp - 4 * GROUPS * KGROUPS, m0 = blockIdx.z * TOKENS, j = lane & 1;
        constexpr int TASKS = TOKENS / 16 < 4 ? TOKENS / 16 : 4;  // rows that a lane has half of, at a time
        int stage = maker;
        u32 parity = 1;  // a fresh barrier counts as released
        wait_for_previous();
        for (int i = maker; i < count && maker < MAKERS; i += MAKERS) {
#pragma unroll
            for (int first = 0; first < TOKENS; first += 16 * TASKS) {
                uint4 v[TASKS][4];
#pragma unroll
                for (int r = 0; r < TASKS; r++)
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        const int m = m0 + first + r * 16 + (lane >> 1), k = (begin + i) * 64 + (2 * t + j) * 8;
                        v[r][t] = m < M && k < K ? *(const uint4*)(x + ((u64)m * K + k) * 2) : make_uint4(0, 0, 0, 0);
                    }
                if (first == 0) barrier_wait(empty + 8 * stage, parity);
#pragma unroll
                for (int r = 0; r < TASKS; r++) {
                    const int token = first + r * 16 + (lane >> 1), swizzle = token & 7;
                    const u32 to = shared + stage * STAGE_BYTES + token * 128;
                    store_shared(to + (((4 * j) ^ swizzle) << 4), make_uint4(v[r][0].x, v[r][1].x, v[r][2].x, v[r][3].x));
                    store_shared(to + (((4 * j + 1) ^ swizzle) << 4), make_uint4(v[r][0].y, v[r][1].y, v[r][2].y, v[r][3].y));
                    store_shared(to + (((4 * j + 2) ^ swizzle) << 4), make_uint4(v[r][0].z, v[r][1].z, v[r][2].z, v[r][3].z));
                    store_shared(to + (((4 * j + 3) ^ swizzle) << 4), make_uint4(v[r][0].w, v[r][1].w, v[r][2].w, v[r][3].w));
                }
            }
            publish_to_tensor_cores();
            warp_sync();
            if (lane == 0) barrier_arrive(full + 8 * stage);
            stage += MAKERS;
            if (stage >= STAGES) {
                stage -= STAGES;
                parity ^= 1;
            }
        }
#else
        give_registers<COPY_REGISTERS>();
        if (tid == CONSUMERS) {
            wait_for_previous();
            ring_fill<STAGES, STAGE_BYTES>(shared, full, empty, x + ((u64)blockIdx.z * windows + begin) * STAGE_BYTES, count);
        }
#endif
    } else {
#if !DIRECT
        take_registers<REGISTERS>();
#endif
        const int k_group = warp / (4 * GROUPS), row_warp = warp % (4 * GROUPS);
        const int row16 = blockIdx.x * (ROWS / 16) + row_warp, band = min(row16 >> 1, bands - 1), half = row16 & 1;
        const u64 first = (u64)band * windows + begin + k_group;
        const u8* from_codes = codes + first * 1024 + half * 512 + lane * 16;
        const u8* from_scales = scales + first * 128 + lane * 4;
        const int mine = (count - k_group + KGROUPS - 1) / KGROUPS;  // windows of this warp
        const u32 ring = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES);
        int todo = mine;
        auto load = [&](u32 slot) {
            if (todo-- > 0) {
                copy_async(slot + lane * 16, from_codes, 16);
                copy_async_word(slot + 512 + lane * 4, from_scales, 4);
                from_codes += KGROUPS * 1024;
                from_scales += KGROUPS * 128;
            }
            copy_commit();
        };
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
        const float unit = tensor_scale[0] * WEIGHT_UNIT;
        float acc[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
        u32 a[2][4][4], slot = ring;
        copy_wait<PREFETCH - 1>();
        uint4 q = load_shared(slot + lane * 16);
        u32 packed = load_shared_word(slot + 512 + lane * 4);
        if (mine > 0) decode_window(q, packed, half, a[0]);
        int stage = k_group, previous = 0;
        u32 parity = 0;
        for (int i = 0; i < mine; i += 2) {
#pragma unroll
            for (int d = 0; d < 2; d++) {
                if (i + d >= mine) break;
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
                stage += KGROUPS;
                if (stage >= STAGES) {
                    stage -= STAGES;
                    parity ^= 1;
                }
                if (i + d + 1 < mine) decode_window(q, packed, half, a[d ^ 1]);
            }
        }
        copy_wait_all();
        wgmma_wait<0>();

        block_part_sync<CONSUMERS>();
        float* red = (float*)memory;  // [KGROUPS][TOKENS][RED_STRIDE]
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = row_warp * 16 + ((i >> 1) & 1) * 8 + (lane >> 2);
            red[(k_group * TOKENS + token) * RED_STRIDE + row] = acc[i];
        }
        const int m0 = blockIdx.z * TOKENS, groups = min(TOKENS, M - m0) * (ROWS / 4);  // groups of four rows
#if KGROUPS > 1
        block_part_sync<CONSUMERS>();
        for (int e = tid; e < groups; e += CONSUMERS) {
            float* at = red + e / (ROWS / 4) * RED_STRIDE + e % (ROWS / 4) * 4;
            float4 sum = *(float4*)at;
#pragma unroll
            for (int j = 1; j < KGROUPS; j++) add4(sum, *(float4*)(at + j * TOKENS * RED_STRIDE));
            *(float4*)at = sum;
        }
#endif
#if SPLITS > 1
        cluster_sync();
        const int rank = cluster_rank();
#else
        if (KGROUPS == 1) block_part_sync<CONSUMERS>();  // a thread reads back what it has added up itself
        const int rank = 0;
#endif
        for (int e = tid + rank * CONSUMERS; e < groups; e += CONSUMERS * SPLITS) {
            const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
            float* at = red + t * RED_STRIDE + row;
#if SPLITS > 1
            float4 sum = load_remote(shared_address(at), 0);
#pragma unroll
            for (int s = 1; s < SPLITS; s++) add4(sum, load_remote(shared_address(at), s));
#else
            const float4 sum = *(float4*)at;
#endif
            if (n < N) store4(y, m0 + t, n, N, sum, unit, bias, activation);
        }
#if SPLITS > 1
        cluster_sync();
#endif
    }
}

// x to the image that fp4_wgmma reads. One thread writes 16 bytes.
extern "C" __global__ void __launch_bounds__(256) arrange(const u16* x, u8* image, int M, int K) {
    const int windows = (K + 63) / 64, m0 = blockIdx.y * TOKENS;
    const int at = blockIdx.x * 256 + threadIdx.x;  // [token][window][granule]: neighbours write, and nearly read, one row
    const int granule = at & 7, window = (at >> 3) % windows, token = (at >> 3) / windows;
    let_next_start();
    if (token >= TOKENS) return;
    wait_for_previous();
    const int q = granule ^ (token & 7), m = m0 + token;
    u32 out[4] = {0, 0, 0, 0};
    if (m < M) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int k = window * 64 + 16 * t + 4 * (q >> 1) + 2 * (q & 1);
            if (k < K) out[t] = *(const u32*)(x + (u64)m * K + k);
        }
    }
    u8* to = image + (((u64)blockIdx.y * windows + window) * TOKENS + token) * 128 + granule * 16;
    *(uint4*)to = make_uint4(out[0], out[1], out[2], out[3]);
}
