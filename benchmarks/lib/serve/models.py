"""Folders of random weights in Llama 3's sizes, with a token's text for each number; the machine's rates."""

from __future__ import annotations

import json
import os
import statistics
import time
from itertools import chain, islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.lib.generate.folder import hbm_gbps, link_gbps, write_folder
from benchmarks.lib.offload.case import Shape
from vblackwell.offload.layout.generation import MIN_WORKSPACE

SHAPES = {  # Llama 3.1 8B, and Llama 3.2 1B with a separate head
    "8B": Shape(4096, 14336, 32, 32, 128256, 8),
    "1B": Shape(2048, 8192, 16, 32, 128256, 8),
    "tiny": Shape(64, 160, 2, 4, 512, 2),
}
POSITIONS = 8192
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """A text for each token, so that a stream has something to send for it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pairs = ["".join(pair) for pair in product(plain, repeat=2)]
    words = chain(letters, pairs, map("".join, product("Ġ", plain, pairs)))
    texts = {text: place for place, text in enumerate(islice(words, vocab_size))}
    tokenizer = Tokenizer(models.BPE(texts, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_model(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> int:
    """Bytes of the weights. Nothing ends a text, so that it is as long as was asked for."""
    num_bytes = write_folder(folder, shape, dtype, device, seed)
    file = folder / "config.json"
    changed = {"max_position_embeddings": POSITIONS, "rope_theta": 500000.0, "eos_token_id": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed, indent=2))
    tokenizer_of(shape.vocab_size).save(str(folder / "tokenizer.json"))
    return num_bytes


def same_again(folder: Path, copy: Path) -> Path:
    """Another folder with the same files, which takes no space; a fleet sees another model in it."""
    copy.mkdir()
    for file in folder.iterdir():
        os.link(file, copy / file.name)
    return copy


def budget_for(num_bytes: int, device: torch.device) -> int:
    """Level 0 that leaves so many bytes next to what a pass computes in (`workspace_bytes`)."""
    return max(-(-num_bytes * 8 // 7), num_bytes + MIN_WORKSPACE) if device.type == "cuda" else num_bytes


def rates(device: torch.device) -> dict[str, float]:
    """Bytes a second from RAM to level 0, and of level 0's memory, read and written; on a CPU both are a copy's."""
    if device.type == "cuda":
        found = {"link": link_gbps(device) * 1e9, "memory": hbm_gbps(device) * 1e9}
        torch.cuda.empty_cache()
        return found
    source = torch.zeros(32 << 20, dtype=torch.uint8)
    target, times = source.clone(), []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    copied = source.nbytes / statistics.median(times)
    return {"link": copied, "memory": 2 * copied}
