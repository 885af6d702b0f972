"""Stated formats on a GPU: the bits of a resident model, and of the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.offload.conftest import MakeStack
from tests.offload.storage.format_cases import (
    LIMIT,
    Embedded,
    Form,
    Odd,
    Vectors,
    assert_same_states,
    optimizer_of,
    packed_form,
    train,
)
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeatable() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@packed_form
@pytest.mark.parametrize("undo", [True, False])
def test_streamed_is_resident_on_a_gpu(form: Form, undo: bool, repeatable: None):
    """Resident, a tight and a roomy level 0; with clipping where there is rollback."""
    found = []
    for placement, fast_mb, more in (
        ("resident", 64, {}),
        ("streamed", 2, {}),
        ("streamed", 64, {}),
        ("streamed", 8, {"resident_bytes": "1MiB"}),
    ):
        with VGPUStack(
            {"levels": [{"capacity_mb": fast_mb, "device": "cuda:0"}, {"capacity_mb": 256, "device": "cpu"}]}
        ) as stack:
            model = enable_vgpu_stack_optimization(Odd(), stack, placement=placement, **form.given, **more)
            optimizer = optimizer_of(model, undo=undo, max_grad_norm=LIMIT if undo else None)
            seen = train(model, optimizer, range(8))
            found.append((seen, dict(export_state(model, optimizer))))
            release(model)
    for seen, states in found[1:]:
        assert seen == found[0][0]
        assert_same_states(states, found[0][1])
    if undo:
        clipped = [norm > LIMIT for *_, norm in found[0][0]]
        assert any(clipped) and not all(clipped), found[0][0]


@packed_form
def test_a_gpu_updates_to_the_bits_of_the_cpu(form: Form, make_stack: MakeStack):
    """The same gradients, on the arena and on a GPU that streams: the update's bits depend on neither."""
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(24_577, generator=generator) for _ in range(3)]
    found = []
    for level0 in ("cpu", "cuda:0"):
        model = Vectors([[24_577]])
        with VGPUStack(
            {"levels": [{"capacity_mb": 1, "device": level0}, {"capacity_mb": 64, "device": "cpu"}]}
        ) as stack:
            enable_vgpu_stack_optimization(model, stack, placement="streamed", **form.given)
            optimizer = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True)
            (param,) = model.parameters()
            for gradient in gradients:
                (param * gradient.to(param.device, param.dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(dict(export_state(model, optimizer)))
            release(model)
    assert_same_states(found[1], found[0])


@packed_form
def test_sliced_leaves_on_a_gpu(form: Form, repeatable: None):
    found = []
    for placement, fast_mb in (("resident", 64), ("streamed", 0.8)):
        with VGPUStack(
            {"levels": [{"capacity_mb": fast_mb, "device": "cuda:0"}, {"capacity_mb": 256, "device": "cpu"}]}
        ) as stack:
            model = enable_vgpu_stack_optimization(Embedded(), stack, placement=placement, **form.given)
            optimizer = VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.05, update_in_backward=True)
            for step in range(4):
                tokens = torch.randint(5001, (2, 300), generator=torch.Generator().manual_seed(step))
                model(tokens.cuda()).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert offload_of(model).summary()["sliced"] == (["embedding"] if placement == "streamed" else [])
            found.append(dict(export_state(model, optimizer)))
            release(model)
    assert_same_states(found[1], found[0])
