"""Transfers: waiting, errors on every wait, and who keeps what alive."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.delay import set_transfer_delay
from vblackwell.errors import ConfigurationError, DiskError, Unsupported
from vblackwell.memory.transfer import (
    DoneTransfer,
    FutureTransfer,
    copy_pool,
    copy_streams,
    start_copies,
    start_copy,
)
from vblackwell.units import MiB


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def fail(gate: threading.Event) -> None:
    gate.wait(240)
    raise DiskError("it broke")


def test_done():
    transfer = DoneTransfer()
    transfer.wait()
    transfer.wait_on(None)
    assert transfer.done() and transfer.clock() == (None, 0.0)


def test_an_error_waits_for_all_parts_and_is_raised_every_time(pool: ThreadPoolExecutor):
    gate, finished = threading.Event(), []
    broken = pool.submit(fail, threading.Event() if gate.set() else gate)
    slow = threading.Event()
    good = pool.submit(lambda: (slow.wait(240), finished.append(1)))
    transfer = FutureTransfer([broken, good])
    assert not transfer.done() and transfer.clock() is None
    threading.Timer(0.05, slow.set).start()
    for wait in (transfer.wait, lambda: transfer.wait_on(None), transfer.wait):
        with pytest.raises(DiskError, match="it broke"):
            wait()
        assert finished == [1]
    assert transfer.done() and transfer.clock()[1] >= 0.05


def test_waiting_ends_for_what_a_closed_pool_never_began():
    gate, pool = threading.Event(), ThreadPoolExecutor(1)
    transfer = FutureTransfer([pool.submit(gate.wait), pool.submit(gate.wait)])
    pool.shutdown(wait=False, cancel_futures=True)
    heard: list[type] = []

    def wait() -> None:
        with pytest.raises(ConfigurationError, match="the stack was closed while bytes moved") as found:
            transfer.wait()
        heard.append(found.type)

    waiter = threading.Thread(target=wait, daemon=True)  # one that waits forever must not keep the process
    waiter.start()
    gate.set()
    waiter.join(240)
    assert heard == [ConfigurationError] and transfer.done()


def test_large_copies_are_cut_and_complete():
    source = torch.randint(0, 256, (33 * MiB + 5,), dtype=torch.uint8)
    out = torch.zeros_like(source)
    pool = copy_pool("test")
    start_copy(out, source, pool).wait()
    pool.shutdown()
    assert torch.equal(out, source)


def test_tensors_live_until_the_copy_is_done_and_not_longer(no_delay_left: None):
    gate, pool = threading.Event(), copy_pool("test")
    set_transfer_delay(lambda kind: None if gate.wait(240) else pytest.fail("the gate stayed shut"))
    source, out = torch.ones(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    alive = weakref.ref(source)
    transfer = start_copy(out, source, pool)
    del source
    gc.collect()
    assert alive() is not None
    gate.set()
    transfer.wait()
    pool.shutdown()
    gc.collect()
    assert alive() is None and int(out.sum()) == 1000


def test_streams_belong_to_gpus():
    with pytest.raises(Unsupported, match="not to cpu"):
        copy_streams("cpu")


@pytest.mark.gpu
def test_streams_are_made_once():
    assert copy_streams("cuda:0") is copy_streams(torch.device("cuda", 0))
    assert len({stream.cuda_stream for stream in copy_streams("cuda:0")}) == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_copies_are_one_transfer_and_happen_in_order(pool: ThreadPoolExecutor, device: str):
    """Each of the last three takes what the one before it brought."""
    above, below = torch.arange(4, dtype=torch.uint8, device=device), torch.zeros(4, dtype=torch.uint8)
    start_copies(
        [(below[place : place + 1], above[number : number + 1]) for place, number in ((0, 1), (0, 2))], pool
    ).wait()
    assert below.tolist() == [2, 0, 0, 0]
    chain = [(above[number : number + 1], above[number - 1 : number]) for number in (1, 2, 3)]
    transfer = start_copies(chain, pool)
    transfer.wait()
    assert above.tolist() == [0] * 4 and transfer.done() and transfer.clock is not None


def test_an_error_of_one_of_several_copies_is_the_transfers(pool: ThreadPoolExecutor, no_delay_left: None):
    source, target, count = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), iter(range(9))

    def delay(kind: str) -> None:
        if next(count) == 1:
            raise DiskError("it broke")

    set_transfer_delay(delay)
    transfer = start_copies([(target[at : at + 1], source[at : at + 1]) for at in range(4)], pool)
    with pytest.raises(DiskError, match="it broke"):
        transfer.wait()
    assert target.tolist() == [1, 0, 0, 0]
