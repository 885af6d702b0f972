"""FusedFP4Linear under DistributedDataParallel: two real processes over gloo."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear

RANKS = """
import os
from pathlib import Path
from tests.nn.linear.test_fused_fp4_ddp import train_rank
other = os.fork()
train_rank(0 if other else 1, Path(sys.argv[1]))
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        FusedFP4Linear(16, 32, activation="gelu", use_fp4=True), FusedFP4Linear(32, 32).freeze(), nn.Linear(32, 4)
    )


def _batches(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(8, 16, generator=generator) for _ in range(3)]


def _train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def train_rank(rank: int, folder: Path) -> None:
    """One of two processes that meet at a file in ``folder``, and leave their weights there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    model = _model()
    _train(DistributedDataParallel(model), _batches(rank))
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_train_as_one_process_on_both_batches(program: Callable[..., str], tmp_path: Path):
    program(RANKS, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone = _model()
    _train(alone, [torch.cat(pair) for pair in zip(_batches(0), _batches(1), strict=True)])
    for name, expected in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        # mean of two means against one mean: fp32 rounding, three steps
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-6)
