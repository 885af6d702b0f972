"""A 6.7B Llama of transformers, packed as a user packs it: what packing takes, and what its decoding takes by a plain
loop, eager, next to the same loop in bf16.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import vblackwell as vb
from benchmarks.lib.results import goal_header, goal_line, tell
from vblackwell.nn.convert.linears import find_linears

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
PROMPT, SKIPPED, COUNTED = 128, 8, 40  # tokens
FORMAT = "nvfp4"


def llama(layers: int) -> Any:
    """On the GPU, in bf16, with drawn weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES | {"num_hidden_layers": layers}, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).cuda()  # whose buffers are computed, not drawn
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.ones_(param)
    return model


@torch.no_grad()
def decode_ms(model: Any) -> float:
    """Median milliseconds of a token, one text, greedy, nothing captured; each token is waited for."""
    out = model(torch.arange(PROMPT, device="cuda")[None], use_cache=True)
    times: list[float] = []
    for _ in range(SKIPPED + COUNTED):
        began = time.perf_counter()
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[SKIPPED:])


def pack_seconds(weights: list[Tensor]) -> float:
    """Of weights in RAM, packed on the GPU by default and held there."""
    held = [vb.quantize(weights[0].cuda(), FORMAT)]  # what is loaded once
    torch.cuda.synchronize()
    began = time.perf_counter()
    held += [vb.quantize(weight.cuda(), FORMAT) for weight in weights]
    torch.cuda.synchronize()
    return time.perf_counter() - began


def bench_models(layers: int = SIZES["num_hidden_layers"]) -> list[str]:
    """Prints what it finds, and last the lines with floors and aims."""
    model = llama(layers)
    names = [name for name, reason in find_linears(model).items() if reason is None]
    weights = [model.get_submodule(name).weight.detach().cpu() for name in names]
    gigabytes = sum(weight.nbytes for weight in weights) / 1e9
    took = pack_seconds(weights)
    tell(f"packing {len(weights)} weights of {gigabytes:.1f} GB from RAM", f"{took:.2f} s")
    weights.clear()
    dense = decode_ms(model)
    vb.convert(model, pack=True)
    packed = decode_ms(model)
    tell("a token of a plain loop, eager", f"bf16 {dense:.2f} ms, {FORMAT} {packed:.2f} ms")
    return [
        goal_header("one Llama of 6.7B"),
        goal_line("packed from RAM, 12 s over it", 12 / took, 1.0, 12 / 5),
        goal_line("eager decoding, one text, over bf16", dense / packed, 1.0, 1.5),
    ]
