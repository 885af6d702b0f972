"""Sampling a token a row: the Gumbel-max kernels beside softmax and ``torch.multinomial``.

``python benchmarks/bench_sampling.py`` on a CUDA GPU: 256 rows of 128,000 logits, bf16 and fp32, times as medians of CUDA-graph replays
(softmax + multinomial: of calls, since a graph cannot hold what waits), ratios in the same run. First the kernels must draw
what the reference draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_ops import time_us
from graph_timing import median_us

from vblackwell.kernels.pointwise.sampling import sample_tokens
from vblackwell.kernels.runtime.registry import use_backend

ROWS, VOCABULARY = 256, 128_000
FLOOR, AIM = 2.5, 4.0


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    seeds = torch.arange(ROWS, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        logits = (
            torch.randn(ROWS, VOCABULARY, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 3
        ).to(dtype)
        with use_backend("sampling", "torch"):
            expected = sample_tokens(logits[:16], seeds[:16])
        assert (sample_tokens(logits, seeds)[:16] != expected).sum() <= 1, "the kernels draw something else"

        def eager(logits: torch.Tensor = logits) -> torch.Tensor:
            return torch.multinomial(logits.float().softmax(-1), 1)

        for _ in range(3):
            eager()
        theirs = median_us(eager, 30)
        for options in ({}, {"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}):
            ours = time_us(lambda logits=logits, options=options: sample_tokens(logits, seeds, **options))
            goal = f" floor {FLOOR} aim {AIM}" if not options else ""
            print(
                f"{dtype} {options!s:24} {ours:8.1f} us, softmax + multinomial {theirs:8.1f} us: {theirs / ours:.2f}{goal}"
            )


if __name__ == "__main__":
    main()
