"""A folder of random weights in Llama's shape, written as fast as the file system takes them, and the rates of the
machine.

Numbers are drawn on the GPU, and a few threads write files: sharded safetensors with an index, as a hub's folders are.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from safetensors.torch import save_file

from benchmarks.lib.child_process import answer, say
from benchmarks.lib.generate.case import INDEX, Case, Shape
from benchmarks.lib.kernels.graph_timing import median_us

THREADS = 8
SPREAD = 0.02


def config_of(shape: Shape, dtype: str) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads or shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
    }


def shards_of(shape: Shape) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the tensors, file by file: one a layer, and one for the rest."""
    width, inner = shape.hidden_size, shape.intermediate_size
    keys = width // shape.num_heads * (shape.num_kv_heads or shape.num_heads)
    yield [
        ("model.embed_tokens.weight", (shape.vocab_size, width)),
        ("model.norm.weight", (width,)),
        ("lm_head.weight", (shape.vocab_size, width)),
    ]
    for layer in range(shape.num_layers):
        sizes = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        yield [(f"model.layers.{layer}.{name}.weight", size) for name, size in sizes.items()]


def write_folder(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> int:
    """Bytes of the weights that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config_of(shape, name), indent=2))
    shards = list(shards_of(shape))
    weight_map = {}
    with ThreadPoolExecutor(min(THREADS, len(shards))) as pool:
        jobs = []
        for number, tensors in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {tensor: file for tensor, _ in tensors}
            jobs.append(pool.submit(_write_shard, folder / file, tensors, dtype, device, seed + number))
        total = sum(job.result() for job in jobs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))  # last: it says that the folder is whole
    return total


def _write_shard(
    path: Path, tensors: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device, seed: int
) -> int:
    generator, drawn = torch.Generator(device).manual_seed(seed), {}
    for name, shape in tensors:
        empty = torch.empty(shape, dtype=dtype, device=device)
        drawn[name] = (empty.fill_(1.0) if len(shape) == 1 else empty.normal_(0.0, SPREAD, generator=generator)).cpu()
    save_file(drawn, path)
    return sum(tensor.nbytes for tensor in drawn.values())


def link_gbps(device: torch.device) -> float:
    """GB/s from registered RAM to the GPU, in copies of 64 MiB."""
    from vblackwell.memory.host import map_slab

    host = map_slab(1 << 30, pin=True)
    there, piece = torch.empty(64 << 20, dtype=torch.uint8, device=device), 64 << 20

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, 1 << 30, piece):
            there.copy_(host[start : start + piece], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return (1 << 30) / statistics.median(once() for _ in range(5)) / 1e9


def hbm_gbps(device: torch.device) -> float:
    """GB/s of a copy inside the GPU, read and written bytes."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)  # the first does not count
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), 5) / 1e3


def make(case: Case) -> None:
    """Write the folder of ``case`` and tell the machine's rates."""
    device, began, folder = torch.device(case.device), time.perf_counter(), Path(case.folder)
    if (folder / INDEX).is_file():
        say("phase", text="the folder is there")
    else:
        num_bytes = write_folder(folder, case.sizes, getattr(torch, case.dtype), device, case.seed)
        say("phase", text=f"{num_bytes / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s")
    rates = {"link_gbps": link_gbps(device), "hbm_gbps": hbm_gbps(device)} if device.type == "cuda" else {}
    if rates:
        say("rates", rates=rates)


if __name__ == "__main__":
    answer(lambda argument: make(Case.from_json(argument)))
