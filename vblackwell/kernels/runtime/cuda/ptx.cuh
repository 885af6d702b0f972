// The instructions of the FP4 kernels, one function each; tests/kernels/emulator.h gives the same ones for a CPU.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]

// Weights are read once: keep them out of L1. Not .nc: such loads the assembler moves after wait_for_previous.
DEVICE uint4 load_weights(const u8* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u32 load_scales(const u8* p) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// A byte as a whole word: bytes are packed together by the compiler, which waits for them to do so.
DEVICE u32 load_byte(const u8* p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u32 load_shared_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
DEVICE uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
DEVICE void store_shared(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
// To global memory, and out of the L2 before what is read there again and again.
DEVICE void store_streaming(void* p, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Halves k and k + 1 of a row that may begin anywhere; zeros from K on. No branch, so that many are loaded at once.
DEVICE u32 load_pair(const u16* row, int k, int K) {
    const u32 low = row[min(k, K - 1)], high = row[min(k + 1, K - 1)];
    return (k < K ? low : 0) | (k + 1 < K ? high << 16 : 0);
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory; zeros where `bytes` is 0.
DEVICE void copy_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same for 4 bytes.
DEVICE void copy_async_word(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's newest groups are under way.
template <int PENDING>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE void warp_sync() { __syncwarp(); }
// A value that all lanes of a warp have; the compiler knows it then.
DEVICE int warp_uniform(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }
DEVICE u32 shuffle(u32 v, int lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }  // another lane's
DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
// A barrier for the first THREADS threads of a block.
template <int THREADS>
DEVICE void block_part_sync() { asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory"); }

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float f) { return __float_as_uint(f); }
DEVICE float fp16_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE float bf16_to_float(u16 h) { return as_float((u32)h << 16); }
DEVICE u32 to_bf16_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u32 to_fp16_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
#if __CUDA_ARCH__ >= 890
DEVICE u32 to_e4m3(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)low | ((u32)high << 16);
}
#endif

// Programmatic dependent launch: the next kernel of the stream may start now; wait until the previous one has finished
// and its writes are seen. Before the wait a kernel may touch only what no kernel writes: weights, and the launcher
// sees to it that the first launch after a write to one does not overlap (kernels/runtime/launch.py).
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Bring a line into the L2, which any kernel may still write: it changes what is fast, not what is seen.
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
// Counters in global memory, by which blocks tell each other what they have written there.
DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void add_release(u32* p, u32 by) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(by) : "memory");
}
DEVICE u32 add_acquire_release(u32* p, u32 by) {
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(by) : "memory");
    return v;
}
DEVICE u32 add_relaxed(u32* p, u32 by) {
    u32 v;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(by) : "memory");
    return v;
}
#if __CUDA_ARCH__ >= 900
// Between what ordinary stores have written to global memory and bulk copies that read it, on both sides of a counter.
DEVICE void publish_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#endif
DEVICE u32 warp_ballot(bool v) { return __ballot_sync(0xFFFFFFFFu, v); }
DEVICE u32 max_pair(u32 a, u32 b) { return __vmaxu2(a, b); }  // of unsigned halves
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// Bits of `a` where `mask` has ones, of `b` elsewhere: one instruction, which the compiler does not find.
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
DEVICE u32 rotate_left(u32 v, u32 by) { return __funnelshift_l(v, v, by); }

// a * b of a pair of halves, exact here. An fma with -0, because mul.bf16x2 needs sm_90.
DEVICE u32 multiply_pair(u32 a, u32 b) {
    u32 d;
#if FP16
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
}
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
#if FP16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if FP16
DEVICE float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
#define to_half_pair to_fp16_pair
#else
DEVICE float half_to_float(u16 h) { return as_float((u32)h << 16); }
DEVICE u16 float_to_half(float f) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
#define to_half_pair to_bf16_pair
#endif

#if SPLITS > 1
DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// Barriers of a cluster in which all lanes of a warp arrive together, also after a branch that only some of them took.
DEVICE void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Say that this block runs; wait until all of the cluster do. Each once, before any `cluster_sync`.
DEVICE void cluster_arrive_started() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait_started() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Four floats into the shared memory of block `rank` of the cluster.
DEVICE void store_remote(u32 address, u32 rank, float4 v) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};"
                 :: "r"(remote), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Four floats of the shared memory of block `rank` of the cluster.
DEVICE float4 load_remote(u32 address, u32 rank) {
    u32 remote;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
    return v;
}
#endif
