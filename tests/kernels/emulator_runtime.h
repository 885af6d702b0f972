// What emulator.h (a kernel's side) and emulator.cpp (the threads' side) have in common.
#pragma once
#include <stdint.h>
typedef uint32_t u32;
typedef unsigned long long u64;
typedef uint16_t u16;
typedef uint8_t u8;
struct dim3_ { int x, y, z; };
struct Fragments { u32 a[32][4], b[32][2]; float sum[32][2]; };

extern __thread dim3_ threadIdx, blockIdx;
extern __thread int thread_block;  // of the cluster
extern int part_threads;           // how many threads meet at block_part_arrive(); 0: all of the block

u8* shared_memory(int block);
u8* shared_at(int block, u32 address, u32 bytes);  // ends the process where a byte of it lies outside
Fragments& fragments();                            // of this thread's warp
void warp_arrive();
void block_arrive();
void block_part_arrive();
void cluster_arrive();
void cluster_begin();  // `cluster_arrive` in two parts
void cluster_end();

void barrier_init(u32 at, u32 arrivals);
void barrier_expect(u32 at, u32 bytes);
void barrier_wait(u32 at, u32 parity);
void late_send(int block, u32 to, const void* from, u32 bytes, u32 barrier);  // to a block of the cluster: some land after those sent later
void late_copy(u32 to, const void* from, u32 bytes, u32 barrier);  // a bulk copy: some land after others that were asked for later

// Runs `body(context)` for every thread of every block; a cluster is all blocks along y.
void launch_threads(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, void (*body)(const void*), const void* context);
