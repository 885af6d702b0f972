// A CPU stand-in for ptx.cuh, barrier.cuh and wgmma*.cuh: every CUDA thread is a coroutine, barriers are barriers, and an mma gathers the
// fragments of its warp. Slow and exact: it runs the kernels' own source on small shapes where there is no GPU. What no macro changes is
// in emulator*.cpp, which are compiled once: the standard library's headers take the compiler longer than any kernel.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "emulator_runtime.h"
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __cluster_dims__(...)
#define __syncthreads() block_arrive()
#define SHARED_MEMORY(name) u8* name = shared_memory()
#define make_uint2(a, b) uint2{a, b}
#define make_uint4(a, b, c, d) uint4{a, b, c, d}

template <class T>
DEVICE T max(T a, T b) { return a < b ? b : a; }
template <class T>
DEVICE T min(T a, T b) { return b < a ? b : a; }
DEVICE uint4 load_weights(const u8* p) { uint4 v; memcpy(&v, p, 16); return v; }
DEVICE u32 load_scales(const u8* p) { u32 v; memcpy(&v, p, 4); return v; }
DEVICE u32 load_byte(const u8* p) { return *p; }
DEVICE u32 load_shared_word(u32 at) { u32 v; memcpy(&v, shared_at(running->rank, at, 4), 4); return v; }
DEVICE uint4 load_shared(u32 at) { uint4 v; memcpy(&v, shared_at(running->rank, at, 16), 16); return v; }
DEVICE void store_shared(u32 at, uint4 v) { memcpy(shared_at(running->rank, at, 16), &v, 16); }
DEVICE void store_streaming(void* p, uint4 v) { memcpy(p, &v, 16); }
DEVICE u32 load_pair(const u16* row, int k, int K) {
    const u32 low = row[min(k, K - 1)], high = row[min(k + 1, K - 1)];
    return (k < K ? low : 0) | (k + 1 < K ? high << 16 : 0);
}
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - shared_memory()); }
DEVICE void copy_async(u32 to, const void* from, u32 bytes) { copy_later(to, from, bytes, 16); }
DEVICE void copy_async_word(u32 to, const void* from, u32 bytes) { copy_later(to, from, bytes, 4); }
DEVICE void publish_global() {}
DEVICE void copy_commit() { copies_commit(); }
template <int PENDING>
DEVICE void copy_wait() { copies_wait(PENDING); }
DEVICE void copy_wait_all() {
    copies_commit();
    copies_wait(0);
}
DEVICE u32 max_pair(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | (max(a >> 16, b >> 16) << 16); }
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u64 both = ((u64)b << 32) | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)((both >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
    return out;
}
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
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
DEVICE void prefetch_l2(const void*) {}
DEVICE u32 as_bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }
DEVICE float fp16_to_float(u16 h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
DEVICE float bf16_to_float(u16 h) { return as_float((u32)h << 16); }
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
    for (int i = 0; i < 4; i++) {
        const float v = fminf(fabsf(values[i]), 448.0f);
        int exponent;
        frexpf(fmaxf(v, 0.001953125f), &exponent);
        exponent = max(exponent - 1, -6);
        // eighths of that power of two, ties to even; the first bit carries into the exponent's field
        const u32 code = 8 * (exponent + 6) + (u32)rintf(ldexpf(v, 3 - exponent));
        out |= (values[i] != values[i] ? 127 : code | (signbit(values[i]) ? 128 : 0)) << (8 * i);
    }
    return out;
}
DEVICE void warp_sync() { warp_arrive(); }
DEVICE int warp_uniform(int v) {
    Fragments& f = fragments();
    f.a[threadIdx.x & 31][0] = v;
    warp_arrive();
    return f.a[0][0];
}
DEVICE u32 shuffle(u32 v, int lane) {
    Fragments& f = fragments();
    f.a[threadIdx.x & 31][0] = v;
    warp_arrive();
    return f.a[lane][0];
}
DEVICE u32 warp_ballot(bool v) {
    Fragments& f = fragments();
    f.a[threadIdx.x & 31][0] = v;
    warp_arrive();
    u32 votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= f.a[lane][0] << lane;
    return votes;
}
DEVICE float pick(u32 pair, int high) { return half_to_float((u16)(high ? pair >> 16 : pair)); }
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
    Fragments& f = fragments();
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++) f.a[lane][i] = a[i];
    f.b[lane][0] = b0;
    f.b[lane][1] = b1;
    warp_arrive();
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
}
DEVICE u32 cluster_rank() { return running->rank; }
DEVICE void cluster_sync() { cluster_arrive(); }
DEVICE void cluster_arrive_started() { cluster_begin(); }
DEVICE void cluster_wait_started() { cluster_end(); }
DEVICE void store_remote(u32 address, u32 rank, float4 v) { memcpy(shared_at(rank, address, 16), &v, 16); }
DEVICE float4 load_remote(u32 address, u32 rank) { float4 v; memcpy(&v, shared_at(rank, address, 16), 16); return v; }
DEVICE float shuffle_xor(float v, int mask) {
    Fragments& f = fragments();
    const int lane = threadIdx.x & 31;
    f.sum[lane][0] = v;
    warp_arrive();
    return f.sum[lane ^ mask][0];
}

// barrier.cuh
DEVICE void barrier_init_done() {}
DEVICE void barrier_arrive(u32 at) { barrier_expect(at, 0); }
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    late_copy(running->rank, to, from, bytes, barrier);
}
DEVICE void copy_bulk_to_cluster(u32 to, const void* from, u32 bytes, u32 barrier) {
    for (int rank = 0; rank < cluster_blocks(); rank++) late_copy(rank, to, from, bytes, barrier);
}
DEVICE void send(u32 address, u32 barrier, u32 rank, float4 v) { late_send(rank, address, &v, 16, barrier); }
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }

// wgmma.cuh: products are done when they are waited for.
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() { products_commit(); }
template <int PENDING>
DEVICE void wgmma_wait() { products_wait(PENDING); }
template <int COUNT>
DEVICE void take_registers() {}
template <int COUNT>
DEVICE void give_registers() {}
template <int THREADS>
DEVICE void block_part_sync() { block_part_arrive(THREADS); }
#if FP16
#define to_half_pair to_fp16_pair
#else
#define to_half_pair to_bf16_pair
#endif
DEVICE void store_columns(u32 address, u32 tile0, u32 tile1, u32 tile2, u32 tile3) {
    Fragments& f = fragments();
    const int lane = threadIdx.x & 31, column = lane & 7;
    const u32 tiles[4] = {tile0, tile1, tile2, tile3};
    for (int i = 0; i < 4; i++) f.a[lane][i] = tiles[i];
    warp_arrive();
    u16 halves[8];
    for (int row = 0; row < 8; row++) halves[row] = (u16)(f.a[row * 4 + column / 2][lane >> 3] >> (16 * (column & 1)));
    memcpy(shared_at(running->rank, address, 16), halves, 16);
}
DEVICE void store_rows(u32 address, u32 tile0, u32 tile1, u32 tile2, u32 tile3) {
    Fragments& f = fragments();
    const int lane = threadIdx.x & 31;
    const u32 tiles[4] = {tile0, tile1, tile2, tile3};
    for (int i = 0; i < 4; i++) f.a[lane][i] = tiles[i];
    warp_arrive();
    u32 pairs[4];
    for (int i = 0; i < 4; i++) pairs[i] = f.a[(lane & 7) * 4 + i][lane >> 3];
    memcpy(shared_at(running->rank, address, 16), pairs, 16);
}
DEVICE u64 wgmma_operand(u32 address) { return address >> 4; }
#if TOKENS > 0
DEVICE void wgmma(float* d, const u32* a, u64 b) {
    Fragments& f = fragments();
    const int lane = threadIdx.x & 31, g = lane >> 2;
    for (int i = 0; i < 4; i++) f.a[lane][i] = a[i];
    warp_arrive();
    Operands operands = {0, (u32)b, TOKENS, 1, {}, half_to_float};
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++)
            operands.weights[half][k] = half_to_float((u16)(f.a[g * 4 + k % 8 / 2][k / 8 * 2 + half] >> (16 * (k & 1))));
    product_later(multiply_halves, d, operands);
}
#endif
#ifdef COLUMNS
DEVICE void wgmma_e4m3(float* d, u64 a, u64 b, int add) { product_later(multiply_e4m3, d, {(u32)a, (u32)b, COLUMNS, add}); }
#endif

template <class Body>
static void launch(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, Body body) {
    auto call = [](const void* context) { (*(const Body*)context)(); };
    auto free_body = [](void* context) { delete (Body*)context; };
    launch_threads(grid_x, grid_y, grid_z, threads, shared_bytes, call, new Body(body), free_body);
}
