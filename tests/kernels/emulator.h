// A CPU stand-in for ptx.cuh: every CUDA thread of a cluster is a thread of the host, barriers are barriers, and an mma gathers the
// fragments of its warp. Slow and exact: it runs the kernels' own source on small shapes where there is no GPU.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::max;
using std::min;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef uint16_t u16;
typedef uint8_t u8;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct dim3_ { int x, y, z; };
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __syncthreads() block_barriers[thread_block]->arrive_and_wait()
#define SHARED_MEMORY(name) u8* name = block_memory[thread_block].data()

static thread_local dim3_ threadIdx, blockIdx;
static thread_local int thread_block, thread_warp;  // block of the cluster, warp of the cluster
static std::vector<std::vector<u8>> block_memory;
static std::vector<std::unique_ptr<std::barrier<>>> block_barriers, warp_barriers;
static std::unique_ptr<std::barrier<>> cluster_barrier;
struct Fragments { u32 a[32][4], b[32][2]; float sum[32][2]; };
static std::vector<Fragments> warp_fragments;

DEVICE uint4 load_weights(const u8* p) { uint4 v; memcpy(&v, p, 16); return v; }
DEVICE u32 load_scales(const u8* p) { u32 v; memcpy(&v, p, 4); return v; }
DEVICE uint4 load_shared(u32 at) { uint4 v; memcpy(&v, &block_memory[thread_block][at], 16); return v; }
DEVICE void store_shared(u32 at, uint4 v) { memcpy(&block_memory[thread_block].at(at), &v, 16); }
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - block_memory[thread_block].data()); }
DEVICE void copy_async(u32 to, const void* from, u32 bytes) {
    u8* at = &block_memory[thread_block].at(to + 15) - 15;
    memset(at, 0, 16);
    memcpy(at, from, bytes);
}
DEVICE void copy_wait_all() {}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u64 both = ((u64)b << 32) | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)((both >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
    return out;
}
DEVICE u32 rotate_left(u32 v, u32 by) { return (v << by) | (v >> (32 - by)); }
#if FP16
typedef _Float16 half_t;
DEVICE float half_to_float(u16 h) { half_t f; memcpy(&f, &h, 2); return (float)f; }
DEVICE u16 float_to_half(float f) { half_t h = (half_t)f; u16 bits; memcpy(&bits, &h, 2); return bits; }
#else
DEVICE float half_to_float(u16 h) { u32 b = (u32)h << 16; float f; memcpy(&f, &b, 4); return f; }
DEVICE u16 float_to_half(float f) {
    u32 b;
    memcpy(&b, &f, 4);
    return f != f ? 0x7FFF : (u16)((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}
#endif
DEVICE u32 multiply_pair(u32 a, u32 b) {
    u32 low = float_to_half(half_to_float(a & 0xFFFF) * half_to_float(b & 0xFFFF));
    u32 high = float_to_half(half_to_float(a >> 16) * half_to_float(b >> 16));
    return low | (high << 16);
}
DEVICE float pick(u32 pair, int high) { return half_to_float((u16)(high ? pair >> 16 : pair)); }
DEVICE float warp_sum_pairwise(float v) { return v; }
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
    Fragments& f = warp_fragments[thread_warp];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++) f.a[lane][i] = a[i];
    f.b[lane][0] = b0;
    f.b[lane][1] = b1;
    warp_barriers[thread_warp]->arrive_and_wait();
    for (int c = 0; c < 4; c++) {
        const int row = g + 8 * (c >> 1), column = 2 * t + (c & 1);
        double sum = d[c];
        for (int k = 0; k < 16; k++) {
            const u32 w = f.a[(row & 7) * 4 + ((k & 7) >> 1)][(k >> 3) * 2 + (row >> 3)];
            const u32 x = f.b[column * 4 + ((k & 7) >> 1)][k >> 3];
            sum += (double)pick(w, k & 1) * pick(x, k & 1);
        }
        d[c] = (float)sum;
    }
    warp_barriers[thread_warp]->arrive_and_wait();
}
DEVICE u32 cluster_rank() { return thread_block; }
DEVICE void cluster_sync() { cluster_barrier->arrive_and_wait(); }
DEVICE float load_remote(u32 address, u32 rank) { float v; memcpy(&v, &block_memory[rank][address], 4); return v; }
DEVICE float shuffle_xor(float v, int mask) {
    Fragments& f = warp_fragments[thread_warp];
    const int lane = threadIdx.x & 31;
    f.sum[lane][0] = v;
    warp_barriers[thread_warp]->arrive_and_wait();
    const float other = f.sum[lane ^ mask][0];
    warp_barriers[thread_warp]->arrive_and_wait();
    return other;
}

// Runs `body` for every thread of every block; a cluster is all blocks along y.
template <class Body>
static void launch(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, Body body) {
    for (int bz = 0; bz < grid_z; bz++)
        for (int bx = 0; bx < grid_x; bx++) {
            block_memory.assign(grid_y, std::vector<u8>(shared_bytes + 16, 0xFF));  // poisoned: NaN as float and as half
            block_barriers.clear();
            warp_barriers.clear();
            for (int b = 0; b < grid_y; b++) block_barriers.push_back(std::make_unique<std::barrier<>>(threads));
            for (int w = 0; w < grid_y * threads / 32; w++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
            warp_fragments.assign(grid_y * threads / 32, {});
            cluster_barrier = std::make_unique<std::barrier<>>(grid_y * threads);
            std::vector<std::thread> pool;
            for (int b = 0; b < grid_y; b++)
                for (int t = 0; t < threads; t++)
                    pool.emplace_back([=] {
                        threadIdx = {t, 0, 0};
                        blockIdx = {bx, b, bz};
                        thread_block = b;
                        thread_warp = (b * threads + t) / 32;
                        body();
                    });
            for (auto& thread : pool) thread.join();
        }
}
