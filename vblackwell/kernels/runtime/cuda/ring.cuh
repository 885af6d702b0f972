// A ring of COUNT stages of x in shared memory (sm_90): one thread brings them by bulk copies, warps release them. Of a
// stage's two barriers, 8 bytes each, `full` counts its bytes and `empty` the warps that have done with it.
template <int COUNT>
DEVICE void ring_init(u32 full, u32 empty, u32 warps) {
    for (int s = 0; s < COUNT; s++) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, warps);
    }
    barrier_init_done();
}

// The stage after this one; each time round the parity of its barriers' phases changes.
template <int COUNT>
DEVICE void next_stage(int& stage, u32& parity) {
    if (++stage == COUNT) {
        stage = 0;
        parity ^= 1;
    }
}

// By the one thread: `count` stages of BYTES, contiguous in global memory from `from` on.
template <int COUNT, int BYTES>
DEVICE void ring_fill(u32 ring, u32 full, u32 empty, const u8* from, int count) {
    int stage = 0;
    u32 parity = 1;  // a fresh barrier counts as released
    for (int i = 0; i < count; i++) {
        barrier_wait(empty + 8 * stage, parity);
        barrier_expect(full + 8 * stage, BYTES);
        copy_bulk(ring + stage * BYTES, from + (u64)i * BYTES, BYTES, full + 8 * stage);
        next_stage<COUNT>(stage, parity);
    }
}
