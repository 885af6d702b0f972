"""The same requests by transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.serve.asking import Late
from vblackwell.serve.request import Request

CPU_PAGES, CPU_TOKENS = 64, 256  # each of 256 positions; of a pass


@torch.no_grad()
def continuous_batching(
    folder: Path, dtype: torch.dtype, device: torch.device, runs: Sequence[Sequence[Request]], seconds: float
) -> tuple[list[float], str]:
    """New tokens a second of each run, and the attention that it ran with; to open the model, make its pages and
    capture its graphs does not count. Each request has its own length, where `generate_batch` takes one for all. Raises
    Late, RuntimeError for a text that is not whole, or whatever transformers raises."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.continuous_api import WorkloadHints

    end = time.perf_counter() + seconds
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    longest = max(request.max_new_tokens for run in runs for request in run)
    given = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=longest)
    most = max(len(request.tokens) for run in runs for request in run)
    hints = WorkloadHints(max_prompt_length=most, max_generated_length=longest, num_requests=len(runs[0]))
    # It takes what is free: of a GPU that is ours to give, of RAM it is not.
    sizes = {} if device.type == "cuda" else {"num_blocks": CPU_PAGES, "max_batch_tokens": CPU_TOKENS}
    pages = ContinuousBatchingConfig(**sizes)
    rates = list[float]()
    with model.continuous_batching_context_manager(
        generation_config=given, continuous_batching_config=pages, block=True, timeout=30, workload_hints=hints
    ) as manager:
        for number, run in enumerate(runs):
            began, left = time.perf_counter(), {f"{number}-{place}": text for place, text in enumerate(run)}
            for name, text in left.items():
                manager.add_request([*text.tokens], request_id=name, max_new_tokens=text.max_new_tokens)
            while left:
                if time.perf_counter() > end:
                    raise Late(f"{len(left)} of {len(run)} texts were not over after {seconds:.0f} s")
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")
                if result is None or not result.is_finished():
                    continue
                text = left.pop(result.request_id)
                if result.error is not None or len(result.generated_tokens) != text.max_new_tokens:
                    raise RuntimeError(f"a text of {len(result.generated_tokens)} tokens: {result.error}")
            rates.append(sum(text.max_new_tokens for text in run) / (time.perf_counter() - began))
    return rates, model.config._attn_implementation
