"""`model_plan`: what a user reads of a model's place in its stack."""

from __future__ import annotations

import pytest
import torch

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from vblackwell.errors import ConfigurationError
from vblackwell.offload.api import enable_vgpu_stack_optimization, model_plan, offload_of, release

_, DECODER, GPT2, *_ = CASES
LEVEL0 = 128 << 10


def test_a_streamed_model_tells_its_shares(make_stack: MakeStack):
    model = build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", update=0.4)
    found = offload_of(model).summary()
    lines = model_plan(model).splitlines()
    assert lines[0].startswith(f"streamed: {found['groups']} layer groups") and lines[1].endswith("on cpu")
    assert lines[3].endswith("% of the parameters on arena, others on the CPU")
    assert 0.5 < int(lines[3].split("AdamW: ")[1].split("%")[0]) / 100 < 0.75  # whole groups of 0.6
    assert lines[4] == "inputs of checkpoints wait on arena"
    release(model)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", activations="host")
    assert model_plan(model).splitlines()[3:] == ["AdamW: on the CPU", "inputs of checkpoints wait in RAM"]
    with pytest.raises(ConfigurationError, match="is in no stack: enable_vgpu_stack_optimization"):
        model_plan(release(model))


def test_a_resident_model_says_whose_operators_it_has(make_stack: MakeStack):
    model = build(GPT2)
    enable_vgpu_stack_optimization(model, make_stack(64 << 20), accelerate=True, compute_dtype=torch.bfloat16)
    first, held, operators = model_plan(model).splitlines()
    assert first.startswith("resident: ") and held.endswith(" on arena")
    assert operators == "operators of accelerate_causal_lm, until release"
