// What emulator.h (a kernel's side) and emulator*.cpp (the threads' side) have in common.
#pragma once
#include <stdint.h>
typedef uint32_t u32;
typedef unsigned long long u64;
typedef uint16_t u16;
typedef uint8_t u8;
struct dim3_ { int x, y, z; };
struct Fragments { u32 a[32][4], b[32][2]; float sum[32][2]; };
struct Place { dim3_ thread, block; int rank; };  // `rank`: of the block in its cluster
extern Place* running;                            // the thread that runs
#define threadIdx running->thread
#define blockIdx running->block

u8* shared_memory();
u8* shared_at(int rank, u32 address, u32 bytes);  // throws where a byte of it lies outside
Fragments& fragments();  // of this thread's warp, another one at each call: who is ahead writes to none that is still read. One call a collective
void warp_arrive();      // these wait until all have arrived
void block_arrive();
void block_part_arrive(int threads);
void cluster_arrive();
void cluster_begin();  // `cluster_arrive` in two parts
void cluster_end();

void barrier_init(u32 at, u32 arrivals);
void barrier_expect(u32 at, u32 bytes);
void barrier_arrive_at(u32 at, u32 rank);
void barrier_wait(u32 at, u32 parity);
// Land later, in any order. What is sent is read now, what is copied perhaps only then.
void late_send(int rank, u32 to, const void* from, u32 bytes, u32 barrier);
void late_copy(int rank, u32 to, const void* from, u32 bytes, u32 barrier);
int cluster_blocks();

// Copies of a thread: at once, or when they are waited for. Of `size` bytes those beyond `bytes` are zeros.
void copy_later(u32 to, const void* from, u32 bytes, u32 size);
void copies_commit();
void copies_wait(int pending);

u32 load_acquire(const u32* p);
void add_release(u32* p, u32 by);
u32 add_relaxed(u32* p, u32 by);
u32 add_acquire_release(u32* p, u32 by);

// Asynchronous products: `product(d, data)` is done when it is waited for, with `data` as it was and shared memory as it is then.
struct Operands {
    u32 a, b;  // descriptors
    int columns, add;
    float weights[2][16];  // rows of `a` that come from registers
    float (*to_float)(u16);
};
void product_later(void (*product)(float*, const Operands&), float* d, const Operands& operands);
void products_commit();
void products_wait(int pending);
void multiply_halves(float* d, const Operands& operands);
void multiply_e4m3(float* d, const Operands& operands);  // 64 rows of `a` by `columns` of `b`, 32 of each row

void let_next_start();
void wait_for_previous();
extern bool in_order;  // blocks start in the order of a grid, as a GPU starts them, not in one that is drawn
// After what was launched before, `body(context)` for every thread of every block; a cluster is all blocks along y. They run when all is launched.
void launch_threads(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, void (*body)(const void*), void* context,
                    void (*free_context)(void*));
