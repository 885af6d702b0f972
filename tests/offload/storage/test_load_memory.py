"""Loading a folder takes the host's memory once: what the levels hold, and no second copy, neither read nor mapped."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from safetensors.torch import save_file

from vblackwell.folders.weights import build_on_meta

MIB = 1 << 20
FAST_MIB = 32
LOAD = """
import sys
from pathlib import Path
import torch
import transformers.conversion_mapping, transformers.models.llama.modeling_llama
import vblackwell as vb

def memory(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10

fast_mb, host_mb = map(int, sys.argv[2:])
levels = [{"device": "arena", "capacity_mb": fast_mb}, {"device": "cpu", "capacity_mb": host_mb}]
stack = vb.VGPUStack({"levels": levels})
load = vb.load_causal_lm
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
model = load(sys.argv[1], stack, dtype=torch.bfloat16, trainable=False, placement="streamed")
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not reset peaks")
def test_the_host_never_holds_a_second_copy(program, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    config.save_pretrained(tmp_path)
    model = build_on_meta(tmp_path, torch.bfloat16)
    save_file(
        {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()},
        tmp_path / "model.safetensors",
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 100 * MIB
    taken = int(program(LOAD, str(tmp_path), str(FAST_MIB), str(int(1.1 * size) // MIB)))
    # RAM is taken in slabs, here at most a tenth more than the weights. Level 0 comes on top; 16 MiB are for modules
    # that load at their first use. A copy, or a mapping of the file, would add `size`.
    assert size <= taken <= 1.1 * size + (FAST_MIB + 16) * MIB
