"""The steady step of a decoder: its logits are those of a growing cache, its weights lie together,
and a GPU replays it as a graph.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.nn.decoder.test_decoder_equality import config
from vblackwell.errors import ConfigurationError
from vblackwell.generate import steps
from vblackwell.generate.generate import draws, stepper
from vblackwell.generate.sampling import Sampling
from vblackwell.generate.steps import lay_out_for_decoding, may_capture
from vblackwell.nn.convert.model import convert
from vblackwell.nn.decoder.block import KVCache, SteadyCache
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.one_input import joined, lay_together


def decoder(**shape) -> Decoder:
    made = Decoder(config(**shape), seed=3).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.mul_(6.0)  # so that logits differ enough
    return made


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_steady_steps_are_those_of_a_growing_cache(kv_heads):
    model = decoder(num_heads=4, num_kv_heads=kv_heads)
    growing, filled = KVCache(model.config, 24), KVCache(model.config, 24)
    prompt = torch.arange(14).view(2, 7)
    token = model.lm_head(model.hidden(prompt, growing)[:, -1]).argmax(-1, keepdim=True)
    model.hidden(prompt, filled)
    steady = SteadyCache(filled, model.config)
    for _ in range(17):
        expected = model.lm_head(model.hidden(token, growing)[:, -1])
        found = model.next_logits(token, steady)
        # fp32: the same sums over a masked row and over a short one
        assert (found - expected).norm() < 1e-5 * expected.norm()
        token = expected.argmax(-1, keepdim=True)
        assert torch.equal(token, found.argmax(-1, keepdim=True))
    assert steady.position_1.tolist() == [24]
    steady.restart()
    assert steady.position_1.tolist() == [7]


@torch.no_grad()
def test_hooks_of_the_caller_see_a_step():
    model, prompt, token = decoder(), torch.arange(7)[None], torch.tensor([[3]])
    logits, seen = [], []
    for hooks in (0, 1):
        cache = KVCache(model.config, 10)
        model.hidden(prompt, cache)
        modules = (model.layers[1], model.layers[0].input_layernorm, model.model.norm)[: 3 * hooks]
        handles = [module.register_forward_hook(lambda module, args, output: seen.append(output)) for module in modules]
        logits.append(model.next_logits(token, SteadyCache(cache, model.config)))
        for handle in handles:
            handle.remove()
    assert len(seen) == 3 and torch.equal(logits[0], logits[1])


def test_weights_of_one_input_lie_together():
    linears = [nn.Linear(6, width, bias=False) for width in (4, 2, 2)]
    before, names = [linear.weight.detach().clone() for linear in linears], [linear.weight for linear in linears]
    assert joined(names) is None
    assert lay_together(*linears)
    assert all(linear.weight is name for linear, name in zip(linears, names, strict=True))
    joint = joined([linear.weight for linear in linears])
    assert joint is not None and torch.equal(joint, torch.cat(before)) and joint.data_ptr() == names[0].data_ptr()
    assert joined(names[1:]) is not None and joined([names[0], names[2]]) is None


def test_what_is_not_plain_is_left():
    with_bias, other = nn.Linear(6, 4), nn.Linear(6, 2, bias=False)
    place = other.weight.data_ptr()
    assert not lay_together(other, with_bias)
    assert not lay_together(other, nn.Linear(6, 2, bias=False).double())
    assert other.weight.data_ptr() == place


def test_layers_are_laid_out_and_a_cpu_captures_nothing():
    model = decoder()
    ids = torch.arange(6)[None]
    expected = model(ids)
    lay_out_for_decoding(model)
    attention = model.layers[0].self_attn
    assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    assert torch.equal(model(ids), expected) and not may_capture(model)


@pytest.mark.gpu
@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_step_writes_the_same_tokens(dtype, fp4, monkeypatch):
    model = decoder(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, num_layers=3, max_position=256)
    model = model.to("cuda", dtype)
    if fp4:
        convert(model, pack=True)
    lay_out_for_decoding(model)
    prompt, count = torch.arange(40, device="cuda")[None] % model.config.vocab_size, 100

    def stepping(fewest: int):
        monkeypatch.setattr(steps, "MIN_STEPS", fewest)
        return stepper(model, 140)

    def written(fewest: int, sampling: Sampling) -> list[list[int]]:
        return list(draws(stepping(fewest), prompt, count, sampling, 5, ahead=1))

    if dtype is torch.float32:
        for sampling in (Sampling(temperature=0), Sampling(1.0, top_k=20)):
            assert written(1, sampling) == written(1000, sampling)
    # Logits of the same text, of every step: two tokens may tie in bf16, and what is written then differs.
    given = torch.randint(model.config.vocab_size, (1, count), device="cuda")
    found = []
    for fewest in (1000, 1):
        step = stepping(fewest)
        step(prompt)
        found.append(torch.cat([step(given[:, place : place + 1]).float().clone() for place in range(count)]))
    # Three layers round some ten times each on the way to a logit, either way in different places: to 2^-8.8 RMS at
    # most in bf16 (half a unit of 8 bits over sqrt(3)), so both together differ by 2^-8.8 * sqrt(60), and by as much
    # again because a layer's softmax sees what the one before it differs by. In fp32 units have 16 bits less, but sums
    # of 512 products go in other orders.
    bound = {torch.bfloat16: 2**-4.8, torch.float32: 2**-15}[dtype]
    assert (found[0] - found[1]).norm() < bound * found[0].norm()


@pytest.mark.gpu
@torch.no_grad()
def test_replays_grow_the_cache_and_wait_for_nothing():
    model = decoder(hidden_size=256, intermediate_size=512, num_heads=4, max_position=256).cuda()
    ids = torch.arange(3 * 150, device="cuda").view(3, 150) % model.config.vocab_size
    step = stepper(model, 150)
    step(ids[:, :20])
    step(ids[:, 20:21])
    logits = []
    with warnings.catch_warnings(action="ignore"):  # it says that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        for position in range(21, 150):
            logits.append(step(ids[:, position : position + 1]).clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ConfigurationError, match="150 positions are taken"):
        step(ids[:, :1])
    whole = model(ids)
    for position in (21, 63, 64, 128, 149):
        difference = logits[position - 21] - whole[:, position]
        assert difference.norm() < 1e-4 * whole[:, position].norm()  # fp32 sums in other orders through two layers
