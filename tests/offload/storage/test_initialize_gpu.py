"""Models filled from the meta device, and states on a disk, on a GPU:
the bits of models that were built, and of states in RAM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.storage.format_cases import BF16, Form, Odd, assert_same_states, optimizer_of, train
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.state import export_state

pytestmark = pytest.mark.gpu

FORMS = [Form("fp32", "exact", BF16), Form("fp32", "exact", None), Form("8bit", "exact", BF16)]


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def levels(fast_mb: float, host_mb: float, folder: Path) -> dict[str, Any]:
    return {
        "levels": [
            {"capacity_mb": fast_mb, "device": "cuda:0"},
            {"capacity_mb": host_mb, "device": "cpu"},
            {"capacity_mb": 64, "device": "ssd", "path": str(folder)},
        ]
    }


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.states}-{form.dtype}")
@pytest.mark.parametrize("undo", [True, False])
def test_filled_on_meta_with_states_anywhere(form: Form, undo: bool, tmp_path: Path):
    """Resident, streamed, partly resident, and with moments on a disk;
    the first is a model that was built with its values.
    """
    values = dict(Odd().named_parameters())
    total = sum(value.numel() for value in values.values())
    # RAM for weights, remainders, gradients where they are kept, a part of the moments, and what those on the disk pass
    # through.
    narrow = (6.4 if form.states == "8bit" else 9.0) if form.dtype is not None else 10.5
    tight = (narrow + (0 if not undo else 2 if form.dtype is not None else 4)) * total / (1 << 20)
    found = []
    for number, (placement, fast_mb, host_mb, more) in enumerate(
        (
            ("streamed", 64, 256, {}),
            ("resident", 64, 256, {}),
            ("streamed", 64, 256, {}),
            ("streamed", 8, 256, {"resident_bytes": "1MiB"}),
            ("streamed", 8, tight, {}),
        )
    ):
        with VGPUStack(levels(fast_mb, host_mb, tmp_path)) as stack:
            model = Odd()
            if number:
                model.to("meta")
                more = {**more, "initialize": lambda name, tensor: tensor.copy_(values[name].detach())}
            enable_vgpu_stack_optimization(model, stack, placement=placement, update="device", **form.given, **more)
            optimizer = optimizer_of(model, undo=undo, max_grad_norm=3.5 if undo else None)
            found.append((train(model, optimizer, range(8)), dict(export_state(model, optimizer))))
            rows = offload_of(model).summary()["bytes_by_level"]
            kinds = [rows[kind] for kind in ("exp_avg", "exp_avg_codes") if kind in rows]
            assert (stack.levels[2].used_bytes > 0) == (host_mb == tight), kinds
            release(model)
            assert all(not param.is_meta for param in model.parameters())
    for seen, states in found[1:]:
        assert seen == found[0][0]
        assert_same_states(states, found[0][1])
