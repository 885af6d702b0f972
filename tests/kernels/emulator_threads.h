// What emulator.cpp keeps of threads, blocks, clusters and launches, and who goes on next.
#pragma once
#include "emulator_runtime.h"

#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

Place* running;

static u64 state = 0x9E3779B97F4A7C15;
static u32 draw(u32 below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (u32)(state >> 32) % below;
}

struct Cluster;
struct Grid;
struct Product { void (*multiply)(float*, const Operands&); float* d; Operands operands; int group; };
struct Copy { u8* to; const void* from; u32 bytes, size; int group; };
struct Thread : Place {
    Cluster* cluster;
    Grid* grid;
    int warp, collectives, groups, arrivals;  // `arrivals`: at other blocks' barriers, on their way
    u64 begun;
    std::vector<Product> products;
    std::vector<Copy> copies;
    int copy_groups;
    jmp_buf here;
    ucontext_t start;
    void* stack = nullptr;
    bool started = false, lags;
};
static std::deque<Thread> pool;
static std::vector<Thread*> ready, idle;
static jmp_buf scheduler;
static std::string failure;
static u64 turn;

static Thread& self() { return *(Thread*)running; }
static void suspend() {
    Thread& t = self();
    if (!_setjmp(t.here)) _longjmp(scheduler, 1);
}
static std::multimap<u64, std::function<void()>> landings;  // by turn
extern "C" {
int lag_first, lag_end;  // warps of a block that lag; drawn where `lag_end` is 0
}
static u32 rare;  // one of so many times a thread of such a warp misses many turns
static void go_on_after(Thread* t, u32 turns) {
    landings.emplace(turn + turns, [t] { ready.push_back(t); });
}
static void go_on(Thread* t) {
    if (!t->lags || draw(rare))
        ready.push_back(t);
    else
        go_on_after(t, 1u << draw(21));
}
static void others_first() {
    go_on(&self());
    suspend();
}
static void perhaps_others() {
    if (draw(2)) others_first();
}
struct Queue {
    std::vector<Thread*> threads;
    void wait() {
        threads.push_back(&self());
        suspend();
    }
    void wake() {
        for (Thread* t : threads) go_on(t);
        threads.clear();
    }
};
struct Meeting {
    int all, missing;
    u64 phase = 0;
    Queue waiting;
    explicit Meeting(int all = 0) : all(all), missing(all) {}
    u64 arrive() {
        const u64 now = phase;
        if (--missing == 0) {
            missing = all;
            phase++;
            waiting.wake();
        }
        return now;
    }
    void wait(u64 since) {
        while (phase == since) waiting.wait();
    }
    void arrive_and_wait() { wait(arrive()); }
    void drop() {  // an exited thread holds nobody up
        all--;
        arrive();
    }
};
struct Mbarrier { int needed = 0, arrived = 0, bytes = 0; u32 phase = 0; Queue waiting; };
struct Block {
    std::vector<u8> memory;
    Meeting whole, part;
    std::map<u32, Mbarrier> barriers;
    int threads;
    bool lets_next = false;
};
struct Warp { Meeting meeting{32}; Fragments fragments[2]; };
struct Cluster {
    std::vector<Block> blocks;
    std::vector<Warp> warps;
    Meeting whole;
    int under_way = 0;  // landings
};
// A launch. The next one's blocks may start when all of this one have said so or ended.
struct Grid {
    int blocks_y, threads, shared_bytes;
    void (*body)(const void*);
    void* context;
    void (*free_context)(void*);
    std::vector<dim3_> waiting;
    int holding, unfinished;  // blocks that hold the next launch up; clusters
    Grid* previous;
    Queue ended;
};
static std::deque<Grid> grids;
