"""``vb generate``: opens what the path means and writes the text to standard output as it comes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from vblackwell.artifacts.folder import read_tokenizer
from vblackwell.infer.generate import generate
from vblackwell.infer.load import load_model, resolve_model


def generate_command(
    model: str,
    prompt: str,
    max_new_tokens: int | None = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    min_p: float = 0.0,
) -> int:
    """Prints the prompt and what follows it; checkpoints that were passed over are named on standard error.

    Args:
        model: a run folder of ``vb train``, one of its checkpoints, or a Hugging Face folder.
        device: where to compute; the others as in ``generate``.

    Raises:
        VBError: no model there, a damaged one, or options out of range.
    """
    resolved = resolve_model(Path(model))
    for problem in resolved.problems:
        print(f"passed over: {problem}", file=sys.stderr)
    tokenizer = read_tokenizer(resolved.folder)
    opened = load_model(resolved.folder, device)
    pieces = [prompt]

    def show(text: str) -> None:
        print("".join(pieces) + text, end="", flush=True)
        pieces.clear()  # the prompt comes with the first text: an error before it leaves standard output empty

    generate(opened, tokenizer, prompt, max_new_tokens, temperature, top_k, top_p, seed, on_token=show, min_p=min_p)
    print("".join(pieces))
    return 0
