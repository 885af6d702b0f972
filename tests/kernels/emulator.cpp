// Threads, barriers and shared memory of emulator.h.
//
// CUDA's threads are coroutines of the one thread that calls: each runs until it must wait for others or says something to them, and which one
// goes on then is drawn. What is asynchronous lands after a drawn number of such turns, some warps miss many, and clusters start in any order,
// some when others have ended. So one launch after the other is done in another order, from a fixed seed, and where nobody can go on, that is
// seen at once. A launch begins when the blocks of the one before let it.
#include "emulator_threads.h"

u8* shared_memory() { return self().cluster->blocks[running->rank].memory.data(); }
static u8* shared_of(Block& block, u32 address, u32 bytes) {
    if ((u64)address + bytes > block.memory.size())
        throw std::runtime_error("bytes " + std::to_string(address) + " to " + std::to_string(address + bytes) + " of " +
                                 std::to_string(block.memory.size()) + " of shared memory");
    const u32 word = bytes & -bytes;
    if (address % std::min(word, 16u)) throw std::runtime_error("misaligned: " + std::to_string(address));
    return block.memory.data() + address;
}
u8* shared_at(int rank, u32 address, u32 bytes) { return shared_of(self().cluster->blocks.at(rank), address, bytes); }
Fragments& fragments() { return self().cluster->warps[self().warp].fragments[self().collectives++ & 1]; }
void warp_arrive() { self().cluster->warps[self().warp].meeting.arrive_and_wait(); }
static Block& block() { return self().cluster->blocks[running->rank]; }
void block_arrive() { block().whole.arrive_and_wait(); }
void block_part_arrive(int threads) {
    if (block().part.all == 0) block().part = Meeting(threads);
    block().part.arrive_and_wait();
}
void cluster_arrive() {
    while (self().arrivals > 0) others_first();  // it releases what was done before
    self().cluster->whole.arrive_and_wait();
}
void cluster_begin() { self().begun = self().cluster->whole.arrive(); }
void cluster_end() { self().cluster->whole.wait(self().begun); }
int cluster_blocks() { return (int)self().cluster->blocks.size(); }

static void let_next(Block& block, Grid& grid) {
    grid.holding -= !block.lets_next;
    block.lets_next = true;
}
void let_next_start() {
    let_next(block(), *self().grid);
    perhaps_others();
}
// For the launch before alone, as on a GPU: what that one has not waited for may still run.
void wait_for_previous() {
    Grid* previous = self().grid->previous;
    while (previous && previous->unfinished > 0) previous->ended.wait();
}

// `polls`: of counters in global memory, since anything happened that somebody may wait for.
static int polls;
static const int ENOUGH_POLLS = 1 << 23;

static void count(Mbarrier& b, int arrivals, int bytes) {
    b.arrived += arrivals;
    b.bytes += bytes;  // below zero where they are there before they are expected
    if (b.arrived != b.needed || b.bytes != 0) return;
    b.arrived = 0;
    b.phase ^= 1;
    b.waiting.wake();
    polls = 0;
}
void barrier_init(u32 at, u32 arrivals) {
    shared_at(running->rank, at, 8);
    block().barriers[at].needed = arrivals;
}
static Mbarrier& barrier_of(Block& block, u32 at) {
    auto found = block.barriers.find(at);
    if (found == block.barriers.end()) throw std::runtime_error("no barrier at " + std::to_string(at));
    return found->second;
}
void barrier_expect(u32 at, u32 bytes) {
    count(barrier_of(block(), at), 1, bytes);
    perhaps_others();
}
void barrier_wait(u32 at, u32 parity) {
    Mbarrier& b = barrier_of(block(), at);
    while (b.phase == parity) b.waiting.wait();
}

static void later(int rank, u32 most, std::function<void(Block&)> land) {
    Cluster* cluster = self().cluster;
    cluster->blocks.at(rank);
    cluster->under_way++;
    landings.emplace(turn + (1u << draw(most)), [=] {
        Block& block = cluster->blocks[rank];
        if (block.threads == 0) throw std::runtime_error("something is sent to a block that has ended");
        land(block);
        cluster->under_way--;
        polls = 0;
    });
    perhaps_others();
}
void barrier_arrive_at(u32 at, u32 rank) {
    Thread* from = &self();
    from->arrivals++;
    later(rank, 8, [=](Block& block) {
        count(barrier_of(block, at), 1, 0);
        from->arrivals--;
    });
}
void late_copy(int rank, u32 to, const void* from, u32 bytes, u32 barrier) {
    if ((u64)from % 16 || to % 16 || bytes % 16) throw std::runtime_error("a bulk copy that is misaligned");
    if (draw(2)) return late_send(rank, to, from, bytes, barrier);
    later(rank, 14, [=](Block& block) {
        memcpy(shared_of(block, to, bytes), from, bytes);
        count(barrier_of(block, barrier), 0, -(int)bytes);
    });
}
void late_send(int rank, u32 to, const void* from, u32 bytes, u32 barrier) {
    std::string sent((const char*)from, bytes);
    later(rank, 10, [=](Block& block) {
        memcpy(shared_of(block, to, bytes), sent.data(), bytes);
        count(barrier_of(block, barrier), 0, -(int)bytes);
    });
}

u32 load_acquire(const u32* p) {
    if (++polls > ENOUGH_POLLS) throw std::runtime_error("a counter in global memory is waited for in vain");
    go_on_after(&self(), 1u << draw(12));  // or it would be asked all the time
    suspend();
    return *p;
}
u32 add_relaxed(u32* p, u32 by) {
    polls = 0;
    perhaps_others();
    const u32 before = *p;
    *p += by;
    perhaps_others();
    return before;
}
void add_release(u32* p, u32 by) { add_relaxed(p, by); }
u32 add_acquire_release(u32* p, u32 by) { return add_relaxed(p, by); }

static void land(const Copy& copy) {
    memset(copy.to, 0, copy.size);
    memcpy(copy.to, copy.from, copy.bytes);
}
void copy_later(u32 to, const void* from, u32 bytes, u32 size) {
    if ((u64)from % size || to % size) throw std::runtime_error("an asynchronous copy that is misaligned");
    const Copy copy{shared_at(running->rank, to, size), from, bytes, size, self().copy_groups};
    if (draw(2)) return land(copy);
    self().copies.push_back(copy);
}
void copies_commit() { self().copy_groups++; }
void copies_wait(int pending) {
    Thread& t = self();
    size_t done = 0;
    for (; done < t.copies.size() && t.copies[done].group < t.copy_groups - pending; done++) land(t.copies[done]);
    t.copies.erase(t.copies.begin(), t.copies.begin() + done);
}

void product_later(void (*multiply)(float*, const Operands&), float* d, const Operands& operands) {
    self().products.push_back({multiply, d, operands, self().groups});
}
void products_commit() { self().groups++; }
void products_wait(int pending) {
    Thread& t = self();
    size_t done = 0;
    for (; done < t.products.size() && t.products[done].group < t.groups - pending; done++)
        t.products[done].multiply(t.products[done].d, t.products[done].operands);
    t.products.erase(t.products.begin(), t.products.begin() + done);
    warp_arrive();  // all lanes' are done together
}
static void live() {
    for (;;) {
        Thread& t = self();
        try {
            t.grid->body(t.grid->context);
            if (!t.copies.empty()) throw std::runtime_error("a thread ends while its copies are on their way");
            block().whole.drop();
            if (--block().threads == 0) let_next(block(), *t.grid);
            t.cluster->warps[t.warp].meeting.drop();
            t.cluster->whole.drop();
        } catch (const std::exception& error) {
            failure = error.what();
        }
        idle.push_back(&t);
        suspend();
    }
}
static void resume(Thread& t) {
    running = &t;
    if (_setjmp(scheduler)) return;
    if (t.started) _longjmp(t.here, 1);
    const size_t bytes = 1 << 17;
    getcontext(&t.start);
    if (!t.stack) t.stack = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (t.stack == MAP_FAILED) throw std::bad_alloc();
    t.start.uc_stack.ss_sp = t.stack;
    t.start.uc_stack.ss_size = bytes;
    makecontext(&t.start, live, 0);
    t.started = true;
    setcontext(&t.start);
}

static std::unique_ptr<Cluster> start(Grid& grid) {
    const dim3_ at = grid.waiting.back();
    const int blocks = grid.blocks_y, threads = grid.threads;
    grid.waiting.pop_back();
    auto cluster = std::make_unique<Cluster>();
    for (int b = 0; b < blocks; b++)
        cluster->blocks.push_back({std::vector<u8>(grid.shared_bytes, 0xFF), Meeting(threads), Meeting(), {}, threads});  // poisoned: NaN
    cluster->warps.resize(blocks * threads / 32);
    cluster->whole = Meeting(blocks * threads);
    const u32 others = 1u << draw(6);
    bool lags = false;
    std::vector<Thread*> beginning;  // of a block
    for (int i = 0; i < blocks * threads; i++) {
        if (idle.empty()) idle.push_back(&pool.emplace_back());
        Thread& t = *idle.back();
        idle.pop_back();
        (Place&)t = {{i % threads, 0, 0}, {at.x, i / threads, at.z}, i / threads};
        t.cluster = cluster.get();
        t.grid = &grid;
        t.warp = i / 32;
        t.collectives = t.groups = t.arrivals = t.copy_groups = 0;
        t.products.clear();
        t.copies.clear();
        const int warp = i % threads / 32;
        if (i % 32 == 0) lags = lag_end ? lag_first <= warp && warp < lag_end : draw(others) == 0;
        t.lags = lags;
        beginning.push_back(&t);
        if (i % threads < threads - 1) continue;
        landings.emplace(turn + (1u << draw(12)), [beginning] { ready.insert(ready.end(), beginning.begin(), beginning.end()); });
        beginning.clear();
    }
    return cluster;
}
static std::string deadlock(const std::vector<std::unique_ptr<Cluster>>& clusters) {
    std::string text = "nobody can go on:";
    for (size_t i = 0; i < grids.size(); i++)
        if (!grids[i].ended.threads.empty())
            text += " " + std::to_string(grids[i].ended.threads.size()) + " threads wait for the end of launch " + std::to_string(i) + ";";
    for (const auto& cluster : clusters)
        for (size_t rank = 0; rank < cluster->blocks.size(); rank++) {
            const Block& block = cluster->blocks[rank];
            text += " block " + std::to_string(rank) + " of a cluster has " + std::to_string(block.threads) + " threads left;";
            for (const auto& [at, b] : block.barriers)
                if (!b.waiting.threads.empty())
                    text += " " + std::to_string(b.waiting.threads.size()) + " wait for barrier " + std::to_string(at) + " (" +
                            std::to_string(b.arrived) + " arrivals of " + std::to_string(b.needed) + ", " + std::to_string(b.bytes) +
                            " bytes to come);";
        }
    return text;
}

bool in_order;
void launch_threads(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, void (*body)(const void*), void* context,
                    void (*free_context)(void*)) {
    Grid* previous = grids.empty() ? nullptr : &grids.back();
    const int clusters = grid_x * grid_z;
    grids.push_back({grid_y, threads, shared_bytes, body, context, free_context, {}, clusters * grid_y, clusters, previous, {}});
    std::vector<dim3_>& waiting = grids.back().waiting;  // the last one starts first
    for (int i = clusters - 1; i >= 0; i--) {
        waiting.push_back({i % grid_x, 0, i / grid_x});
        if (!in_order) std::swap(waiting.back(), waiting[draw(waiting.size())]);
    }
}
static void run_grids() {
    const size_t room = 1u << draw(5);
    rare = lag_end ? 4 : 1u << (3 + draw(11));
    std::vector<std::unique_ptr<Cluster>> clusters;
    for (;;) {
        for (Grid& grid : grids) {
            while (clusters.size() < room && !grid.waiting.empty()) {
                clusters.push_back(start(grid));
                polls = 0;
            }
            if (grid.holding > 0) break;
        }
        if (clusters.empty()) return;
        while (!landings.empty() && (ready.empty() || landings.begin()->first <= turn)) {
            turn = std::max(turn, landings.begin()->first);
            const auto land = landings.extract(landings.begin());
            land.mapped()();
        }
        if (ready.empty()) throw std::runtime_error(deadlock(clusters));
        turn++;
        std::swap(ready[draw(ready.size())], ready.back());
        Thread& next = *ready.back();
        ready.pop_back();
        resume(next);
        if (!failure.empty()) throw std::runtime_error(failure);
        if (next.cluster->whole.all > 0) continue;
        if (next.cluster->under_way) throw std::runtime_error("a cluster ends while bytes are on their way to it");
        if (--next.grid->unfinished == 0) {
            next.grid->ended.wake();
            polls = 0;
        }
        std::erase_if(clusters, [&](const auto& cluster) { return cluster.get() == next.cluster; });
    }
}
// Runs what was launched, in the order of a stream whose launches begin early; says what failed.
extern "C" const char* run_launched() {
    static std::string last;
    failure.clear();
    try {
        run_grids();
    } catch (const std::exception& error) {
        failure = error.what();
        ready.clear();
        landings.clear();
        idle.clear();
        for (Thread& t : pool) {
            t.started = false;
            idle.push_back(&t);
        }
    }
    for (Grid& grid : grids) grid.free_context(grid.context);
    grids.clear();
    last = std::move(failure);
    failure.clear();
    return last.c_str();
}
