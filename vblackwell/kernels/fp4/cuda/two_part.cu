// y = act(x W^T + bias) for few rows of x and a weight in two parts (kernels/fp4/layout.py), in one pass over both.
//
// The frame is that of fp4_mma.cu (mma_block.cuh): weights are the A operand of mma.m16n8k16, tokens its n = 8; a warp
// takes one band of 32 weight rows and a share of K; ROW_WARPS stand side by side, K_WARPS take turns at the windows,
// SPLITS blocks of a cluster split K further; x comes in bulk copies after barriers (BULK: sm_90, K a multiple of 64)
// or is staged by chunks; sums meet in shared memory, those of the blocks are sent to the one that finishes them, and
// are added in a fixed order. What differs: a window is 2176 bytes, and the decode adds the fine bits to the coarse
// ones before the one multiplication by the scale, an E2M5 number times a scale of four bits, rounded to bf16 (2^-8 of
// a weight at most, next to the 2^-6 of a code that the fine part resolves). So the fine part costs its bytes and
// eleven operations for eight weights, and no second product.
//
// Set by the launcher: FP16 (0), TOKENS (a power of two, at most 16), ROW_WARPS, K_WARPS, SPLITS, PREFETCH, MIN_BLOCKS,
// OUT32, BULK (or not), and with it CHUNK (a multiple of K_WARPS) and X_STAGES.
#define WINDOW_BYTES 2176  // coarse codes of the upper 16 rows, of the lower, fine codes of both, scales

// The window at `w_address` (this lane's 16 bytes) times 64 columns of x at `x_address`.
DEVICE void compute(float (*acc)[NB][4], u32 w_address, u32 scale_address, u32 x_address, u32 one) {
    u32 a[2][4][4];  // [half][step of 16 columns][fragment]
    const u32 scales = load_shared_word(scale_address);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint4 q = load_shared(w_address + h * 512), f = load_shared(w_address + 1024 + h * 512);
        const u32 upper = scale_pair(scales, 2 * h), lower = scale_pair(scales, 2 * h + 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 top[4], bottom[4];
            decode_parts(i ? q.y : q.x, i ? f.y : f.x, one, top);
            decode_parts(i ? q.w : q.z, i ? f.w : f.z, one, bottom);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                top[j] = multiply_pair(top[j], upper);
                bottom[j] = multiply_pair(bottom[j], lower);
            }
            set_fragments(a[h], i, top, bottom);
        }
    }
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
        const uint4 b0 = load_shared(x_address + nb * X_GROUP), b1 = load_shared(x_address + nb * X_GROUP + X_HALF);
        multiply_tokens(acc, a, nb, b0, b1);
    }
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
two_part_mma(const u16* x, const u8* codes, const u8* fine, const u8* scales, const float* tensor_scale, const u16* bias, void* y,
             int M, int N, int K, int activation, int chunk_windows, int chunks, u32 one, int shared_bytes) {
    SHARED_MEMORY(memory);
    let_next_start();
#if SPLITS > 1
    cluster_arrive_started();
#endif
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int band = min((int)blockIdx.x * ROW_WARPS + row_warp, bands - 1);
    const int m0 = blockIdx.z * TOKENS, tokens = min(TOKENS, M - m0);

    // Shared memory: a ring for each warp, then x (two buffers if there are several chunks, with BULK X_STAGES slots
    // and their barriers); later the sums.
    const u32 ring = shared_address(memory) + warp * (PREFETCH * WINDOW_BYTES);
    const u32 shared_x = shared_address(memory) + ROW_WARPS * K_WARPS * PREFETCH * WINDOW_BYTES;
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
    const u8* band_fine = fine + (u64)band * windows * 1024 + lane * 16;
    const u8* band_scales = scales + (u64)band * windows * 128 + lane * 4;
    int next = first + k_warp;  // the next window to load
    auto load = [&](u32 slot) {
#if BULK
        if (next < end) {
            const u32 at = next;
#else
        if (todo-- > 0) {
            const u32 at = min(next, windows - 1);
#endif
            const u8 *from = band_codes + (u64)(at * 1024), *fine_from = band_fine + (u64)(at * 1024);
            const u32 to = slot + lane * 16;
            copy_async(to, from, 16);
            copy_async(to + 512, from + 512, 16);
            copy_async(to + 1024, fine_from, 16);
            copy_async(to + 1536, fine_from + 512, 16);
            copy_async_word(slot + 2048 + lane * 4, band_scales + (u64)(at * 128), 4);
            next += K_WARPS;
        }
        copy_commit();
    };
#pragma unroll
    for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
    const float unit = tensor_scale[0] * WEIGHT_UNIT;

    float acc[2][NB][4];
#pragma unroll
    for (int i = 0; i < 2 * NB * 4; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] = 0.0f;
    const u32 token = TOKENS < 8 ? min(lane >> 2, TOKENS - 1) : lane >> 2;
    u32 slot = 0;
    x += (u64)m0 * K;
#if BULK
    const u32 full = shared_x + X_STAGES * TOKENS * X_PITCH, empty = full + 8 * X_STAGES;
    if (tid == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, ROW_WARPS * K_WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    auto fetch = [&](int chunk) {  // by one warp: a lane asks for a row
        const int from = first + chunk * CHUNK, stage = chunk % X_STAGES;
        const u32 bytes = (min(from + CHUNK, end) - from) * 128;
        if (lane == 0) barrier_expect(full + 8 * stage, tokens * bytes);
        warp_sync();
        if (lane < tokens)
            copy_bulk(shared_x + (stage * TOKENS + lane) * X_PITCH, x + (u64)lane * K + from * 64, bytes, full + 8 * stage);
    };
    if (warp == 0) {
        wait_for_previous();  // the others see x, and with it the previous kernel's end, through the barriers
        for (int chunk = 0; chunk < min(X_STAGES, chunks); chunk++) fetch(chunk);
    }
    const u32 x_lane = shared_x + token * X_PITCH + (lane & 3) * 32 + k_warp * 128;
    int stage = 0, previous = 0;
    u32 parity = 0, previous_parity = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (warp == 0 && chunk > 0 && chunk - 1 + X_STAGES < chunks) {
            barrier_wait(empty + 8 * previous, previous_parity);
            fetch(chunk - 1 + X_STAGES);
        }
        barrier_wait(full + 8 * stage, parity);
        u32 x_address = x_lane + stage * (TOKENS * X_PITCH);
        const int mine = min(CHUNK, end - first - chunk * CHUNK) - k_warp;
#pragma unroll 2
        for (int i = 0; i < mine; i += K_WARPS) {
            const u32 at = ring + slot;
            copy_wait<PREFETCH - 1>();
            compute(acc, at + lane * 16, at + 2048 + lane * 4, x_address, one);
            load(at);
            x_address += K_WARPS * 128;
            slot = slot == (PREFETCH - 1) * WINDOW_BYTES ? 0 : slot + WINDOW_BYTES;
        }
        warp_sync();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        previous = stage;
        previous_parity = parity;
        if (++stage == X_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
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
        u32 x_address = shared_x + (chunk & 1) * buffer_bytes + x_lane;
#pragma unroll 2
        for (int i = 0; i < per_warp; i++) {
            const u32 at = ring + slot;
            copy_wait<PREFETCH - 1>();
            compute(acc, at + lane * 16, at + 2048 + lane * 4, x_address, one);
            load(at);
            x_address += K_WARPS * TOKENS * 128;
            slot = slot == (PREFETCH - 1) * WINDOW_BYTES ? 0 : slot + WINDOW_BYTES;
        }
    }
#endif
    copy_wait_all();

    float* red = (float*)memory;  // [K_WARPS][TOKENS][RED_STRIDE]
    __syncthreads();
    put_sums<TOKENS>(red, acc, 0, row_warp, k_warp, lane);
    __syncthreads();
    const int count = tokens * (ROWS / 4);  // groups of four rows
    auto finish = [&](int e, float4 sum) {
        const int row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
        if (n < N) store4(y, m0 + e / (ROWS / 4), n, N, sum, unit, bias, activation);
    };
#if SPLITS == 1
    for (int e = tid; e < count; e += THREADS) finish(e, block_sum<TOKENS>(red, e));
#else
    // Group e is finished by block e % SPLITS, to which each block sends its sum: a place for every block's, beyond all
    // that another one may still be reading. So blocks meet once, and no block waits for an answer.
    const int rank = cluster_rank();
    const u32 given = shared_address(memory) + shared_bytes - TOKENS * ROWS * 4;
    constexpr int SHARE = TOKENS * (ROWS / 4) / SPLITS;  // groups a block, at most
    cluster_wait_started();
    for (int e = tid; e < count; e += THREADS) store_remote(given + (rank * SHARE + e / SPLITS) * 16, e % SPLITS, block_sum<TOKENS>(red, e));
    cluster_sync();
    const float4* sums = (const float4*)(memory + shared_bytes - TOKENS * ROWS * 4);
    for (int i = tid; i * SPLITS + rank < count; i += THREADS) {
        float4 sum = sums[i];
#pragma unroll
        for (int s = 1; s < SPLITS; s++) add4(sum, sums[s * SHARE + i]);
        finish(i * SPLITS + rank, sum);
    }
#endif
}
