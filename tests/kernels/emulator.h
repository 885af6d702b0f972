// A CPU stand-in for ptx.cuh: every CUDA thread of a cluster is a thread of the host, barriers are barriers, and an mma gathers the
// fragments of its warp. Slow and exact: it runs the kernels' own source on small shapes where there is no GPU.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
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
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct dim3_ { int x, y, z; };
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __syncthreads() block_barriers[thread_block]->arrive_and_wait()
#define SHARED_MEMORY(name) u8* name = block_memory[thread_block].data()
#define make_uint2(a, b) uint2{a, b}
#define make_uint4(a, b, c, d) uint4{a, b, c, d}

static thread_local dim3_ threadIdx, blockIdx;
static thread_local int thread_block, thread_warp;  // block of the cluster, warp of the cluster
static std::vector<std::vector<u8>> block_memory;
static std::vector<std::unique_ptr<std::barrier<>>> block_barriers, warp_barriers;
static std::unique_ptr<std::barrier<>> cluster_barrier;
struct Fragments { u32 a[32][4], b[32][2]; float sum[32][2]; };
static std::vector<Fragments> warp_fragments;

DEVICE uint4 load_weights(const u8* p) { uint4 v; memcpy(&v, p, 16); return v; }
DEVICE u32 load_scales(const u8* p) { u32 v; memcpy(&v, p, 4); return v; }
DEVICE u32 load_shared_word(u32 at) { u32 v; memcpy(&v, &block_memory[thread_block].at(at + 3) - 3, 4); return v; }
DEVICE uint4 load_shared(u32 at) { uint4 v; memcpy(&v, &block_memory[thread_block][at], 16); return v; }
DEVICE void store_shared(u32 at, uint4 v) { memcpy(&block_memory[thread_block].at(at), &v, 16); }
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - block_memory[thread_block].data()); }
DEVICE void copy_async(u32 to, const void* from, u32 bytes) {
    u8* at = &block_memory[thread_block].at(to + 15) - 15;
    memset(at, 0, 16);
    memcpy(at, from, bytes);
}
DEVICE void copy_async_word(u32 to, const void* from, u32 bytes) {
    u8* at = &block_memory[thread_block].at(to + 3) - 3;
    memset(at, 0, 4);
    memcpy(at, from, bytes);
}
DEVICE void publish_to_tensor_cores() {}
DEVICE void copy_commit() {}
template <int PENDING>
DEVICE void copy_wait() {}
DEVICE void copy_wait_all() {}
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}
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
DEVICE float as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
DEVICE u32 as_bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }
DEVICE u16 to_fp16(float f) { _Float16 h = (_Float16)f; u16 bits; memcpy(&bits, &h, 2); return bits; }
DEVICE u16 to_bf16(float f) {
    const u32 b = as_bits(f);
    return (u16)((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}
DEVICE u32 to_fp16_pair(float low, float high) { return to_fp16(low) | ((u32)to_fp16(high) << 16); }
DEVICE u32 to_bf16_pair(float low, float high) { return to_bf16(low) | ((u32)to_bf16(high) << 16); }
DEVICE u32 to_e4m3(float a, float b, float c, float d) {
    const float values[4] = {a, b, c, d};
    u32 out = 0;
    for (int i = 0; i < 4; i++) {  // nearest of all 127 magnitudes
        int best = 0;
        auto value = [](int code) {
            return (code >> 3) ? ldexpf(8 + (code & 7), (code >> 3) - 10) : ldexpf(code & 7, -9);
        };
        for (int code = 0; code < 127; code++)
            if (fabsf(value(code) - fabsf(values[i])) < fabsf(value(best) - fabsf(values[i]))) best = code;
        out |= (u32)(best | (std::signbit(values[i]) ? 128 : 0)) << (8 * i);
    }
    return out;
}
DEVICE void warp_sync() { warp_barriers[thread_warp]->arrive_and_wait(); }
DEVICE float pick(u32 pair, int high) { return half_to_float((u16)(high ? pair >> 16 : pair)); }
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
DEVICE float4 load_remote(u32 address, u32 rank) { float4 v; memcpy(&v, &block_memory[rank].at(address + 15) - 15, 16); return v; }
DEVICE float shuffle_xor(float v, int mask) {
    Fragments& f = warp_fragments[thread_warp];
    const int lane = threadIdx.x & 31;
    f.sum[lane][0] = v;
    warp_barriers[thread_warp]->arrive_and_wait();
    const float other = f.sum[lane ^ mask][0];
    warp_barriers[thread_warp]->arrive_and_wait();
    return other;
}

// barrier.cuh
struct Mbarrier { int needed = 0, arrived = 0, bytes = 0, phase = 0; };
struct BlockBarriers { std::mutex lock; std::map<u32, Mbarrier> at; };
static std::vector<std::unique_ptr<BlockBarriers>> mbarriers;
static std::vector<std::unique_ptr<std::barrier<>>> part_barriers;
static int part_threads;

DEVICE void settle(Mbarrier& b) {
    if (b.arrived == b.needed && b.bytes == 0) {
        b.arrived = 0;
        b.phase ^= 1;
    }
}
DEVICE void barrier_init(u32 at, u32 arrivals) { mbarriers[thread_block]->at[at].needed = arrivals; }
DEVICE void barrier_init_done() {}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    std::lock_guard guard(mbarriers[thread_block]->lock);
    Mbarrier& b = mbarriers[thread_block]->at.at(at);
    b.bytes += bytes;
    b.arrived++;
    settle(b);
}
DEVICE void barrier_arrive(u32 at) { barrier_expect(at, 0); }
DEVICE void barrier_wait(u32 at, u32 parity) {
    for (;; std::this_thread::yield()) {
        std::lock_guard guard(mbarriers[thread_block]->lock);
        if (mbarriers[thread_block]->at.at(at).phase != (int)parity) return;
    }
}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    memcpy(&block_memory[thread_block].at(to + bytes - 1) - (bytes - 1), from, bytes);
    std::lock_guard guard(mbarriers[thread_block]->lock);
    Mbarrier& b = mbarriers[thread_block]->at.at(barrier);
    b.bytes -= bytes;
    settle(b);
}

// wgmma.cuh: each product is done when it is issued.
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int PENDING>
DEVICE void wgmma_wait() {}
template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void give_registers() {}
template <int THREADS>
DEVICE void block_part_sync() { part_barriers[thread_block]->arrive_and_wait(); }
DEVICE u64 wgmma_operand(u32 address) { return address >> 4; }
#if TOKENS > 0
DEVICE void wgmma(float* d, const u32* a, u64 b) {
    Fragments& f = warp_fragments[thread_warp];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++) f.a[lane][i] = a[i];
    warp_barriers[thread_warp]->arrive_and_wait();
    for (int i = 0; i < TOKENS / 2; i++) {
        const int row = g + 8 * ((i >> 1) & 1), token = (i >> 2) * 8 + 2 * t + (i & 1);
        double sum = d[i];
        for (int k = 0; k < 16; k++) {
            const u32 w = f.a[(row & 7) * 4 + ((k & 7) >> 1)][(k >> 3) * 2 + (row >> 3)];
            u32 at = (u32)(b << 4) + (token >> 3) * 1024 + (token & 7) * 128 + 2 * k;
            at ^= ((at >> 7) & 7) << 4;
            u16 x;
            memcpy(&x, &block_memory[thread_block].at(at), 2);
            sum += (double)pick(w, k & 1) * half_to_float(x);
        }
        d[i] = (float)sum;
    }
    warp_barriers[thread_warp]->arrive_and_wait();
}
#endif

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
            mbarriers.clear();
            part_barriers.clear();
            for (int b = 0; b < grid_y; b++) {
                mbarriers.push_back(std::make_unique<BlockBarriers>());
                part_barriers.push_back(std::make_unique<std::barrier<>>(part_threads ? part_threads : threads));
            }
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
                        block_barriers[b]->arrive_and_drop();  // an exited thread holds nobody up
                        cluster_barrier->arrive_and_drop();
                    });
            for (auto& thread : pool) thread.join();
        }
}
