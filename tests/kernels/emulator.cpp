// Threads, barriers and shared memory of emulator.h.
#include "emulator_runtime.h"

#include <string.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

__thread dim3_ threadIdx, blockIdx;
__thread int thread_block;
static __thread int thread_warp;  // of the cluster
int part_threads;

static std::vector<std::vector<u8>> block_memory;
static std::vector<std::unique_ptr<std::barrier<>>> block_barriers, warp_barriers, part_barriers;
static std::unique_ptr<std::barrier<>> cluster_barrier;
static std::vector<Fragments> warp_fragments;
struct Mbarrier { int needed = 0, arrived = 0, bytes = 0, phase = 0; };
struct BlockBarriers { std::mutex lock; std::map<u32, Mbarrier> at; };
static std::vector<std::unique_ptr<BlockBarriers>> mbarriers;

u8* shared_memory(int block) { return block_memory[block].data(); }
u8* shared_at(int block, u32 address, u32 bytes) { return &block_memory[block].at(address + bytes - 1) - (bytes - 1); }
Fragments& fragments() { return warp_fragments[thread_warp]; }
void warp_arrive() { warp_barriers[thread_warp]->arrive_and_wait(); }
void block_arrive() { block_barriers[thread_block]->arrive_and_wait(); }
void block_part_arrive() { part_barriers[thread_block]->arrive_and_wait(); }
void cluster_arrive() { cluster_barrier->arrive_and_wait(); }
static thread_local std::optional<std::barrier<>::arrival_token> arrived;
void cluster_begin() { arrived.emplace(cluster_barrier->arrive()); }
void cluster_end() {
    cluster_barrier->wait(std::move(arrived.value()));  // throws where nobody has begun
    arrived.reset();
}

static void settle(Mbarrier& b) {
    if (b.arrived == b.needed && b.bytes == 0) {
        b.arrived = 0;
        b.phase ^= 1;
    }
}
void barrier_init(u32 at, u32 arrivals) {
    shared_at(thread_block, at, 8);  // throws where the block has no such memory
    mbarriers[thread_block]->at[at].needed = arrivals;
}
void barrier_expect(u32 at, u32 bytes) {
    std::lock_guard guard(mbarriers[thread_block]->lock);
    Mbarrier& b = mbarriers[thread_block]->at.at(at);
    b.bytes += bytes;
    b.arrived++;
    settle(b);
}
void barrier_wait(u32 at, u32 parity) {
    for (;; std::this_thread::yield()) {
        std::lock_guard guard(mbarriers[thread_block]->lock);
        if (mbarriers[thread_block]->at.at(at).phase != (int)parity) return;
    }
}
// Every third copy takes LATE_MS, behind the back of the thread that asked for it; a copy ends before its launch does, as its bytes are waited for.
#ifndef LATE_MS
#define LATE_MS 4
#endif
static std::atomic<int> copies, under_way;
static void land(int block, u32 to, const void* from, u32 bytes, u32 barrier) {
    memcpy(shared_at(block, to, bytes), from, bytes);
    std::lock_guard guard(mbarriers[block]->lock);
    Mbarrier& b = mbarriers[block]->at.at(barrier);
    b.bytes -= bytes;
    settle(b);
}
void late_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    const int block = thread_block;
    if (copies++ % 3 != 0) return land(block, to, from, bytes, barrier);
    under_way++;
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(LATE_MS));
        land(block, to, from, bytes, barrier);
        under_way--;
    }).detach();
}
static std::atomic<int> sends;
void late_send(int block, u32 to, const void* from, u32 bytes, u32 barrier) {
    if (sends++ % 61 != 0) return land(block, to, from, bytes, barrier);
    under_way++;
    std::vector<u8> sent((const u8*)from, (const u8*)from + bytes);  // registers of a thread that may have ended by then
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(LATE_MS));
        land(block, to, sent.data(), bytes, barrier);
        under_way--;
    }).detach();
}

void launch_threads(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, void (*body)(const void*), const void* context) {
    for (int bz = 0; bz < grid_z; bz++)
        for (int bx = 0; bx < grid_x; bx++) {
            block_memory.assign(grid_y, std::vector<u8>(shared_bytes, 0xFF));  // poisoned: NaN as float and as half
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
                        body(context);
                        block_barriers[b]->arrive_and_drop();  // an exited thread holds nobody up
                        cluster_barrier->arrive_and_drop();
                    });
            for (auto& thread : pool) thread.join();
            while (under_way > 0) std::this_thread::yield();
        }
}
