// What racecheck says of Triton's warp specialisation, reduced to its barriers (docs/sanitizer.md): 12 warps, of which the first four tell the
// others by bytes in shared memory what to do. Every byte is written and read on two sides of a barrier of the whole block.
//
// BARRIER: how the sides are kept apart. 0 as Triton does it, `barrier.sync 1` at an instruction of each side's own; 1 the same, and registers
// change hands as well; 2 the block's barrier 0 in the same places; 3 barrier 1 at one instruction that both sides run; 4 not at all: a race.
typedef unsigned long long u64;
typedef unsigned char u8;
#define WARPS 12
#define FIRST_JOB 0x0101010100000000ull  // a byte for each of the eight other warps
#define LAST_JOB 0x0404040404040404ull

template <int BARRIER>
__device__ __forceinline__ void whole_block() {
    if (BARRIER <= 1) asm volatile("barrier.sync 1;" ::: "memory");
    if (BARRIER == 2) asm volatile("barrier.sync 0;" ::: "memory");
}
template <int BARRIER>
__device__ __forceinline__ void registers(int more) {
#if __CUDA_ARCH__ == 900
    if (BARRIER != 1) return;
    if (more)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
#endif
}

template <int BARRIER>
__device__ __forceinline__ void hand_over(int* out) {
    __shared__ volatile u64 jobs, captured;
    const int warp = threadIdx.x / 32;
    volatile u8* job = (volatile u8*)&jobs + (warp - 4);
    if (BARRIER == 3) {
        if (warp < 4) {
            jobs = FIRST_JOB;
            captured = 7;
        }
        asm volatile("barrier.sync 1;" ::: "memory");
        if (warp >= 4) out[threadIdx.x] = *job + (int)captured;
        asm volatile("barrier.sync 1;" ::: "memory");
        if (warp < 4) jobs = LAST_JOB;
        asm volatile("barrier.sync 1;" ::: "memory");
        if (warp >= 4) out[threadIdx.x] += *job;
        return;
    }
    if (warp < 4) {
        jobs = FIRST_JOB;
        captured = 7;
        whole_block<BARRIER>();
        whole_block<BARRIER>();
        out[threadIdx.x] = threadIdx.x;
        whole_block<BARRIER>();
        jobs = LAST_JOB;
        whole_block<BARRIER>();
        return;
    }
#pragma unroll 1
    for (;;) {
        registers<BARRIER>(0);
        whole_block<BARRIER>();
        const int told = *job;
        if (told == 4) return;
        registers<BARRIER>(1);
        const int from_first = (int)captured;
        whole_block<BARRIER>();
        out[threadIdx.x] = told + from_first;
        whole_block<BARRIER>();
        if (BARRIER == 4) return;
    }
}

#define KERNEL(NAME, BARRIER) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) NAME(int* out) { hand_over<BARRIER>(out); }
KERNEL(handed_over_as_triton, 0)
KERNEL(handed_over_with_registers, 1)
KERNEL(handed_over_by_barrier_0, 2)
KERNEL(handed_over_together, 3)
KERNEL(handed_over_in_a_race, 4)
