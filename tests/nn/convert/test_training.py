"""What `vb train` makes of a folder of transformers:
fused operators, and a loss without the logits of a whole batch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.convert.test_causal_lm import build
from tests.planner.test_forecast import H200
from vblackwell.errors import Unsupported
from vblackwell.kernels.pointwise import cross_entropy
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.convert.causal_lm import has_fused_loss, is_accelerated
from vblackwell.nn.convert.training import (
    attention_backends,
    chosen_backend,
    fuse,
    fused_backend,
    training_loss,
    training_request,
)
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.forecast import Forecast, Machine
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.placement import Bounds
from vblackwell.train.auto import spec_of
from vblackwell.units import GiB

TOKENS, VOCABULARY = 48, 97


class Largest(TorchDispatchMode):
    """The most elements that any operator gave at once."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def step(model) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
    """Loss and gradients of one batch whose rows hold two documents each, and the largest tensor on the way."""
    ids = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, :7] = -100
    model.zero_grad()
    with Largest() as largest:
        loss = training_loss(model)(ids, targets)
        loss.backward()
    return loss.detach(), [param.grad for param in model.parameters()], largest.elements


@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Mixtral", "Gemma2"])
def test_the_loss_is_the_same_and_its_logits_are_never_whole(name, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 16 * VOCABULARY * 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_MULTIPLE", 16)
    model: Any = build(name).train()
    model.config.output_router_logits = False
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert has_fused_loss(model) == (name != "Gemma2")  # its logits are capped on their way to the loss
    assert report is not None and ("a scale or a cap" in str(report)) == (name == "Gemma2")
    (loss, grads, largest), (expected, right, plain_largest) = step(model), step(plain)
    # fp32 sums in another order: a mean of 39 terms, gradients of as many.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, other in zip(grads, right, strict=True):
        assert grad is not None and other is not None and (grad - other).norm() <= 1e-5 * other.norm() + 1e-9
    assert plain_largest >= TOKENS * VOCABULARY
    if name == "Qwen2":  # nothing else of it has as many elements a token as there are words
        assert largest < TOKENS * VOCABULARY


def test_routers_count_in_training_alone():
    model: Any = build("Mixtral")
    assert model.config.output_router_logits
    plain = copy.deepcopy(model)
    fuse(model)
    ids = torch.arange(24).reshape(2, 12)
    pure = training_loss(plain.eval())(ids, ids)  # by the logits: cross entropy and nothing else
    torch.testing.assert_close(training_loss(model.eval())(ids, ids), pure, rtol=1e-6, atol=0)
    assert training_loss(model.train())(ids, ids) > pure + 1e-3


def test_a_plan_is_made_for_the_model_that_runs():
    """Its copies are plain, so it has to fuse them again: without, it would count logits that never are."""
    model = build("Qwen2").to("meta")
    run = Run(spec_of(model, "model"), 32, precision="bf16", capability=(9, 0))
    machine = Machine(Bounds(8 * GiB, 64 * GiB), H200)
    plain, fused = (Forecast(each, machine) for each in (run, run.like(fuses=True)))
    with fused.run.prepared(fused.model):
        assert has_fused_loss(fused.model)
    assert fused.trace(False, 2).work != plain.trace(False, 2).work
    assert fused.model is plain.model and not is_accelerated(plain.model)


CPU = torch.device("cpu")


def test_the_attention_that_runs_is_known():
    shape = DecoderConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    request = training_request(heads, 16, torch.float32, CPU)
    with attention_backends(use_flash_attn=True, deterministic=False):
        assert chosen_backend(request) == "flash"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(Unsupported, match="--use-flash-attn: no fused"):
        chosen_backend(request)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    devices = []
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **how: devices.append(device))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **how: SDPBackend.FLASH_ATTENTION.value)
    request = training_request((2, 2, 16), 16, torch.float32, CPU)._replace(device="cuda")
    assert [chosen_backend(request._replace(gpu=gpu)) for gpu in (None, 1)] == ["flash"] * 2
    assert devices == [torch.device("cuda")] * 2 + [torch.device("cuda", 1)] * 2


def test_the_fused_attention_of_a_run_and_why_there_is_none(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    assert fused_backend(training_request((4, 2, 32), 16, torch.float32, CPU)) == "flash"
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused_backend(training_request((4, 2, 64), 512, torch.bfloat16, cuda)) == "cudnn"
    assert fused_backend(training_request((4, 2, 64), 512, torch.bfloat16, cuda, deterministic=True)) == "triton"
    assert fused_backend(training_request((4, 4, 64), 512, torch.float32, cuda)) == "efficient"
    with pytest.raises(Unsupported, match="--use-flash-attn: no fused.*--mixed-precision") as caught:
        fused_backend(training_request((4, 2, 512), 512, torch.float32, cuda))
    for words in (
        "flash: the tensors are torch.float32: it takes",
        "efficient: 4 query heads over 2 key heads",
        "triton: a head of 512",
    ):
        assert words in str(caught.value)
    assert "math" not in str(caught.value)


def test_a_decoder_attends_where_it_is_told():
    shape = DecoderConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2
    )
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    runs = []
    for backend in (None, "flash"):
        model = Decoder(shape, seed=1)
        model.use_attention(backend)
        loss = model(tokens, tokens)
        runs.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    model.use_attention("cudnn")
    with pytest.raises(Unsupported, match="'cudnn' refuses"):
        model(tokens)
    model.use_attention(None)
    model(tokens)
