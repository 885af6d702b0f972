"""OptimizedTransformerBlock: its arithmetic, dropout under recomputation, packing, saving and loading."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import vblackwell
from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.block import OptimizedTransformerBlock
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.round_trip import round_trip

WEIGHTS = ("attention.qkv_proj", "attention.out_proj", "up_proj", "down_proj")


def made(seed: int = 0, **options) -> OptimizedTransformerBlock:
    torch.manual_seed(seed)
    return OptimizedTransformerBlock(32, 4, 80, **options)


def written_out(block: OptimizedTransformerBlock, x, mask, weights):
    """The block in plain operations of PyTorch."""

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    bias = {name: block.get_submodule(name).bias for name in WEIGHTS}
    qkv = functional.linear(norm(x, block.attention_norm.weight), weights[WEIGHTS[0]], bias[WEIGHTS[0]])
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in qkv.chunk(3, -1))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + functional.linear(attended, weights[WEIGHTS[1]], bias[WEIGHTS[1]])
    hidden = functional.gelu(
        functional.linear(norm(x, block.feed_forward_norm.weight), weights[WEIGHTS[2]], bias[WEIGHTS[2]])
    )
    return x + functional.linear(hidden, weights[WEIGHTS[3]], bias[WEIGHTS[3]])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_block_is_what_it_says(checkpointed):
    block = made(use_checkpoint=checkpointed).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted = [x, *block.parameters()]
    expected = written_out(block, x, mask, {name: block.get_submodule(name).weight for name in WEIGHTS})
    got = block(x, mask)
    torch.testing.assert_close(got, expected)  # float64
    gradients = torch.autograd.grad(got.sin().sum(), wanted)
    for a, b in zip(gradients, torch.autograd.grad(expected.sin().sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("quantized", [False, True])
def test_fp4_reaches_all_four_projections(quantized):
    block = made(use_fp4=True).eval()
    rounded = {
        name: round_trip(block.get_submodule(name).weight.detach(), block.up_proj.form, torch.float32)
        for name in WEIGHTS
    }
    x, mask = torch.randn(2, 7, 32), torch.ones(7, 7, dtype=torch.bool)
    exact = written_out(block, x, mask, {name: block.get_submodule(name).weight for name in WEIGHTS})
    expected = written_out(block, x, mask, rounded)
    if quantized:
        block.quantize()
    # fp32, sums of up to 80 terms in another order; not rounding the weights would be a hundred times that
    torch.testing.assert_close(block(x, mask), expected, rtol=1e-5, atol=1e-5)
    assert (exact - expected).abs().max() > 1e-3


def test_the_loop_that_people_write_and_a_second_one():
    model = nn.Sequential(made(use_fp4=True), made(1, use_fp4=False), nn.Linear(32, 8))
    plain = {name: value.clone() for name, value in model[1].state_dict().items()}
    for _ in range(2):
        for module in model.modules():
            if hasattr(module, "quantize"):
                module.quantize()
        packed = [module for module in model.modules() if isinstance(module, FusedFP4Linear)]
        assert len(packed) == 4 and all(module.is_quantized for module in packed)
    assert all(torch.equal(value, plain[name]) for name, value in model[1].state_dict().items())


def test_a_packed_block_is_saved_and_loaded_by_one_that_never_was(tmp_path):
    model = nn.Sequential(made(use_fp4=True, dropout=0.1), made(1, use_fp4=True)).eval()
    plain_bytes = sum(value.nbytes for value in model.state_dict().values())
    for module in model.modules():
        if hasattr(module, "quantize"):
            module.quantize()
    torch.save({"model_state_dict": model.state_dict()}, tmp_path / "m.pt")
    fresh = nn.Sequential(made(2, use_fp4=True), made(3, use_fp4=True)).eval()
    saved = torch.load(tmp_path / "m.pt", weights_only=True)["model_state_dict"]
    assert sum(value.nbytes for value in saved.values()) < plain_bytes / 3
    fresh.load_state_dict(saved)
    x = torch.randn(2, 5, 32)
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("use_fp4", [False, True])
def test_recomputing_changes_no_bit_and_draws_dropout_again(use_fp4):
    results = []
    for checkpointed in (False, True):
        block = made(use_fp4=use_fp4, dropout=0.3, use_checkpoint=checkpointed)
        torch.manual_seed(5)
        x = torch.randn(2, 6, 32, requires_grad=True)
        out = block(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_recomputing_keeps_only_the_input():
    def saved_bytes(block):
        kept = {}

        def pack(tensor):
            if not any(
                tensor.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in block.parameters()
            ):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(2, 64, 32, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = block(x)
        out.sum().backward()
        return sum(kept.values()) / x.nbytes

    assert saved_bytes(made()) > 8  # inputs
    assert saved_bytes(made(use_checkpoint=True)) <= 1


def test_a_packed_block_trains_what_comes_before_it():
    block = made(use_fp4=True, use_checkpoint=True).quantize()
    x = torch.randn(1, 5, 32, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()


def test_refused_blocks():
    with pytest.raises(ConfigurationError, match="feed-forward width of 0"):
        OptimizedTransformerBlock(32, 4, 0)
    with pytest.raises(ConfigurationError, match="heads must divide"):
        OptimizedTransformerBlock(32, 5, 64)
    with pytest.raises(ConfigurationError, match="dropout of 1"):
        OptimizedTransformerBlock(32, 4, 64, dropout=1.0)


def test_public_names():
    assert vblackwell.OptimizedTransformerBlock is OptimizedTransformerBlock
    layer = vblackwell.FlashAttention(d_model=16, n_heads=2, dropout=0.1)
    assert layer(torch.randn(1, 3, 16), mask=None).shape == (1, 3, 16)
    assert callable(vblackwell.from_multihead_attention)
