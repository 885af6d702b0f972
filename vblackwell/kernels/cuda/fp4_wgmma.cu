// y = act(x W^T + bias) for tens to hundreds of rows of x (sm_90a): weights are the A operand of wgmma, decoded into registers,
// tokens its n, from shared memory.
//
// A block takes 64 * GROUPS weight rows and TOKENS tokens; each of its GROUPS warpgroups owns 64 rows. Codes go from global
// memory straight to registers, PREFETCH windows of 64 columns ahead; the next window is decoded while the tensor cores work on this
// one. One thread of one more warpgroup brings x by bulk copies, STAGES deep. SPLITS blocks of a cluster split K; their sums meet in shared memory
// and are added in a fixed order.
//
// x comes as an image that `arrange` wrote: [token block][window][TOKENS rows of 128 bytes, 128-byte swizzle], columns inside a
// window permuted as the tiled layout permutes them, zeros beyond K and M. So a stage is one contiguous copy, without a tensor map.
//
// Set by the launcher: FP16, TOKENS, GROUPS, SPLITS, STAGES, PREFETCH (even), REGISTERS (a consumer thread's), MIN_BLOCKS, OUT32.
#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS)
#define THREADS (CONSUMERS + 128)  // registers move between warpgroups, so the copying warp costs a whole one
#define STAGE_BYTES (TOKENS * 128)
#define RED_STRIDE (ROWS + 4)

struct Part {
    uint4 codes;
    u32 scales;
};

DEVICE void consumer_sync() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory"); }

DEVICE u32 load_scale_pair(const u8* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

DEVICE float activate(float z, int activation) {
    if (activation == 1) return z < 0.0f ? 0.0f : z;
    if (activation == 2) return 0.5f * z * (1.0f + erff(z * 0.70710678118654752f));
    if (activation == 3) return z / (1.0f + expf(-z));
    return z;
}

DEVICE void decode_part(const Part& part, u32 (*a)[4]) {
    const u32 upper = scale_pair(part.scales, 0), lower = scale_pair(part.scales, 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top[4], bottom[4];
        decode(i ? part.codes.y : part.codes.x, upper, top);
        decode(i ? part.codes.w : part.codes.z, lower, bottom);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[2 * i + (j >> 1)][2 * (j & 1)] = top[j];
            a[2 * i + (j >> 1)][2 * (j & 1) + 1] = bottom[j];
        }
    }
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(1, SPLITS, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
fp4_wgmma(const u8* image, const u8* codes, const u8* scales, const float* tensor_scale, const u16* bias, void* y, int M,
          int N, int K, int activation) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int bands = (N + 31) / 32, windows = (K + 63) / 64;
    const int begin = windows * (int)blockIdx.y / SPLITS, count = windows * ((int)blockIdx.y + 1) / SPLITS - begin;
    const u32 shared = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;

    if (tid == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= 4 * GROUPS) {
        give_registers<24>();
        if (tid == CONSUMERS) {
            const u8* from = image + ((u64)blockIdx.z * windows + begin) * STAGE_BYTES;
            int stage = 0;
            u32 parity = 1;  // a fresh barrier counts as released
            for (int i = 0; i < count; i++) {
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(full + 8 * stage, STAGE_BYTES);
                copy_bulk(shared + stage * STAGE_BYTES, from + (u64)i * STAGE_BYTES, STAGE_BYTES, full + 8 * stage);
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        take_registers<REGISTERS>();
        float acc[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.0f;
        const int row16 = blockIdx.x * (ROWS / 16) + warp;
        const int band = min(row16 >> 1, bands - 1), half = row16 & 1;
        const u8* from_codes = codes + ((u64)band * windows + begin) * 1024 + half * 512 + lane * 16;
        const u8* from_scales = scales + ((u64)band * windows + begin) * 128 + lane * 4 + half * 2;
        Part buffer[PREFETCH];
        int todo = count;
#define LOAD(slot)                                             \
    if (todo-- > 0) {                                          \
        buffer[slot].codes = load_weights(from_codes);         \
        buffer[slot].scales = load_scale_pair(from_scales);    \
        from_codes += 1024;                                    \
        from_scales += 128;                                    \
    }
#pragma unroll
        for (int d = 0; d < PREFETCH; d++) LOAD(d)
        u32 a[2][4][4];
        decode_part(buffer[0], a[0]);
        LOAD(0)
        int stage = 0, previous = 0;
        u32 parity = 0;
        for (int i = 0; i < count; i += PREFETCH) {
#pragma unroll
            for (int d = 0; d < PREFETCH; d++) {
                if (i + d >= count) break;
                barrier_wait(full + 8 * stage, parity);
                const u64 b = wgmma_operand(shared + stage * STAGE_BYTES);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) wgmma(acc, a[d & 1][s], b + 2 * s);
                wgmma_commit();
                wgmma_wait<1>();
                if (lane == 0 && i + d > 0) barrier_arrive(empty + 8 * previous);
                previous = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
                decode_part(buffer[(d + 1) % PREFETCH], a[(d + 1) & 1]);
                LOAD((d + 1) % PREFETCH)
            }
        }
        wgmma_wait<0>();

        consumer_sync();
        float* red = (float*)memory;  // [TOKENS][RED_STRIDE]
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), row = warp * 16 + ((i >> 1) & 1) * 8 + (lane >> 2);
            red[token * RED_STRIDE + row] = acc[i];
        }
#if SPLITS > 1
        cluster_sync();
        const int rank = cluster_rank();
#else
        consumer_sync();
        const int rank = 0;
#endif
        const float unit = tensor_scale[0] * WEIGHT_UNIT;
        const int m0 = blockIdx.z * TOKENS, elements = min(TOKENS, M - m0) * ROWS;
        for (int e = tid + rank * CONSUMERS; e < elements; e += CONSUMERS * SPLITS) {
            const int t = e / ROWS, row = e % ROWS, n = blockIdx.x * ROWS + row;
            float* at = red + t * RED_STRIDE + row;
#if SPLITS > 1
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SPLITS; s++) sum += load_remote(shared_address(at), s);
#else
            const float sum = *at;
#endif
            if (n < N) {
                float z = sum * unit;
                if (bias) z += half_to_float(bias[n]);
                z = activate(z, activation);
                const u64 out = (u64)(m0 + t) * N + n;
#if OUT32
                ((float*)y)[out] = z;
#else
                ((u16*)y)[out] = float_to_half(z);
#endif
            }
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
    if (token >= TOKENS) return;
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
