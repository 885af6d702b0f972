"""Lean halves of the decoder's blocks: on a GPU only, so here in Triton's interpreter,
as if linears on the CPU might be fused.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear import one_input
from vblackwell.nn.linear.one_input import is_plain
from vblackwell.offload.api import enable_vgpu_stack_optimization, release
from vblackwell.offload.optimizer import VGPUAdamW

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/kernels/test_fused_decoder.py does it for real"
)
CONFIG = DecoderConfig(64, 32, 48, 2, 2, num_kv_heads=1, max_position=16)
HALVES = ("vblackwell::feed_forward_block", "vblackwell::normed_linears")


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fusing(monkeypatch):
    monkeypatch.setattr(one_input, "may_fuse", lambda x, *linears: all(is_plain(linear) for linear in linears))
    with use_backend("rms_norm", "triton"), use_backend("swiglu", "triton"):
        yield


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))


def trained(model: Decoder) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Loss and gradients of one pass, and the operations that made them."""
    with Counting() as counting:
        loss = model(tokens(), tokens(1))
        loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())], counting.counts


def test_both_halves_are_lean():
    plain = Decoder(CONFIG, seed=3)
    model = copy.deepcopy(plain)
    model.gradient_checkpointing = True
    found, counts = trained(model)
    # two blocks, twice each
    assert tuple(counts.get(name, 0) for name in HALVES) == (4, 4)
    expected, counts = trained(plain)
    assert not any(name in counts for name in HALVES), "without a checkpoint nothing is computed twice"
    for got, right in zip(found, expected, strict=True):
        # fp32 sums in another order
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm", "mlp.up_proj", "input_layernorm"])
def test_modules_with_hooks_are_called(name):
    model = Decoder(CONFIG, seed=3)
    model.gradient_checkpointing = True
    calls = []
    model.layers[1].get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(name))
    _, counts = trained(model)
    assert len(calls) == 2 and sum(counts.get(half, 0) for half in HALVES) == 8 - 2


@pytest.mark.parametrize("name", ["layers.1", "layers.1.mlp"])
def test_hooks_get_the_output_in_both_passes(name):
    """A checkpoint's second pass runs them as well, and they may save what they are given."""
    found = []
    for checkpointing in (True, False):
        model = Decoder(CONFIG, seed=3)
        model.gradient_checkpointing = checkpointing
        scale = torch.ones(32, requires_grad=True)
        model.model.get_submodule(name).register_forward_hook(lambda module, args, output, scale=scale: output * scale)
        values, _ = trained(model)
        found.append([*values, scale.grad])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


def test_a_hook_on_attention_sees_a_tensor():
    model = Decoder(CONFIG, seed=3)
    model.gradient_checkpointing = True
    seen = []
    model.layers[1].self_attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    _, counts = trained(model)
    assert [type(each) for each in seen] == [torch.Tensor] * 2
    assert tuple(counts.get(name, 0) for name in HALVES) == (4, 2)


def test_streamed_as_resident():
    """Weights that come and go under the lean halves: the bits of a model that stays."""
    initial = Decoder(CONFIG, seed=3)
    initial.gradient_checkpointing = True
    runs = []
    for placement, fast_mb in (("resident", 8), ("streamed", 0.07)):
        stack = VGPUStack(
            {"levels": [{"capacity_mb": fast_mb, "device": "arena"}, {"capacity_mb": 8, "device": "cpu"}]}
        )
        with stack:
            model = enable_vgpu_stack_optimization(copy.deepcopy(initial), stack, placement=placement)
            optimizer, losses = VGPUAdamW(model.parameters(), lr=1e-2), []
            for step in range(3):
                loss = model(tokens(step), tokens(step + 1))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            release(model)
            runs.append((losses, [param.detach().clone() for param in model.parameters()]))
    (losses, weights), (streamed_losses, streamed_weights) = runs
    assert losses == streamed_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, streamed_weights, strict=True))
