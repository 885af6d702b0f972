"""The rules of the stack, one by one (docs: vblackwell/memory/cache/stack.py)."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.memory.conftest import PAGE, counts, levels, page, random_bytes
from vblackwell import quantize
from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash, StaleTensor, UnknownKey
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.units import KiB, MiB

# Owning the bytes.


def test_register_copies_and_the_caller_may_change_its_tensor(make_stack):
    stack, tensor = make_stack(4, 4, 4), page(1)
    stack.register("a", tensor)
    tensor.zero_()
    assert torch.equal(stack.access("a"), page(1))


@pytest.mark.parametrize("priority", [9, 5, 1])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.randn(3, 1, 5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(4, 6).t(),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(5)),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.randn(1).expand(20, 3),
    ],
)
def test_any_tensor_comes_back_equal(make_stack, tensor: torch.Tensor, priority: int):
    stack = make_stack(2, 4, 8)
    stack.register("a", tensor, priority=priority)
    for _ in range(2):
        back = stack.access("a")
        assert back.shape == tensor.shape and back.dtype == tensor.dtype and not back.requires_grad
        assert torch.equal(back.to(torch.complex64), tensor.detach().to(torch.complex64))


def test_values_that_no_stack_holds(make_stack):
    stack = make_stack(2, 4, 8)
    for value in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), [1.0], None):
        with pytest.raises(ConfigurationError, match="holds"):
            stack.register("a", value)
    for priority in (11, -1, 2.5):
        with pytest.raises(ConfigurationError, match="whole number from 0 to 10"):
            stack.register("a", page(1), priority=priority)
    assert len(stack) == 0 and counts(stack, "used_bytes") == [0, 0, 0]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_packed_tensors(make_stack, level: int):
    stack, packed = make_stack(8, 8, 8), quantize(torch.randn(48, 64), "nvfp4")
    stack.register("w", packed)
    stack.move("w", level)
    back = stack.access("w")
    assert type(back) is type(packed) and torch.equal(back.dequantize(), packed.dequantize())
    other = quantize(torch.randn(48, 64), "nvfp4")
    stack.update("w", other)
    assert torch.equal(stack.access("w").dequantize(), other.dequantize())


def test_taking_over_uses_the_tensors_own_memory(make_stack):
    stack, tensor = make_stack(4, 4), page(3)
    address = tensor.data_ptr()
    stack.register("a", tensor, priority=10, take=True)
    assert stack.access("a").data_ptr() == address and counts(stack, "used_bytes")[0] == PAGE
    stack.register("b", page(4, 4), priority=10)
    assert levels(stack) == {"a": 0, "b": 1}
    stack.access("b")
    assert levels(stack)["a"] == 0  # its giver still holds it
    del tensor
    assert torch.equal(stack.access("b"), page(4, 4)) and levels(stack) == {"a": 1, "b": 0}
    assert torch.equal(stack.access("a"), page(3))


def test_demotion_frees_the_upper_level(make_stack):
    stack = make_stack(4, 4, 4)
    stack.register("a", page(1, 3), priority=9)
    for level, used in ((1, [0, 3, 0]), (2, [0, 0, 3]), (0, [3, 0, 0])):
        stack.move("a", level)
        assert counts(stack, "used_bytes") == [n * PAGE for n in used]
        assert stack.level_of("a") == level
    assert torch.equal(stack.access("a"), page(1, 3))


# Where keys start.


def test_priorities_choose_the_first_level(make_stack):
    stack = make_stack(20, 20, 20, 20, kinds=("arena", "host", "disk", "disk"))
    for priority in range(11):
        stack.register(f"p{priority}", page(priority), priority=priority)
    expected = [2] * 4 + [1] * 3 + [0] * 4
    assert list(levels(stack).values()) == expected


def test_low_priorities_on_short_stacks(make_stack):
    two, one = make_stack(20, 20), make_stack(20)
    for stack in (two, one):
        stack.register("low", page(1), priority=0)
        stack.register("middle", page(1), priority=5)
    assert levels(two) == {"low": 0, "middle": 1} and levels(one) == {"low": 0, "middle": 0}


def test_full_levels_cascade_down_and_then_up(make_stack):
    stack = make_stack(2, 2, 2)
    for i in range(6):
        stack.register(f"k{i}", page(i), priority=7)
    assert list(levels(stack).values()) == [0, 0, 1, 1, 2, 2]
    stack = make_stack(2, 2, 2)
    for i in range(6):
        stack.register(f"k{i}", page(i), priority=2)  # starts at level 1
    assert list(levels(stack).values()) == [1, 1, 2, 2, 0, 0]


def test_a_more_important_key_displaces_less_important_ones(make_stack):
    stack = make_stack(2, 2, 4)
    for key, priority in (("a", 7), ("b", 8), ("c", 7), ("d", 8)):
        stack.register(key, page(0), priority=priority)
    assert levels(stack) == {"a": 0, "b": 0, "c": 1, "d": 0} | {"a": 1}  # d displaced a
    stack.register("e", page(0), priority=10)
    assert levels(stack)["e"] == 0 and levels(stack)["b"] == 1
    assert levels(stack)["a"] == 2  # of a and c, equally important, a is the one used least recently


def test_default_priority_is_by_name(make_stack):
    stack = make_stack(8, 8, 8)
    for key, priority in (("wte", 10), ("h.0.attn", 7), ("h.0.mlp", 5), ("h.0.norm", 3)):
        stack.register(key, page(0))
        assert stack._entries[key].priority == priority


# A full stack.


def test_a_full_stack_refuses_before_anything_moved(make_stack):
    stack = make_stack(2, 2, 2)
    for i in range(6):
        stack.register(f"k{i}", page(i), priority=i)
    before, stats = levels(stack), stack.get_stats()
    with pytest.raises(InsufficientMemory, match=r"no room for 'new': 4.00 KiB .* remove or release keys") as caught:
        stack.register("new", page(9), priority=10)
    assert caught.value.needed_bytes == PAGE and caught.value.available_bytes == 0
    with pytest.raises(InsufficientMemory):
        stack.register("k0", page(9, 2), priority=10)  # larger than what it replaces
    with pytest.raises(InsufficientMemory):
        stack.register("huge", page(9, 50))
    assert levels(stack) == before and stack.get_stats() == stats
    for i in range(6):
        assert torch.equal(stack.access(f"k{i}"), page(i))


def test_a_key_that_fits_nowhere_in_one_piece_makes_others_move(make_stack):
    stack = make_stack(4, 4, 4)
    for i in range(9):
        stack.register(f"k{i}", page(i), priority=7)
    for i in (1, 6):
        stack.remove(f"k{i}")
    # free: one page on each of arena and host, three on the disk
    stack.register("wide", page(99, 4), priority=2)
    assert torch.equal(stack.access("wide"), page(99, 4))
    for i in (0, 2, 3, 4, 5, 7, 8):
        assert torch.equal(stack.access(f"k{i}"), page(i))


def test_access_never_fails_for_lack_of_room(make_stack):
    stack = make_stack(2, 8)
    stack.register("large", page(5, 4), priority=10)  # larger than level 0
    assert torch.equal(stack.access("large"), page(5, 4)) and stack.level_of("large") == 1
    held = []
    for i in range(2):
        stack.register(f"held{i}", page(i), priority=9)
        held.append(stack.access(f"held{i}"))
    stack.register("other", page(7), priority=10)
    assert torch.equal(stack.access("other"), page(7)) and stack.level_of("other") == 1  # level 0 is held
    del held
    stack.access("other")
    assert stack.level_of("other") == 0


def test_promotion_on_a_stack_that_is_full_to_the_last_byte(make_stack):
    """The key's own place is what its victim needs: they change places through RAM."""
    for kinds in (("arena", "host"), ("arena", "disk")):
        stack = make_stack(3, 3, kinds=kinds)
        for i in range(6):
            stack.register(f"k{i}", page(i), priority=7)
        assert sum(counts(stack, "used_bytes")) == 6 * PAGE
        for i in (3, 4, 5, 0, 1, 2, 5):
            assert torch.equal(stack.access(f"k{i}"), page(i))
            assert stack.level_of(f"k{i}") == 0
            assert counts(stack, "used_bytes") == [3 * PAGE, 3 * PAGE]


# Promotion and eviction.


def test_lru_evicts_lower_priority_first_then_least_recent(make_stack):
    stack = make_stack(4, 20, 20)
    for key, priority in (("a8", 8), ("b7", 7), ("c8", 8), ("d7", 7)):
        stack.register(key, page(0), priority=priority)
    for key in ("b7", "a8"):
        stack.access(key)
    order = []
    for i in range(4):
        before = {key for key, level in levels(stack).items() if level == 0}
        stack.register(f"new{i}", page(0), priority=5)
        stack.move(f"new{i}", 0)
        [gone] = before - {key for key, level in levels(stack).items() if level == 0}
        order.append(gone)
        stack.remove(f"new{i}")
        stack.register(f"filler{i}", page(0), priority=10)
    assert order == ["d7", "b7", "c8", "a8"]


def test_promotion_is_direct_by_default(make_stack):
    stack = make_stack(2, 4, 8)
    for i in range(8):
        stack.register(f"k{i}", page(i), priority=3)
    for i in range(8):
        stack.move(f"k{i}", 2)
    for i in range(8):
        stack.access(f"k{i}")
    assert [stack.level_of(f"k{i}") for i in range(8)] == [2, 2, 1, 1, 1, 1, 0, 0]


def test_gradual_promotion_rises_one_level_an_access(make_stack):
    stack = make_stack(2, 4, 8, promotion="gradual")
    stack.register("a", page(1), priority=5)
    stack.move("a", 2)
    for level in (1, 0, 0):
        assert torch.equal(stack.access("a"), page(1)) and stack.level_of("a") == level


def test_a_more_important_resident_stays(make_stack):
    stack = make_stack(1, 4)
    stack.register("important", page(1), priority=9)
    stack.register("other", page(2), priority=8)
    for _ in range(3):
        assert torch.equal(stack.access("other"), page(2))
    assert levels(stack) == {"important": 0, "other": 1}


def test_a_sinking_key_passes_more_important_ones(make_stack):
    stack = make_stack(1, 1, 4)
    stack.register("low", page(1), priority=1)  # level 1
    stack.move("low", 0)
    stack.register("high", page(2), priority=6)  # level 1
    stack.register("top", page(3), priority=10)
    assert levels(stack) == {"low": 2, "high": 1, "top": 0}


def test_moving_by_hand(make_stack):
    stack = make_stack(1, 2, 4)
    stack.register("a", page(1), priority=10)
    stack.register("b", page(2), priority=10)
    stack.move("b", 0)  # whichever is there
    assert levels(stack) == {"a": 1, "b": 0}
    held = stack.access("b")
    with pytest.raises(StaleTensor, match="'b' cannot leave arena"):
        stack.move("b", 2)
    del held
    stack.move("b", 2)
    assert levels(stack) == {"a": 1, "b": 2}
    stack.register("wide", page(3, 4), priority=0)
    with pytest.raises(InsufficientMemory, match="on arena for 'wide'"):
        stack.move("wide", 0)
    with pytest.raises(ConfigurationError, match="level 3 must be from 0 to 2"):
        stack.move("a", 3)


# Holding.


def test_what_access_returned_stays_valid_while_held(make_stack):
    stack = make_stack(2, 8)
    stack.register("a", page(1), priority=9)
    ways = {
        "tensor": lambda w: w,
        "view": lambda w: w[10:20].view(2, 5),
        "graph": lambda w: (torch.ones(KiB, requires_grad=True) * w).sum(),
    }
    for name, hold in ways.items():
        held = hold(stack.access("a"))
        for i in range(6):
            stack.register(f"k{i}", page(i), priority=10)
            stack.access(f"k{i}")
        assert stack.level_of("a") == 0, name
        del held
        for i in range(6):
            stack.access(f"k{i}")
        assert stack.level_of("a") == 1, name
        for i in range(6):
            stack.remove(f"k{i}")
        stack.access("a")


def test_borrow_keeps_the_key_for_a_block(make_stack):
    stack = make_stack(1, 8)
    stack.register("a", page(1), priority=5)
    stack.register("b", page(2), priority=5)
    with stack.borrow("a") as w:
        copy = w.clone()
        del w
        stack.access("b")
        assert levels(stack) == {"a": 0, "b": 1} and torch.equal(copy, page(1))
    stack.access("b")
    assert levels(stack) == {"a": 1, "b": 0}
    with stack.borrow("b"), stack.borrow("a") as served_in_place:
        assert torch.equal(served_in_place, page(1)) and stack.level_of("a") == 1
        assert torch.equal(stack.access("a"), page(1))


def test_update_and_remove_leave_old_bytes_to_their_holder(make_stack):
    stack = make_stack(4, 4)
    stack.register("a", page(1), priority=9)
    held = stack.access("a")
    stack.update("a", page(2))
    assert torch.equal(held, page(1)) and torch.equal(stack.access("a"), page(2))
    assert counts(stack, "used_bytes")[0] == 2 * PAGE  # honest: both are there
    del held
    assert counts(stack, "used_bytes")[0] == PAGE
    held = stack.access("a")
    stack.remove("a")
    assert torch.equal(held, page(2)) and counts(stack, "used_bytes")[0] == PAGE
    del held
    assert counts(stack, "used_bytes")[0] == 0


def test_a_reservation_ends_what_its_holder_has_let_go(make_stack):
    """Also where there is room for both: others ask the level itself whether it has more."""
    stack = make_stack(4, 4)
    stack.register("a", page(1), priority=9)
    held = stack.access("a")
    stack.remove("a")
    del held
    stack.reserve("b", PAGE, 0)
    assert stack.levels[0].used_bytes == PAGE and stack.levels[0].can_allocate(3 * PAGE)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_update_writes_where_the_key_is(make_stack, level: int):
    stack = make_stack(4, 4, 4)
    stack.register("a", page(1), priority=5)
    stack.move("a", level)
    stack.update("a", page(2))
    assert stack.level_of("a") == level and sum(counts(stack, "used_bytes")) == PAGE
    assert torch.equal(stack.access("a"), page(2))
    with pytest.raises(ConfigurationError, match="another shape or dtype"):
        stack.update("a", page(2).double())


# Names.


def test_registering_again_replaces(make_stack):
    stack = make_stack(4, 4)
    stack.register("a", page(1), priority=9)
    stack.register("a", page(2, 2).to(torch.int32), priority=9)
    assert stack.access("a").dtype == torch.int32 and sum(counts(stack, "used_bytes")) == 2 * PAGE
    full = make_stack(2, 2)
    for i in range(4):
        full.register(f"k{i}", page(i), priority=9)
    full.register("k1", page(77), priority=9)  # there is no room for both
    assert [float(full.access(f"k{i}")[0]) for i in range(4)] == [0, 77, 2, 3]


def test_moves_and_updates_on_a_full_stack(make_stack):
    full = make_stack(2, 2, kinds=("arena", "disk"))
    for i in range(4):
        full.register(f"k{i}", page(i), priority=9)
    full.move("k2", 0)
    assert full.level_of("k2") == 0
    down = next(key for key in full if full.level_of(key) == 1)
    last_use = full._entries[down].last_use
    full.update(down, page(50))
    assert full.level_of(down) == 1 and full._entries[down].last_use == last_use
    for _ in range(2):
        for i in range(4):
            assert float(full.access(f"k{i}")[0]) == (50 if f"k{i}" == down else i) and full.level_of(f"k{i}") == 0
    assert sum(level["promotions"] for level in full.get_stats()["levels"]) >= 8


def test_two_owners_clash(make_stack):
    stack = make_stack(4, 4)
    stack.register("w", page(1), owner="model-a")
    stack.register("w", page(2), owner="model-a")
    for owner in ("model-b", None):
        with pytest.raises(KeyClash, match="'w' is taken by 'model-a'"):
            stack.register("w", page(3), owner=owner)
    reservation = stack.reserve("range", PAGE, 1)
    with pytest.raises(KeyClash, match="taken by a reservation"):
        stack.register("range", page(1))
    for name in ("w", "range"):
        with pytest.raises(KeyClash, match="taken in this stack"):
            stack.reserve(name, PAGE, 1)
    stack.unreserve(reservation)
    assert float(stack.access("w")[0]) == 2


def test_unknown_keys_are_named_with_the_nearest(make_stack):
    stack = make_stack(4, 4)
    stack.register("layers.0.weight", page(1))
    for call in (stack.access, stack.remove, lambda key: stack.update(key, page(1)), lambda key: stack.move(key, 0)):
        with pytest.raises(UnknownKey, match=r"did you mean 'layers.0.weight'"):
            call("layers.0.weigth")
    with pytest.raises(UnknownKey), stack.borrow("nothing"):
        pass
    with pytest.raises(KeyError):
        stack.prefetch(["layers.0.weight", "nothing"])


# Working ahead.


def test_prefetch_brings_keys_up_in_the_background(make_stack, no_delay_left):
    stack, gate = make_stack(4, 4, 8), threading.Event()
    for key in "abc":
        stack.register(key, page(ord(key)), priority=5)
        stack.move(key, 2)
    set_transfer_delay(lambda kind: None if gate.wait(240) else pytest.fail("the gate stayed shut"))
    stack.prefetch(["a", "b", "c"])  # returns although no byte can move
    assert set(levels(stack).values()) == {2}
    gate.set()
    for key in "abc":
        assert float(stack.access(key)[0]) == ord(key)
    stats = stack.get_stats()
    assert stats["levels"][0]["promotions"] == 3 and counts(stack, "used_bytes") == [3 * PAGE, 0, 0]


def wait_for_prefetch(stack: VGPUStack) -> None:
    stack._mover.submit(int).result()


def test_prefetched_keys_do_not_push_each_other_out(make_stack):
    stack = make_stack(2, 8)
    for i in range(6):
        stack.register(f"k{i}", page(i), priority=5)
    stack.prefetch([f"k{i}" for i in range(6)])
    wait_for_prefetch(stack)
    assert [stack.level_of(f"k{i}") for i in range(6)] == [0, 0, 1, 1, 1, 1]
    stack.access("k0")
    stack.prefetch("k2")
    wait_for_prefetch(stack)
    assert levels(stack) == {"k0": 1, "k1": 0, "k2": 0, "k3": 1, "k4": 1, "k5": 1}


def test_prefetch_serves_parameters_through_who_knows_them(make_stack):
    stack, asked = make_stack(4, 4), []
    parameter = torch.nn.Parameter(torch.zeros(3))

    def prefetcher(item: object) -> bool:
        asked.append(item)
        return item is parameter or item == "model/layers.0"

    stack.prefetchers.append(prefetcher)
    stack.prefetch([parameter, "model/layers.0"])
    assert asked[0] is parameter and asked[1] == "model/layers.0"
    with pytest.raises(UnknownKey, match="tensor of shape"):
        stack.prefetch([torch.zeros(2, 2)])
    stack.prefetchers.remove(prefetcher)
    with pytest.raises(UnknownKey):
        stack.prefetch(["model/layers.0"])


def test_a_resident_access_is_quick(make_stack):
    """The aim is 10 us; the bench measures it, this only notices when something slow gets into the path."""
    import timeit

    stack = make_stack(4, 4)
    stack.register("a", page(1), priority=9)
    times = timeit.repeat(lambda: stack.access("a"), timer=time.thread_time, number=1000, repeat=5)
    assert min(times) / 1000 < 50e-6


# Life.


def test_use_after_close_is_refused_and_held_tensors_survive(make_stack):
    stack = make_stack(4, 4)
    stack.register("a", page(1), priority=9)
    view = stack.reserve("r", PAGE, 1).view()
    assert view is not None
    view.fill_(7)
    held = stack.access("a")
    stack.close()
    stack.close()
    gc.collect()
    assert torch.equal(held, page(1)) and int(view.sum()) == 7 * PAGE
    for call in (lambda: stack.access("a"), lambda: stack.register("b", page(1)), lambda: stack.prefetch("a")):
        with pytest.raises(ConfigurationError, match="closed"):
            call()


def test_a_dropped_stack_is_freed_at_once():
    """By reference counts: a stack in a cycle would keep its levels until the garbage collector next runs."""
    stack = VGPUStack({"levels": [{"capacity_mb": 1, "device": "cpu"}, {"capacity_mb": 1, "device": "cpu"}]})
    stack.register("a", page(1))
    alive = weakref.ref(stack)
    gc.disable()
    try:
        del stack
        assert alive() is None
    finally:
        gc.enable()


def test_inference_mode_leaves_no_trace(make_stack):
    stack = make_stack(2, 4, 8)
    with torch.inference_mode():
        for i in range(5):
            stack.register(f"k{i}", page(i), priority=5)
        for i in range(5):
            stack.access(f"k{i}")
    for i in range(5):
        x = torch.ones(KiB, requires_grad=True)
        (x * stack.access(f"k{i}")).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, page(i))


EXITS = """
import sys, torch
from vblackwell import VGPUStack
stack = VGPUStack({"levels": [{"capacity_mb": 1, "device": "cpu"}, {"capacity_mb": 2, "device": "cpu"},
                              {"capacity_mb": 8, "device": "ssd", "path": sys.argv[1]}]})
for i in range(30):
    stack.register(f"k{i}", torch.ones(50_000), priority=i % 11)
stack.prefetch(stack.keys())
if sys.argv[2] == "closed":
    stack.close()
"""


@pytest.mark.parametrize("how", [pytest.param("closed", marks=pytest.mark.slow), "open"])
def test_the_interpreter_exits_cleanly(disk_path: str, how: str):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", EXITS, disk_path, how]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_closing_leaves_no_thread_and_no_file(make_stack, disk_path: str):
    import os

    def threads_and_files() -> set[object]:
        here = f"/proc/{os.getpid()}/fd"
        links = ((number, os.path.join(here, number)) for number in os.listdir(here))
        return {
            *threading.enumerate(),
            *((number, os.readlink(link)) for number, link in links if os.path.lexists(link)),
        }

    before = threads_and_files()  # some of them are of earlier tests, and may end meanwhile
    stack = make_stack(2, 400, 800)
    for i in range(12):
        stack.register(f"k{i}", random_bytes(MiB // 4, seed=i), priority=5)
    stack.prefetch(stack.keys())
    stack.close()
    assert not threads_and_files() - before
