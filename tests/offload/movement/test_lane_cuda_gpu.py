"""Copies of other streams get their turn between the pieces of states,
where a copy engine left to itself takes all pieces first.
"""

from __future__ import annotations

import pytest
import torch

from vblackwell.memory.transfer import EventTransfer, copy_streams
from vblackwell.offload.movement.lane_cuda import CudaQueues, lane_streams
from vblackwell.units import MiB

pytestmark = pytest.mark.gpu
PIECE, COUNT = 32 * MiB, 40  # some 25 ms of one direction of a PCIe link, 3 ms of the fastest
LATE = 2_000_000  # cycles, some 1 ms: the engine is at the pieces when the other copy may begin


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_copy_passes_pieces_that_are_ready(way: str):
    device = torch.device("cuda", 0)
    queues, others = CudaQueues(device), copy_streams(device)
    queue, stream = (queues.states_in, others.h2d) if way == "in" else (queues.states_out, others.d2h)
    there = [torch.arange(PIECE, dtype=torch.uint8).pin_memory() for _ in range(2)]
    here = [torch.ones(PIECE, dtype=torch.uint8, device=device) for _ in range(2)]
    targets, sources = (here, there) if way == "in" else (there, here)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        targets[1].copy_(sources[1], non_blocking=True)
        passed = torch.cuda.Event(enable_timing=True)
        passed.record()
    with torch.cuda.device(device):
        addresses = targets[0].data_ptr(), sources[0].data_ptr(), PIECE
        pieces = [queues.copy(queue, [addresses]) for _ in range(COUNT)]
    torch.cuda.synchronize()
    assert torch.equal(targets[0].cpu(), sources[0].cpu())  # the first bytes, which went elsewhere, too
    # Left to itself the engine takes the copy last (docs/journal/offload.md).
    after = pieces[COUNT * 3 // 4]
    assert isinstance(after, EventTransfer)
    assert passed.elapsed_time(after._end) > 0


@pytest.mark.parametrize("way", ["in", "out"])
def test_the_end_of_a_copy_is_after_its_first_bytes(way: str):
    device = torch.device("cuda", 0)
    queues = CudaQueues(device)
    states_in, _, states_out, yield_in, yield_out = lane_streams(device)
    queue, other = (states_in, yield_in) if way == "in" else (states_out, yield_out)
    there, here = (
        torch.arange(PIECE, dtype=torch.uint8).pin_memory(),
        torch.full((PIECE,), 7, dtype=torch.uint8, device=device),
    )
    target, source = (here, there) if way == "in" else (there, here)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10 * LATE)
    with torch.cuda.device(device):
        copied = queues.copy(queue, [(target.data_ptr(), source.data_ptr(), PIECE)])
    copied.wait()
    assert torch.equal(target.cpu(), source.cpu())
