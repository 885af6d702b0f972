// Shared-memory barriers and bulk copies (sm_90).
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of `parity` is over. SCOPE: ".acquire.cluster" where writes of other blocks are to be seen.
#define BARRIER_WAIT(SCOPE)                                                                                            \
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"                                                                       \
                 "mbarrier.try_wait.parity" SCOPE ".shared::cta.b64 done, [%0], %1;\n"                                 \
                 "@!done bra AGAIN;\n}"                                                                                \
                 ::"r"(barrier), "r"(parity) : "memory")
DEVICE void barrier_wait(u32 barrier, u32 parity) { BARRIER_WAIT(""); }
// `bytes` contiguous bytes from global to shared memory; `barrier` counts them in.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#if SPLITS > 1
// Four floats into the shared memory of block `rank` of the cluster, which runs (`cluster_wait_started`); its `barrier`
// counts the bytes in.
DEVICE void send(u32 address, u32 barrier, u32 rank, float4 v) {
    u32 remote, remote_barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
                 :: "r"(remote), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_barrier) : "memory");
}
// Arrives at the barrier of block `rank` of the cluster. Without a scope: with one it would be a fence of the GPU, and
// it says only that bytes were read.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
}
// `copy_bulk` to the same place in all blocks of the cluster; in each, `barrier` counts the bytes in.
DEVICE void copy_bulk_to_cluster(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1 << SPLITS) - 1)) : "memory");
}
// `barrier_wait` where the bytes are other blocks'.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) { BARRIER_WAIT(".acquire.cluster"); }
#endif
