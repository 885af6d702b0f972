"""A trace says the same bytes whether or not torch has a GPU: the disguise decides, not the machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from tests.planner.test_memory_estimate import trace_of
from vblackwell.errors import Unsupported
from vblackwell.planner.memory_estimate import OPTIMIZERS, ModelConfig, Run
from vblackwell.planner.model_spec import of_decoder
from vblackwell.trace.cuda_on_meta import cuda_on_meta
from vblackwell.trace.trace import Trace, trace_training

CASES = (("llama", None), ("gpt2", torch.bfloat16), ("mixtral", None))
SHAPE = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=3, num_heads=4, seq_length=64)


def digest(trace: Trace) -> str:
    return hashlib.sha256(repr((trace.sizes, trace.categories, trace.events, trace.marks)).encode()).hexdigest()


def of_our_decoder() -> Trace:
    """Whose fused operators run only where the model believes in a GPU."""
    return Run(
        of_decoder("decoder", SHAPE.decoder()), 64, precision="bf16", checkpointing=True, capability=(9, 0)
    ).trace(2)


def digests(cases: int = len(CASES)) -> list[str]:
    return [digest(of_our_decoder()), *(digest(trace_of(kind, autocast=autocast)) for kind, autocast in CASES[:cases])]


def test_it_does_not_ask_whether_there_is_a_gpu(monkeypatch):
    here = digests(1)
    for name, answer in (("is_available", not torch.cuda.is_available()), ("device_count", 3), ("current_device", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert digests(1) == here


ASKS_THE_DRIVER = (
    "_lazy_init", "current_device", "current_stream", "device", "get_device_name", "get_device_properties",
    "get_rng_state", "is_current_stream_capturing", "manual_seed", "mem_get_info", "set_rng_state", "synchronize",
)  # fmt: skip


def gpu_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on torch is in a fork of a process that has used its GPU:
    it says that there is one, and all that needs it raises.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    for name in ASKS_THE_DRIVER:
        monkeypatch.setattr(torch.cuda, name, refuse)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda.random, name, refuse)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    for owner, name, answer in (
        (torch.cuda, "is_available", True),
        (torch.cuda, "device_count", 1),
        (torch.backends.cuda, "is_built", True),
        (torch.accelerator, "current_accelerator", torch.device("cuda", 0)),
    ):
        monkeypatch.setattr(owner, name, lambda *args, answer=answer, **kwargs: answer)
    monkeypatch.setattr(torch.accelerator, "current_stream", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def of_a_stack(optimizer: str, checkpointing: bool, autocast: bool) -> Trace:
    """Two layers of torch's own, which checkpointing repeats."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)).to("meta")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (checkpoint(model, batch, use_reentrant=False) if checkpointing else model(batch)).float().sum()

    return trace_training(
        model,
        lambda: torch.zeros(4, 8, device="cuda"),
        loss,
        OPTIMIZERS[optimizer],
        autocast=torch.bfloat16 if autocast else None,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_leaves_a_gpu_alone_that_would_not_start(monkeypatch, checkpointing, autocast):
    kinds = [(optimizer, checkpointing, autocast) for optimizer in OPTIMIZERS]
    here = [digest(of_a_stack(*kind)) for kind in kinds]
    gpu_in_a_fork(monkeypatch)
    with pytest.raises(RuntimeError, match="re-initialize"):
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()
    assert [digest(of_a_stack(*kind)) for kind in kinds] == here


def test_our_decoder_leaves_it_alone_too(monkeypatch):
    here = digests(0)
    gpu_in_a_fork(monkeypatch)
    assert digests(0) == here


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("traced", [None, torch.bfloat16])
def test_a_region_that_a_model_opens_leaves_autocast_as_it_was(traced, outside):
    """As rotary embeddings open one to compute in fp32; it ends with what it was told in the beginning."""

    class Opens(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", torch.float16, enabled=False):
                return super().forward(input.float())

    def now() -> list[Any]:
        return [ask(kind) for kind in ("cpu", "cuda") for ask in (torch.is_autocast_enabled, torch.get_autocast_dtype)]

    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        before = now()
        make = lambda: torch.zeros(4, 64, device="cuda")  # noqa: E731
        trace_training(Opens(64, 64), make, lambda model, x: model(x).sum(), None, autocast=traced)
        assert now() == before


def test_of_two_threads_neither_leaves_its_answers_behind():
    def asked() -> list[Any]:
        return [
            torch.cuda.current_device,
            torch.cuda.get_device_capability,
            nn.Module.__call__,
            torch.is_autocast_enabled,
        ]

    before, inside, met, left = asked(), threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with cuda_on_meta():
            inside.set()
            met.wait(0.1)
        left.set()

    def second() -> None:
        inside.wait()
        with cuda_on_meta():
            met.set()
            left.wait()

    threads = [threading.Thread(target=work, daemon=True) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert asked() == before


def test_other_threads_go_on_as_ever():
    """What they compute, ask and call is no part of a trace, nor answered by one, however it is in the way."""
    model, inside, done = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), threading.Event(), threading.Event()
    recomputed = nn.Linear(8, 8)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    asked, found = list[Any](), list[Any]()

    def ask() -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            attended = nn.functional.scaled_dot_product_attention(x, x, x)
            y = checkpoint(recomputed, attended, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.float().sum(), x)
        packed = masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]]))
        with torch.autocast("cpu", torch.bfloat16):
            regions = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return [attended.detach(), y.detach(), gradient, packed, regions, x.device.type, x.is_meta]

    def other() -> None:
        inside.wait(240)
        found.extend(ask())
        done.set()

    def loss(traced: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = traced[0](x)
        inside.set()
        assert done.wait(240)
        return traced[1](y).sum()

    def trace() -> Any:
        return trace_training(model, lambda: torch.zeros(4, 8, device="cuda"), loss, None)

    asked.extend(ask())
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    beside = trace()
    thread.join(240)
    assert len(found) == len(asked)
    for one, another in zip(found, asked, strict=True):
        assert torch.equal(one, another) if isinstance(one, torch.Tensor) else one == another
    assert beside == trace()


def test_random_numbers_of_other_threads_are_not_drawn_again():
    """Nor does a trace draw any: a model that does on the CPU leaves the generator as it was."""
    inside, done, drawn = threading.Event(), threading.Event(), list[float]()

    def other() -> None:
        inside.wait(240)
        drawn.extend(torch.rand(4).tolist())
        done.set()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < 2 and torch.empty(3).uniform_().numel():  # as layers that are dropped at random do
            inside.set()
            assert done.wait(240)
        return model(nn.functional.dropout(x, 0.5)).sum()

    linear = nn.Linear(8, 8)
    torch.manual_seed(5)
    expected = [*torch.rand(4).tolist(), *torch.rand(4).tolist()]
    torch.manual_seed(5)
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    trace_training(linear, lambda: torch.zeros(4, 8, device="cuda"), loss, None)
    thread.join(240)
    assert drawn + torch.rand(4).tolist() == expected


def test_no_kernel_of_triton_is_launched():
    """It would read the address 0 of a GPU, after which the process can use that no more."""
    triton = pytest.importorskip("triton")

    class Launching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _kernel[(1,)](x)
            return super().forward(x)

    _kernel, run = triton.JITFunction(_nothing), triton.JITFunction.run
    with pytest.raises(Unsupported, match="the Triton kernel _nothing needs bytes"):
        trace_training(Launching(8, 8), lambda: torch.zeros(4, 8, device="cuda"), lambda model, x: model(x).sum(), None)
    assert triton.JITFunction.run is run


def _nothing(pointer):
    pass


@pytest.mark.gpu
def test_the_same_bytes_with_a_gpu_and_without():
    """This process has used its GPU; another is shown none, as on a laptop."""
    assert torch.zeros(2, device="cuda").sum().item() == 0
    code = (
        "import torch; from tests.trace.test_cuda_on_meta import digests; print(torch.cuda.is_available(), *digests())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    available, *elsewhere = found.stdout.split()
    assert available == "False" and elsewhere == digests()
