"""Layers, conversions, two parts and codecs: outputs and gradients."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vblackwell as vb
from tests.bits.case import Results, case
from tests.bits.models import FORMATS, VOCABULARY, causal_model, make_stack, mlp


def forward_backward(module: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """Output, gradients of the inputs and of the parameters."""
    given = [x.detach().requires_grad_(x.is_floating_point() and i == 0) for i, x in enumerate(inputs)]
    torch.manual_seed(2)
    y = module(*given)
    y.float().square().mean().backward()
    found = {name: param.grad for name, param in module.named_parameters()}
    return [y, given[0].grad, found]


@case
def modules(folder: Path) -> Results:
    torch.manual_seed(0)
    x_BSD = torch.randn(2, 24, 64)
    mask_BST = torch.rand(2, 24, 24) > 0.3
    mask_BST |= torch.eye(24, dtype=torch.bool)
    for options in (
        {},
        {"causal": True, "n_kv_heads": 2},
        {"causal": True, "window": 5, "rotary_theta": 10000.0},
        {"use_fp4": True},
    ):
        torch.manual_seed(3)
        attention = vb.FlashAttention(64, 4, **options)
        name = "attention-" + ("-".join(options) or "plain")
        yield name, forward_backward(attention, x_BSD)
        yield f"{name}-masked", forward_backward(attention, x_BSD, mask_BST)
    for use_fp4 in (False, True):
        torch.manual_seed(3)
        block = vb.OptimizedTransformerBlock(64, 4, 128, dropout=0.1, use_fp4=use_fp4, use_checkpoint=True)
        yield f"block-fp4-{use_fp4}", forward_backward(block, x_BSD)
        block.quantize()
        yield f"block-fp4-{use_fp4}-quantized", [forward_backward(block.eval(), x_BSD), dict(block.state_dict())]
    for name in FORMATS:
        for activation in ("none", "gelu"):
            torch.manual_seed(3)
            layer = vb.FusedFP4Linear(64, 96, activation=activation, format=name)
            plain = forward_backward(layer, x_BSD)
            layer.quantize()
            packed = forward_backward(layer, x_BSD)[:2]
            half = layer.to(torch.bfloat16)(x_BSD.bfloat16())
            yield f"linear-{name}-{activation}", [plain, packed, half, dict(layer.state_dict())]
    torch.manual_seed(3)
    straight = vb.FusedFP4Linear(64, 96, use_fp4=True)
    yield "linear-straight-through", forward_backward(straight, x_BSD)

    weight = torch.randn(96, 64)
    apart = vb.separate(weight)
    yield "two-parts", [apart.fine, apart.coarse.codes, apart.coarse.block_scales, apart.dequantize()]
    for quantization, fp4 in ((True, True), (True, False), (False, True)):
        precision = {"enable_quantization": quantization, "enable_fp4": fp4}
        adapter = vb.create_virtual_blackwell(mode="auto", **precision)
        adapter.register_weight("w", weight)
        name = f"two-parts-{quantization}-{fp4}"
        yield f"{name}-compress", adapter.compress(weight, x_BSD, "w")
        for mode in ("training", "inference"):
            with contextlib.redirect_stdout(sys.stderr):
                model = vb.enable_vb_optimization(mlp(), mode=mode, **precision)
            yield f"{name}-{mode}", forward_backward(model, x_BSD[0, :, :48].contiguous())
    with make_stack(folder, 64) as stack:
        torch.manual_seed(3)
        layer = vb.VGPUStackLinear(64, 96, vgpu_stack=stack, bias=True)
        yield "stack-linear", layer(x_BSD)
    plain = causal_model("llama").eval()
    tokens_BS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(7))
    for name, arguments in (
        ("straight", {}),
        ("packed", {"pack": True}),
        ("fused", {"fp4_layers": None, "loss": True}),
    ):
        converted = copy.deepcopy(plain).train()
        vb.convert(converted, **arguments)
        loss = converted(input_ids=tokens_BS, labels=tokens_BS).loss
        loss.backward()
        yield f"convert-{name}", [loss, {n: p.grad for n, p in converted.named_parameters() if p.grad is not None}]
    accelerated = copy.deepcopy(plain).train()
    vb.accelerate_causal_lm(accelerated)
    loss = accelerated(input_ids=tokens_BS, labels=tokens_BS).loss
    loss.backward()
    yield "accelerated", [loss, {n: p.grad for n, p in accelerated.named_parameters()}]


@case
def codec(folder: Path) -> Results:
    del folder
    for shape in ((64, 96), (3, 17, 45)):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3
        for name in FORMATS:
            for search in ("mse", "max"):
                codec = vb.FP4Codec(name, scale_search=search)
                codes, scale = codec.encode(w)
                packed = vb.quantize(w.bfloat16(), name, search)
                result = [codes, codec.decode(codes, scale), packed.tensors(), packed.dequantize()]
                yield f"{name}-{search}-{'x'.join(map(str, shape))}", result
