"""What `vb estimate` advises for a small decoder:
numbers of real traces, costs next to them, memory first where it is missing.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes, find_gpu
from vblackwell.nn.convert.causal_lm import is_accelerated
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.planner import memory_estimate, model_spec
from vblackwell.planner.estimate.command import advice_of, estimate_command, with_fused_step
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.forecast import PLENTY, estimate_offload
from vblackwell.planner.memory_estimate import Run, estimate_trace
from vblackwell.planner.model_spec import of_config, of_decoder
from vblackwell.trace.trace import Trace
from vblackwell.units import GiB, MiB, format_bytes


@functools.cache
def small_run() -> tuple[Run, Trace]:
    """A small decoder on an RTX 3070, and its trace of 16 sequences."""
    run = Run(of_decoder("decoder", DecoderConfig(512, 256, 704, 4, 4, max_position=256)), 256, capability=(8, 6))
    return run, run.trace(16)


def test_every_line_is_a_difference_between_two_traces():
    run, trace = small_run()
    memory = estimate_trace(trace, run.capability)
    estimated = Estimated(run, 16, trace, memory, find_gpu("RTX 3070"), GiB, False)
    found = {each.change: each for each in advice_of(estimated)}
    checkpointed = estimate_trace(replace(run, checkpointing=True).trace(16), run.capability)
    advice = found["--gradient-checkpointing"]
    assert advice.saved_bytes == memory.peak_p50 - checkpointed.peak_p50 > 0
    assert advice.saved_time is not None and advice.saved_time < 0 and "more time" in advice.cost
    assert found["--precision bf16"].saved_bytes > 0 and "fp32 masters" in found["--precision bf16"].cost
    assert "--batch-size 8 --accumulation-steps 2" in found
    assert all(change.startswith(("--", "vb ", "vb.", "torch.", "PYTORCH_")) for change in found)  # what is typed
    saved = [each.saved_bytes for each in advice_of(estimated)]
    assert saved == sorted(saved, reverse=True)


def test_a_stack_that_needs_checkpointing_is_advised_with_it():
    run, trace = small_run()
    roomy = estimate_offload(run, trace, 16, GiB << 4, PLENTY, 0)
    tight = context_bytes(run.capability) + RUNTIME_BYTES + roomy.step + MiB  # a megabyte in addition to activations
    stack = estimate_offload(run, trace, 16, tight, PLENTY, 0)
    assert stack.refused is not None and "of GPU memory" in stack.refused
    estimated = Estimated(run, 16, trace, estimate_trace(trace, run.capability), None, tight, False, stack=stack)
    advice = next(each for each in advice_of(estimated) if "offload stack" in each.change)
    assert "--gradient-checkpointing" in advice.change and advice.saved_bytes > 0
    assert "more operations" in advice.cost and "of RAM" in advice.cost
    assert not any("offload stack" in each.change for each in advice_of(estimated, below=(MiB, 0)))


def test_a_stack_has_fused_operators_as_it_runs(tmp_path, capsys):
    """A vocabulary of 32,000 words over a small model: whole logits fill the card, and a stack never makes them."""
    fields = {
        "model_type": "qwen2", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    run = Run(of_config(fields, "small", 512), 512, precision="bf16", capability=(8, 6))
    trace = run.trace(8)
    memory = estimate_trace(trace, run.capability)
    half = memory.peak_p50 // 2
    assert estimate_offload(run, trace, 8, half, PLENTY, 0).refused is not None
    stack = estimate_offload(run.fused, run.fused.step(8), 8, half, PLENTY, 0)
    estimated = Estimated(run, 8, trace, memory, None, half, False, stack=stack)
    found = {each.change: each for each in advice_of(estimated)}
    assert (
        found["vb.accelerate_causal_lm(model)"].saved_bytes > 8 * 512 * 32000 * 4
    )  # one copy of them in fp32, and more
    streamed = found["vb train --vgpu-auto (an offload stack)"]
    assert memory.peak_p50 - streamed.saved_bytes <= half and "of RAM" in streamed.cost
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    assert not estimate_command(str(path), None, format_bytes(half), 8, 512, precision="bf16")
    assert "with an offload stack: " in capsys.readouterr().out


def test_what_is_done_already_is_not_advised():
    spec = of_decoder("decoder", DecoderConfig(512, 64, 128, 2, 2, max_position=64))
    run = Run(spec, 64, "adamw-fused", "bf16", checkpointing=True, expandable=True)
    trace = run.trace(1)
    assert advice_of(Estimated(run, 1, trace, estimate_trace(trace), None, GiB, False)) == ()


def test_a_fused_step_as_it_is_traced():
    run = Run(of_decoder("decoder", DecoderConfig(512, 512, 1408, 2, 8, max_position=64)), 64)
    ours, theirs = with_fused_step(run.trace(1)), replace(run, optimizer="adamw-fused").trace(1)
    both = [estimate_trace(trace) for trace in (ours, theirs)]
    counts = len(list(run.model.parameters()))  # of steps, which a fused AdamW keeps on the GPU, in blocks of 512 bytes
    assert both[1].allocated - both[0].allocated == 512 * counts and both[0].reserved == both[1].reserved
    # The peak is in the step: foreach makes a copy of everything there.
    assert estimate_trace(run.trace(1)).allocated - both[0].allocated > 3 * run.trace(1).num_parameters
    assert sum(each.num_bytes for each in ours.work if each.phase == "optimizer") == 28 * ours.trainable


def test_an_estimate_with_advice_builds_and_traces_nothing_twice_and_starts_no_process(monkeypatch, capsys, tmp_path):
    """One module, and a step of each way: recomputed layers, fused operators, autocast and half the batch change the
    order of what is allocated, or sizes that are not all affine in the batch; all the rest is arithmetic on these.
    And torch and its libraries have threads, which a forked child lacks while it has their locks."""

    def refused(*args: object, **kwargs: object) -> int:
        pytest.fail("vb estimate started a process")

    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(subprocess, "Popen", refused)
    counts = Counter[Any]()

    def counted(owner: Any, name: str, key: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        def count(*args: Any, **options: Any) -> Any:
            counts[name, key(*args)] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, count)

    counted(model_spec, "build_causal_lm", lambda fields, source, dtype: dtype)
    counted(memory_estimate, "fuse", lambda *args: None)

    def way(run: Run, batch_size: int) -> tuple[Any, ...]:
        assert not is_accelerated(run.model)  # before and after each of them
        return run.precision, run.checkpointing, run.fuses, batch_size

    counted(Run, "trace", way)
    fields = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    assert not estimate_command(str(path), None, "900MiB", 8, 1024)
    out = capsys.readouterr().out
    assert "does not fit" in out and "--gradient-checkpointing" in out
    traces = [("fp32", False, False, 8), ("fp32", True, False, 8), ("fp32", False, True, 8), ("fp32", True, True, 8)]
    traces += [("autocast", False, False, 8), ("fp32", False, False, 4)]
    expected: dict[Any, int] = {("trace", key): 1 for key in traces}
    largest = {key: 1 for key in counts if key[0] == "trace" and key[1][3] not in (4, 8)}  # of one to three sequences
    expected |= largest | {("build_causal_lm", torch.float32): 1, ("fuse", None): 2}
    assert counts == expected
