// What racecheck says of three ways by which our kernels keep accesses to shared memory apart, each reduced to its
// barriers (docs/reliability.md), on sm_90. Of each there is a kernel that does it as ours do, one with the same
// accesses whose barriers racecheck understands, and, but of the last, whose race could end the process, one with a
// race. Macros, not functions: reports name the function that an access was inlined from.
typedef unsigned long long u64;
typedef unsigned u32;
typedef unsigned char u8;
#define SHARED(POINTER) ((u32)__cvta_generic_to_shared(POINTER))
#define BARRIER_INIT(BARRIER, COUNT) \
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SHARED(BARRIER)), "r"(COUNT) : "memory")
#define BARRIER_INIT_DONE() asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")
#define BARRIER_ARRIVE(BARRIER) \
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SHARED(BARRIER)) : "memory")
#define BARRIER_EXPECT(BARRIER, BYTES) \
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SHARED(BARRIER)), "r"(BYTES) : "memory")
#define BARRIER_WAIT(BARRIER, PARITY)                                                                                  \
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"                                                                       \
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"                          \
                 "@!done bra AGAIN;\n}" ::"r"(SHARED(BARRIER)), "r"(PARITY) : "memory")
#define CLUSTER_SYNC() \
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory")
#define NOTHING() (void)0

// Triton's warp specialisation: twelve warps, of which the first four tell the others by bytes in shared memory what to
// do. WHOLE: a barrier of the block; PART: one of the first four warps, which orders nothing that the others see.
#define FIRST_JOB 0x0101010100000000ull  // a byte for each of the eight other warps
#define LAST_JOB 0x0404040404040404ull
#define WHOLE_BARRIER() asm volatile("barrier.sync 1;" ::: "memory")
#define PART_BARRIER() asm volatile("barrier.sync 0, 128;" ::: "memory")
#define HANDED_OVER(NAME, WHOLE, PART)                                                \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(int* out) {             \
        __shared__ volatile u64 jobs, captured;                                       \
        const int tid = threadIdx.x, warp = tid / 32;                                 \
        volatile u8* job = (volatile u8*)&jobs + (warp - 4);                          \
        out += blockIdx.x * 384;                                                      \
        if (warp < 4) {                                                               \
            PART();                                                                   \
            jobs = FIRST_JOB;                                                         \
            captured = 7;                                                             \
            WHOLE();                                                                  \
            WHOLE();                                                                  \
            out[tid] = tid;                                                           \
            PART();                                                                   \
            WHOLE();                                                                  \
            jobs = LAST_JOB;                                                          \
            WHOLE();                                                                  \
            return;                                                                   \
        }                                                                             \
        _Pragma("unroll 1") for (int turn = 0; turn < 2; turn++) {                    \
            WHOLE();                                                                  \
            const int told = *job;                                                    \
            if (told == 4) return;                                                    \
            const int from_first = (int)captured;                                     \
            WHOLE();                                                                  \
            out[tid] = told + from_first;                                             \
            WHOLE();                                                                  \
        }                                                                             \
    }
HANDED_OVER(handed_over_beside_part, WHOLE_BARRIER, PART_BARRIER)
HANDED_OVER(handed_over_by_whole, WHOLE_BARRIER, NOTHING)
HANDED_OVER(handed_over_in_a_race, NOTHING, NOTHING)

// A warp writes, a warp reads, in turns: `full` and `empty` count them in. ALONE: one lane arrives for its warp, after
// a barrier of the warp.
#define BY_ONE_LANE(BARRIER) if (lane == 0) BARRIER_ARRIVE(BARRIER)
#define COUNTED_IN(NAME, ARRIVALS, ARRIVE, WAIT)                                      \
    extern "C" __global__ void NAME(int* out) {                                       \
        __shared__ int data[32];                                                      \
        __shared__ u64 full, empty;                                                   \
        const int tid = threadIdx.x, lane = tid % 32;                                 \
        if (tid == 0) {                                                               \
            BARRIER_INIT(&full, ARRIVALS);                                            \
            BARRIER_INIT(&empty, ARRIVALS);                                           \
            BARRIER_INIT_DONE();                                                      \
        }                                                                             \
        __syncthreads();                                                              \
        if (tid < 32) {                                                               \
            for (int i = 0; i < 4; i++) {                                             \
                WAIT(&empty, (i + 1) & 1);                                            \
                data[lane] = i * 32 + lane;                                           \
                __syncwarp();                                                         \
                ARRIVE(&full);                                                        \
            }                                                                         \
        } else {                                                                      \
            int sum = 0;                                                              \
            for (int i = 0; i < 4; i++) {                                             \
                WAIT(&full, i & 1);                                                   \
                sum += data[31 - lane];                                               \
                __syncwarp();                                                         \
                ARRIVE(&empty);                                                       \
            }                                                                         \
            out[tid] = sum;                                                           \
        }                                                                             \
    }
#define NO_WAIT(BARRIER, PARITY) (void)0
COUNTED_IN(counted_by_one_lane, 1, BY_ONE_LANE, BARRIER_WAIT)
COUNTED_IN(counted_by_all_lanes, 32, BARRIER_ARRIVE, BARRIER_WAIT)
COUNTED_IN(counted_in_a_race, 1, BY_ONE_LANE, NO_WAIT)

// Two blocks of a cluster read of each other. One may end when the other has read: after what that sends once it has
// read, or after a barrier.
#define SEND()                                                                                                         \
    __syncthreads();                                                                                                   \
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(SHARED(mail[tid])), "r"(rank ^ 1));        \
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(SHARED(&counted)), "r"(rank ^ 1));       \
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%1,%1,%1}, [%2];"             \
                 ::"r"(there), "f"(found), "r"(counter) : "memory");                                                   \
    BARRIER_WAIT(&counted, 0);                                                                                         \
    found += mail[tid][0]
#define READ_OF_A_PEER(NAME, END)                                                                                      \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) NAME(int* out) {                                              \
        __shared__ __align__(16) float own[32][4], mail[32][4];                                                        \
        __shared__ u64 counted;                                                                                        \
        const int tid = threadIdx.x;                                                                                   \
        u32 rank, there, counter = 0;                                                                                  \
        float found;                                                                                                   \
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));                                                   \
        if (tid == 0) {                                                                                                \
            BARRIER_INIT(&counted, 1);                                                                                 \
            BARRIER_INIT_DONE();                                                                                       \
            BARRIER_EXPECT(&counted, 32 * 16);                                                                         \
        }                                                                                                              \
        own[tid][0] = mail[tid][0] = tid + rank;                                                                       \
        CLUSTER_SYNC();                                                                                                \
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(SHARED(own[tid])), "r"(rank ^ 1));     \
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(there) : "memory");                        \
        END();                                                                                                         \
        out[blockIdx.x * 32 + tid] = (int)found + (int)counter;                                                        \
    }
READ_OF_A_PEER(peer_that_waits_for_mail, SEND)
READ_OF_A_PEER(peer_that_meets, CLUSTER_SYNC)
