"""The examples run as they stand, and are short enough to read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
import transformers

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run_example(place, name: str) -> str:
    """What the example prints; it must end well, and be short."""
    path = EXAMPLES / name
    assert len(path.read_text().splitlines()) <= 40
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=place.folder,
        env=place.environment(),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses_of(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", output)]


def test_train_own_module(place):
    output = run_example(place, "train_own_module.py")
    losses = losses_of(output)
    assert losses[1] < losses[0] / 4
    (held,) = re.findall(r"level 0 held at most (\d+) bytes", output)
    assert 0 < int(held) <= 1 << 20


def test_finetune_folder(place):
    first, last = losses_of(run_example(place, "finetune_folder.py"))
    assert last < 0.75 * first
    tuned = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "tiny-qwen3-tuned")
    tokens = torch.arange(96).view(4, 24)
    with torch.no_grad():
        loss = float(tuned(input_ids=tokens, labels=tokens).loss)
    assert loss < last + 0.01, "what was saved is one step further than the last loss that was shown"


def test_every_example_has_a_test():
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == ["finetune_folder.py", "train_own_module.py"]
