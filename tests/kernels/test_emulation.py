"""What the emulator refuses: kernels that wait for ever, and shared memory that is not there, or no longer."""

import pytest
import torch

from tests.kernels import emulation

pytestmark = emulation.needs_compiler
MAIN = """
extern "C" void run(u32* counter, int mistake) {
    launch(2, 2, 1, 64, 80, [=] {
        const int tid = threadIdx.x, other = 1 - blockIdx.y;
        if (tid == 0 && mistake != 1) {
            barrier_init(8, mistake == 2 ? 2 : 1);
            barrier_init(16, 1);
        }
        cluster_sync();
        if (tid == 0) barrier_arrive(8);
        barrier_wait(8, 0);
        if (tid == 0) add_release(counter, 1);
        while (load_acquire(counter) < (mistake == 3 ? 5 : 2)) {}  // of the other block of this cluster
        if (mistake == 4) store_shared(56, make_uint4(0, 0, 0, 0));
        if (mistake == 5) store_shared(80, make_uint4(0, 0, 0, 0));
        if (mistake == 6 && blockIdx.y == 0) return;
        const bool late = mistake == 6 || (mistake == 7 && blockIdx.y == 1);  // so that the other block has ended
        for (int i = 0; late && tid == 0 && i < 64; i++) load_acquire(counter);
        if (tid == 0) barrier_arrive_at(16, other);
        if (mistake != 7 && mistake != 6) cluster_sync();
    });
}"""
LAUNCH = """
extern "C" void run(int waits) {
    launch(1, 1, 1, 32, 16, [=] {
        let_next_start();
        barrier_init(8, 2);
        barrier_wait(8, 0);
    });
    launch(1, 1, 1, 32, 16, [=] { wait_for_previous(); });
}"""
CASES = [
    (1, "no barrier at 8"),
    (2, r"nobody can go on.* 64 wait for barrier 8 \(1 arrivals of 2"),
    pytest.param(3, "waited for in vain", marks=pytest.mark.slow),  # a second
    (4, "misaligned: 56"),
    (5, "bytes 80 to 96 of 80 of shared memory"),
    (6, "a block that has ended|on their way"),
    (7, "a block that has ended|on their way"),
]


def run(mistake: int) -> None:
    emulation._call(("ring.cuh",), {"FP16": 0}, MAIN, [torch.zeros(1, dtype=torch.int32), mistake])


@pytest.mark.parametrize(("mistake", "message"), CASES)
def test_a_mistake_is_named_and_the_next_launch_is_right(mistake, message):
    run(0)
    with pytest.raises(emulation.EmulationError, match=message):
        for _ in range(20):  # in some orders it does no harm
            run(mistake)
    run(0)


def test_who_waits_for_a_launch_is_named():
    for _ in range(20):  # in some orders there is no room next to the first one
        with pytest.raises(emulation.EmulationError, match="nobody can go on") as caught:
            emulation._call(("ring.cuh",), {"FP16": 0}, LAUNCH, [0])
        if "32 threads wait for the end of launch 0" in str(caught.value):
            return
    raise AssertionError("never named")


CHAIN = """
extern "C" void run(u32* counted, u32* seen, int waits) {
    launch(3, 1, 1, 32, 16, [=] {
        let_next_start();
        for (int i = 0; threadIdx.x == 0 && i < 64; i++) load_acquire(counted);
        if (threadIdx.x == 0) add_release(counted, 1);
    });
    launch(1, 1, 1, 32, 16, [=] {
        if (waits) wait_for_previous();
        if (threadIdx.x == 0) *seen = load_acquire(counted);
    });
}"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_begins_early_and_waits_where_it_says_so(waits):
    found = set()
    for _ in range(50):
        counted, seen = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        emulation._call(("ring.cuh",), {"FP16": 0}, CHAIN, [counted, seen, int(waits)])
        found.add(seen.item())
    assert found == {3} if waits else len(found) > 1


COPIES = """
extern "C" void run(const u8* from, u32* seen, int pending) {
    launch(1, 1, 1, 32, 1024, [=] {
        const u32 at = threadIdx.x * 32;
        for (int i = 0; i < 2; i++) {
            copy_async(at + 16 * i, from + 16 * i, 16);
            copy_commit();
        }
        pending == 0 ? copy_wait<0>() : pending == 1 ? copy_wait<1>() : copy_wait<2>();
        for (int i = 0; i < 2; i++) seen[threadIdx.x * 2 + i] = load_shared_word(at + 16 * i);
        if (pending < 3) copy_wait_all();
    });
}"""


@pytest.mark.parametrize(("pending", "there"), [(0, (True, True)), (1, (True, False)), (2, (False, False))])
def test_copies_are_there_when_they_are_waited_for_and_perhaps_before(pending, there):
    source, seen = torch.full((8,), 7, dtype=torch.int32), torch.zeros(32, 2, dtype=torch.int32)
    emulation._call(("ring.cuh",), {"FP16": 0}, COPIES, [source, seen, pending])
    for came, always in zip((seen == 7).unbind(1), there, strict=True):
        assert came.any() and bool(came.all()) == always  # by 32 coins
    with pytest.raises(emulation.EmulationError, match="its copies are on their way"):
        emulation._call(("ring.cuh",), {"FP16": 0}, COPIES, [source, seen, 3])
