"""The examples run as they stand, and are short enough to read."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run_example(place, name: str, alone: bool = False) -> str:
    """What the example prints; it must end well, and be short.
    ``alone``: not forked, so that Python's own end is met too.
    """
    path = EXAMPLES / name
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    # Levels are sized by the machine: what is stated is at most a few MiB of level 0, for the small models.
    (sizes,) = re.findall(r"create_vgpu_stack\((.*)\)", text)
    assert "VGPUStack" not in text and all(float(size) <= 4 for size in re.findall(r"([\d.]+)MiB", sizes))
    assert not re.search(r"capacity_mb|GiB|\dGB", text)
    assert not re.search(r"\barena\b|level 0", text), "words of the package, which nobody knows who has not read it"
    if not alone:
        return place.vb(str(path)).stdout
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=place.folder,
        env=place.environment(),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses_of(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", output)]


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_train_own_module(alone, place):
    output = run_example(place, "train_own_module.py", alone)
    losses = losses_of(output)
    assert losses[1] < losses[0] / 4
    (held,) = re.findall(r"fast memory held at most (\d+) bytes", output)
    assert 0 < int(held) <= 1 << 20


def test_train_from_scratch(place):
    output = run_example(place, "train_from_scratch.py")
    first, last = losses_of(output)
    assert last < 0.7 * first and abs(first - math.log(256)) < 0.2, "random weights know nothing of 256 bytes"
    path = place.folder / "from-scratch" / "model.safetensors"
    (held,) = re.findall(r"fast memory held at most (\d+) bytes", output)
    assert 0 < int(held) <= 4 * path.stat().st_size / 8, "weights, gradients and two moments, all fp32"
    trained = transformers.AutoModelForCausalLM.from_pretrained(path.parent)
    ids = torch.tensor([list(b"    def decode(self, s):\n        if not isinstance(s, str):\n")])
    with torch.no_grad():
        assert float(trained(input_ids=ids, labels=ids).loss) < 0.7 * first


def test_finetune_folder(place):
    first, last = losses_of(run_example(place, "finetune_folder.py"))
    assert last < 0.75 * first
    tuned = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "tiny-qwen3-tuned")
    tokens = torch.arange(96).view(4, 24)
    with torch.no_grad():
        loss = float(tuned(input_ids=tokens, labels=tokens).loss)
    assert loss < last + 0.01, "what was saved is one step further than the last loss that was shown"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_over_fp4(place):
    first, last = losses_of(run_example(place, "adapters_over_fp4.py"))
    assert last < 0.75 * first
    base = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "tiny-llama", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, place.folder / "tiny-llama-adapted")
    merged = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "tiny-llama-adapted-merged")
    tokens = torch.arange(96).view(4, 24)
    with torch.no_grad():
        losses = [float(model.eval()(input_ids=tokens, labels=tokens).loss) for model in (merged, adapted)]
    assert losses[0] < last + 0.05, "what was saved is one step further than the last loss that was shown"
    assert abs(losses[1] - losses[0]) < 0.2, "over the unrounded base the adapter does nearly the same"


def test_distil(place):
    output = run_example(place, "distil.py")
    first, last = losses_of(output)
    assert last < first / 4
    teacher, student, before = (
        transformers.AutoModelForCausalLM.from_pretrained(place.folder / name)
        for name in ("tiny-teacher", "distilled", "tiny-student")
    )
    ids = torch.arange(192).view(8, 24) % 128
    with torch.no_grad():
        wanted, got, was = (model(input_ids=ids).logits.log_softmax(-1) for model in (teacher, student, before))
    left, had = (float((wanted.exp() * (wanted - said)).sum(-1).mean()) for said in (got, was))
    assert abs(had - first) < 1e-3 and left < last, (
        "what was saved is one step further than the last loss that was shown"
    )
    (held,) = re.findall(r"fast memory held at most (\d+) bytes", output)
    assert 0 < int(held) < (place.folder / "tiny-student" / "model.safetensors").stat().st_size


def test_generate(place):
    output = run_example(place, "generate.py")
    assert output.startswith("Once") and len(output.split("\nlevel 0")[0]) > 10
    (held,) = re.findall(r"fast memory held at most (\d+) bytes", output)
    size = sum(path.stat().st_size for path in (place.folder / "tiny-gpt").glob("*.safetensors"))
    assert 0 < int(held) <= 4 << 20 < size


def test_trainer(place):
    logged = re.findall(r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", run_example(place, "trainer.py"))
    losses = [float(loss) for loss, _ in logged]
    assert losses[-1] < 0.75 * losses[0] and max(float(norm) for _, norm in logged) > 1.0
    (checkpoint,) = (place.folder / "tiny-llama-trained").glob("checkpoint-*")
    trained = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = torch.arange(96).view(4, 24)
    with torch.no_grad():
        assert float(trained(input_ids=tokens, labels=tokens).loss) < losses[-1] + 0.05  # the mean of all four rows


def test_accelerate_loop(place):
    output = run_example(place, "accelerate_loop.py")
    first, last = losses_of(output)
    assert last < 0.75 * first
    (held,) = re.findall(r"fast memory held at most (\d+) bytes", output)
    size = (place.folder / "tiny-gpt2-state" / "model.safetensors").stat().st_size
    assert 0 < int(held) < 0.9 * size


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested
