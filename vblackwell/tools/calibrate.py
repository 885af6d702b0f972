"""An assignment of precisions for a folder's model, from text: what ``vb quantize --budget`` packs by.

The model is opened whole, in its own type, where it will be measured; windows of the text go through it twice for each
linear, in nvfp4 and in two parts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vblackwell.data.corpus import prepare_data
from vblackwell.data.dataset import PackedDataset
from vblackwell.errors import ConfigurationError
from vblackwell.folders.checked import LIMITS
from vblackwell.folders.folder import read_config
from vblackwell.generate.load import load_model
from vblackwell.nn.convert.assignment import DEFAULT_BUDGET, Assignment, assign_precision
from vblackwell.nn.convert.linears import HEAD

_BATCH = 4


def calibrate(
    folder: Path, data: Path | None, budget: float | None, max_bits: float | None = None, *, sequences: int = 16,
    seq_length: int = 256, pattern: str = "all", keep: str = HEAD, device: torch.device | str = "cpu",
) -> Assignment:  # fmt: skip
    """The cheapest assignment within ``budget``, or the best of at most ``max_bits``.

    Args:
        folder: a Hugging Face folder with its tokenizer.
        data: text, jsonl or parquet; None: the Python standard library's sources.
        budget: relative rise of the loss on this text; None: 0.004.
        sequences, seq_length: windows of the text, no longer than the model takes.
        pattern, keep: which linears, as for `select_linears`.

    Raises:
        ConfigurationError: no tokenizer, too little text, or as `assign_precision`.
        FolderMismatch, CorruptData, Unsupported: the folder's files are not those of its config.json, or cannot be
            opened.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{folder} has no tokenizer.json: calibration needs the model's own tokenizer")
    config = read_config(folder)
    limit = next((config[name] for name in LIMITS if isinstance(config.get(name), int)), seq_length)
    corpus, length = prepare_data(data, folder), min(seq_length, limit)
    if len(corpus.tokens) < 2 * (length + 1):
        raise ConfigurationError(
            f"{corpus.name} has {len(corpus.tokens)} tokens: calibration needs at least {2 * (length + 1)}; give more "
            "text"
        )
    windows = PackedDataset(corpus, length)
    count = min(sequences, len(windows))
    model = load_model(folder, device).eval()
    drawn = [windows.batch(np.arange(start, min(start + _BATCH, count))) for start in range(0, count, _BATCH)]
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]
    allowed = DEFAULT_BUDGET if budget is None else budget
    return assign_precision(model, batches, allowed, max_bits=max_bits, pattern=pattern, keep=keep)
