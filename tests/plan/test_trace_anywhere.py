"""A trace says the same bytes whether or not torch has a GPU: the disguise decides, not the machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from tests.plan.test_estimate import trace_of
from vblackwell.estimator import ModelConfig, Run
from vblackwell.plan.trace import Trace
from vblackwell.subject import of_decoder

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


@pytest.mark.gpu
def test_the_same_bytes_with_a_gpu_and_without():
    """This process has used its GPU; another is shown none, as on a laptop."""
    assert torch.zeros(2, device="cuda").sum().item() == 0
    code = (
        "import torch; from tests.plan.test_trace_anywhere import digests; print(torch.cuda.is_available(), *digests())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True,
        timeout=300,
    )  # fmt: skip
    available, *elsewhere = found.stdout.split()
    assert available == "False" and elsewhere == digests()
