"""FusedFP4Linear under DistributedDataParallel: two real processes over gloo."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vblackwell.nn.linear import FusedFP4Linear


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


def _worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = _model()
    _train(DistributedDataParallel(model), _batches(rank))
    torch.save(model.state_dict(), os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def test_two_ranks_train_as_one_process_on_both_batches(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_worker, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone = _model()
    _train(alone, [torch.cat(pair) for pair in zip(_batches(0), _batches(1), strict=True)])
    for name, expected in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        # mean of two means against one mean: fp32 rounding, three steps
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-6)
