// y = act(x W^T + bias) on FP8 tensor cores, for many rows of x (sm_90a): mxfp4 weights become E4M3 in registers, the A operand of wgmma;
// x comes rounded to E4M3, with a scale a row (`round_rows`).
//
// A block takes 64 * GROUPS weight rows and 128 tokens. It goes through K by stages of 128 columns, two windows of the tiled layout: codes and
// scales come by cp.async into a ring that is private to the lane, x by one bulk copy a stage. The tensor cores add up a stage; stages are
// added in fp32 registers, as the tensor cores keep fewer bits of a long sum than fp32 has. Weights of a row are relative to its largest
// scale, which becomes 2^6; that factor and the token's go onto the sums at the end.
//
// A stage of x is 128 rows of 128 bytes with the 128-byte swizzle. A wgmma takes 32 bytes of a row, of which lane t of a quad of A holds bytes
// 4 t and 16 + 4 t on: columns 16 t + 8 i on and 16 t + 8 i + 4 on of its 16 in a window, for its i-th word of codes. So those lie there.
//
// Set by the launcher: E4M3 (1), FP16 (0), OUT32, TOKENS (128), GROUPS, STAGES, PREFETCH (windows), REGISTERS, KEPT.
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS)
#define THREADS (CONSUMERS + 128)
#define STAGE_BYTES (TOKENS * 128)
#define WINDOW_BYTES 640  // codes of 16 rows, scales of 32
#define RINGS (STAGES * STAGE_BYTES)
#define RED_STRIDE (ROWS + 4)
#define MAIN_BYTES (RINGS + 4 * GROUPS * PREFETCH * WINDOW_BYTES)
#define SUM_BYTES (TOKENS * RED_STRIDE * 4)
#define BARRIERS (MAIN_BYTES > SUM_BYTES ? MAIN_BYTES : SUM_BYTES)

// Eight codes times their scale to E4M3 bytes in order of columns. The scale is such that a product's bf16 exponent, subnormals included,
// is E4M3's: bits 4 to 10 are the byte's, 11 to 14 are zero.
DEVICE void decode_e4m3(u32 word, u32 scale, u32& low, u32& high) {
    u32 pairs[4];
    decode(word, scale, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = (pairs[i] & 0x80008000u) | (pairs[i] * 16);  // upper bytes of the halves
    low = permute_bytes(pairs[0], pairs[1], 0x7531);
    high = permute_bytes(pairs[2], pairs[3], 0x7531);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a8_wgmma(const u8* x, const float* x_scale, const u8* codes, const u8* scales, const float* tensor_scale, const u8* row_top,
           const u16* bias, void* y, int M, int N, int K, int activation) {
    SHARED_MEMORY(memory);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64, count = (K + 127) / 128;
    const u32 shared = shared_address(memory), full = shared + BARRIERS, empty = full + 8 * STAGES;

    if (tid == 0) ring_init<STAGES>(full, empty, 4 * GROUPS);
    __syncthreads();
    let_next_start();

    if (warp >= 4 * GROUPS) {
        give_registers<40>();
        if (tid == CONSUMERS) {
            wait_for_previous();
            ring_fill<STAGES, STAGE_BYTES>(shared, full, empty, x + (u64)blockIdx.x * count * STAGE_BYTES, count);
        }
    } else {
        take_registers<REGISTERS>();
        const int row16 = blockIdx.z * (ROWS / 16) + warp, band = min(row16 >> 1, bands - 1), half = row16 & 1;
        const u8* from_codes = codes + (u64)band * windows * 1024 + half * 512 + lane * 16;
        const u8* from_scales = scales + (u64)band * windows * 128 + lane * 4;
        const u32 ring = shared + RINGS + warp * (PREFETCH * WINDOW_BYTES);
        int todo = windows;
        auto load = [&](u32 slot) {  // zeros after the last window
            copy_async(slot + lane * 16, from_codes, todo > 0 ? 16 : 0);
            copy_async_word(slot + 512 + lane * 4, from_scales, todo > 0 ? 4 : 0);
            from_codes += 1024;
            from_scales += 128;
            todo--;
            copy_commit();
        };
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) load(ring + d * WINDOW_BYTES);
        u32 slot = ring, offset[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {  // 2^(12 - exponent field of the row's top), as a pair of bf16
            const int n = min(band * 32 + half * 16 + r * 8 + (lane >> 2), N - 1);
            offset[r] = (139u - (row_top[n] >> 3)) * 0x00800080u;
        }
        auto decode_stage = [&](u32 (*a)[4]) {  // the next two windows
#pragma unroll
            for (int w = 0; w < 2; w++) {
                copy_wait<PREFETCH - 1>();
                const uint4 q = load_shared(slot + lane * 16);
                const u32 packed = load_shared_word(slot + 512 + lane * 4) >> (16 * half);
                load(slot);
                slot = slot == ring + (PREFETCH - 1) * WINDOW_BYTES ? ring : slot + WINDOW_BYTES;
                const u32 upper = permute_bytes(packed, 0, 0x4040) * 16 + offset[0], lower = permute_bytes(packed, 0, 0x4141) * 16 + offset[1];
                decode_e4m3(q.x, upper, a[2 * w][0], a[2 * w][2]);
                decode_e4m3(q.y, upper, a[2 * w + 1][0], a[2 * w + 1][2]);
                decode_e4m3(q.z, lower, a[2 * w][1], a[2 * w][3]);
                decode_e4m3(q.w, lower, a[2 * w + 1][1], a[2 * w + 1][3]);
            }
        };
        float acc[TOKENS / 2], part[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
        u32 a[2][4][4];
        decode_stage(a[0]);
        int stage = 0;
        u32 parity = 0;
        for (int i = 0; i < count; i += 2) {
#pragma unroll
            for (int d = 0; d < 2; d++) {
                if (i + d >= count) break;
                barrier_wait(full + 8 * stage, parity);
                const u64 b = wgmma_operand(shared + stage * STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) wgmma_e4m3(part, a[d][s], b + 2 * s, s > 0);
                wgmma_commit();
                if (i + d + 1 < count) decode_stage(a[d ^ 1]);
                wgmma_wait<0>();
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
#pragma unroll
                for (int t = 0; t < TOKENS / 2; t++) acc[t] += part[t];
            }
        }
        copy_wait_all();
        block_part_sync<CONSUMERS>();
        float* red = (float*)memory;  // [TOKENS][RED_STRIDE]
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = warp * 16 + ((i >> 1) & 1) * 8 + (lane >> 2);
            red[token * RED_STRIDE + row] = acc[i];
        }
        block_part_sync<CONSUMERS>();
        wait_for_previous();  // what x_scale has is the previous kernel's
        const int m0 = blockIdx.x * TOKENS, groups = min(TOKENS, M - m0) * (ROWS / 4);  // groups of four rows
        for (int e = tid; e < groups; e += CONSUMERS) {
            const int t = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.z * ROWS + row;
            if (n >= N) continue;
            float sum[4];
#pragma unroll
            for (int r = 0; r < 4; r++)  // N is a multiple of 16
                sum[r] = red[t * RED_STRIDE + row + r] * as_float((u32)(127 - 21 + (row_top[n + r] >> 3)) << 23);
            store4(y, m0 + t, n, N, float4{sum[0], sum[1], sum[2], sum[3]}, tensor_scale[0] * x_scale[m0 + t], bias, activation);
        }
    }
}

// Rows of x to the image that w4a8_wgmma reads, and their scales. A block takes a row.
extern "C" __global__ void __launch_bounds__(256) round_rows(const u16* x, u8* image, float* x_scale, int M, int K) {
    SHARED_MEMORY(memory);
    const int m = blockIdx.x, stages = (K + 127) / 128, swizzle = m & 7;
    u8* row = image + ((u64)(m / TOKENS) * stages * TOKENS + m % TOKENS) * 128;
    let_next_start();
    wait_for_previous();
    round_row(x + (u64)m * K, x_scale + m, K, stages * 128, threadIdx.x, (float*)memory, [=](int k, uint2 v) {
        u8* at = row + (u64)(k >> 7) * STAGE_BYTES + ((k >> 4) & 3) * 4;
        const int granule = ((k >> 6) & 1) * 4 + ((k >> 3) & 1) * 2;
        *(u32*)(at + ((granule ^ swizzle) << 4)) = v.x;
        *(u32*)(at + (((granule + 1) ^ swizzle) << 4)) = v.y;
    });
}
