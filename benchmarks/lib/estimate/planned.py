"""Drawn runs of ``vb train --vgpu-auto``: what each was promised, as its own report compares it with what it took.

A run trains a model of transformers from a folder of random weights, as a user types it: all weights or adapters, over
bf16 or FP4, with moments in fp32 or 8 bits, with clipping off, never needed, or in every step, under a cap on the whole
process.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.child_process import run_child
from benchmarks.lib.estimate.report import Row, relative, spread
from benchmarks.lib.offload.case import Shape
from benchmarks.lib.offload.draw import ON_CPU, ON_GPU, drawn_shape, streamed_bytes
from benchmarks.lib.offload.systems import hf_config
from vblackwell.units import GiB, format_bytes

COMMAND = Path(__file__).with_name("command.py")
STEPS = 16  # the first ones find what later ones have
KINDS = ((), (), ("--optimizer-states", "8bit"), ("--lora", "16"), (), ("--lora", "16", "--use-fp4"))
NORMS = {"no clipping": "0", "never clips": "1e9", "always clips": "1e-6"}
CAPS = (8 * GiB, 12 * GiB, 16 * GiB, 24 * GiB)
LARGE = replace(ON_GPU, parameters=(0.3e9, 2e9), tokens=(4096, 32768))
# In the median, of nine in ten, and at worst; a step's seconds of runs that clip and of others alike.
FLOORS = {"gpu": (0.02, None, 0.10), "host": (None, None, None), "step": (0.07, 0.18, None)}
WORDS = {"gpu": "reserved of the GPU, or of the arena", "host": "RAM level", "step": "seconds of a step"}


@dataclass(frozen=True)
class PlannedRun:
    """One command; ``clipping``: of `NORMS`; ``flags``: of `KINDS`."""

    number: int
    shape: Shape
    seq: int
    batch: int
    cap_bytes: int
    flags: tuple[str, ...]
    clipping: str

    @property
    def name(self) -> str:
        """Short enough for a table."""
        shape, kind = self.shape, " ".join(self.flags).replace("--", "").replace("optimizer-states ", "")
        size = f"{shape.num_parameters / 1e9:.2f}G" if shape.num_parameters > 1e8 else f"{shape.num_parameters:,}"
        words = (
            f"{shape.family} {size} {kind or 'all weights'}, {self.batch}x{self.seq}, {format_bytes(self.cap_bytes)}"
        )
        return f"{self.number:03d} {words}, {self.clipping}"

    def words(self, model: Path, data: Path, out: Path, device: str) -> list[str]:
        """What a user types."""
        sizes = ["--seq-length", str(self.seq), "--batch-size", str(self.batch), "--fast-memory", f"{self.cap_bytes}B"]
        steps = ["--max-steps", str(STEPS), "--checkpoint-every", "0", "--sample-tokens", "0", "--eval-sequences", "2"]
        how = ["--precision", "bf16", "--max-grad-norm", NORMS[self.clipping], "--learning-rate", "1e-4"]
        places = ["--model", str(model), "--data", str(data), "--out", str(out), "--device", device]
        return ["train", "--vgpu-auto", *places, *sizes, *how, *steps, *self.flags]


def draw_runs(count: int, seed: int, *, on_gpu: bool) -> list[PlannedRun]:
    """``count`` runs, each kind and each clipping as often as others; tiny ones for a CPU."""
    draw, scale = random.Random(seed), LARGE if on_gpu else ON_CPU
    found: list[PlannedRun] = []
    while len(found) < count:
        number = len(found)
        flags = KINDS[number % len(KINDS)]
        shape = drawn_shape(draw, scale)
        if "--use-fp4" in flags and shape.family == "gpt2":
            shape = replace(shape, family="llama", positions=0)  # whose linears are packed
        seq = draw.choice(scale.sequences)
        batch = max(1, round(draw.uniform(*scale.tokens) / seq))
        if shape.family == "gpt2":
            shape = replace(shape, positions=seq)
        shape = replace(shape, vocab_size=max(shape.vocab_size, 260))  # the tokenizer's
        least = streamed_bytes(shape, batch * seq, scale.fixed)
        rooms = [cap for cap in CAPS if cap > 1.1 * least] if on_gpu else [int(draw.uniform(1.5, 4) * least)]
        if rooms:
            clipping = list(NORMS)[(number + number // len(KINDS)) % len(NORMS)]
            found.append(PlannedRun(number, shape, seq, batch, draw.choice(rooms), flags, clipping))
    return found


def write_model(run: PlannedRun, folder: Path) -> Path:
    """A folder of the run's model with random weights in bf16, and a tokenizer of bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM

    path = folder / "model"
    path.mkdir()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config(run.shape, run.seq))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    noise = torch.empty(1 << 22, dtype=torch.bfloat16)
    noise.normal_(0, 0.02, generator=torch.Generator().manual_seed(run.number))

    def filled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return torch.full(tensor.shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16)
        return noise.repeat(-(-tensor.numel() // noise.numel()))[: tensor.numel()].view(tensor.shape)

    named = model.named_parameters()  # tied ones once
    save_file(
        {name: filled(name, parameter) for name, parameter in named}, path / "model.safetensors", {"format": "pt"}
    )
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_data(run: PlannedRun, folder: Path) -> Path:
    """Text of lower letters, enough for the run."""
    path, draw = folder / "data.txt", random.Random(run.number)
    count = (STEPS + 4) * run.seq * run.batch + 64 * run.seq
    path.write_text("".join(draw.choices("etaoin shrdlu\n", k=count)), encoding="ascii")
    return path


def measure_run(run: PlannedRun, device: str, limit_seconds: float) -> dict[str, Any]:
    """The comparison of a run's report, what its plan chose, whether it began anew with smaller forwards, and how long
    all of it took; with an ``error`` where the command failed or took too long."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vb-planned-") as name:
        folder, out = Path(name), Path(name) / "run"
        words = run.words(write_model(run, folder), write_data(run, folder), out, device)
        printed = folder / "printed"
        case = json.dumps({"words": words, "printed": str(printed)})
        code = run_child(COMMAND, case, limit_seconds - (time.monotonic() - began), lambda event: None, print)
        if code is None:
            return {"error": f"stopped after {limit_seconds:.0f} s"}
        lines = printed.read_text(encoding="utf-8").splitlines()
        if code:
            return {"error": f"exit code {code}: {' '.join(lines[-1:])[:300]}"}
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    again = any("out of memory with" in line for line in lines)
    found = report["plan"] | {"again": again, "seconds": time.monotonic() - began}
    return found | {"held": device == "cpu" or report["gpu_peak_bytes"]["reserved"] <= run.cap_bytes}


def planned_rows(runs: Sequence[PlannedRun], answers: dict[str, dict[str, Any]]) -> list[Row]:
    """One row a run."""
    rows: list[Row] = []
    for run in runs:
        found = answers.get(run.name, {"error": "not run"})
        row: Row = {"case": run.name, "clipping": run.clipping, "error": found.get("error", "")}
        if not row["error"]:
            tokens = run.seq * run.batch
            gpu, host, speed = (found[name] for name in ("gpu_bytes", "host_bytes", "tokens_per_second"))
            row |= {"predicted_gpu": gpu["predicted"], "gpu": gpu["measured"]}
            row |= {"predicted_host": host["predicted"], "host": host["measured"]}
            row |= {f"{of}step": tokens / speed[said] for of, said in (("predicted_", "predicted"), ("", "measured"))}
            row |= {name: found[name] for name in ("choice", "clipped_share", "again", "held", "seconds")}
        rows.append(row | {"run": json.dumps(asdict(run))})
    return rows


def planned_lines(rows: Sequence[Row]) -> list[str]:
    """A line a run, then medians, nine in ten and worst, with their floors."""
    lines = [f"{'planned run, off by':<78}{'GPU':>8}{'RAM':>8}{'step':>8}{'clips':>7}  plan"]
    for row in rows:
        if row["error"]:
            lines.append(f"{row['case'][:77]:<78}{row['error']}")
            continue
        offs = [relative(row, f"predicted_{of}", of) for of in FLOORS]
        cells = "".join(f"{'-' if off is None else f'{off:+.1%}':>8}" for off in offs)
        marks = " BEGAN AGAIN" * row["again"] + " OVER THE CAP" * (not row["held"])
        lines.append(f"{row['case'][:77]:<78}{cells}{row['clipped_share']:>7.0%}  {row['choice']}{marks}")
    lines += ["", f"{'relative error':<50}{'median':>8}{'P90':>8}{'worst':>8}"]
    ran = [row for row in rows if not row["error"]]
    for clipping in ("", *NORMS):
        mine = [row for row in ran if clipping in ("", row["clipping"])]
        for of, floors in FLOORS.items() if not clipping else {"step": FLOORS["step"]}.items():
            found = spread(mine, f"predicted_{of}", of)
            title = WORDS[of] + f", {clipping}" * bool(clipping)
            if found is None:
                lines.append(f"{title:<50}    none")
                continue
            missed = any(floor is not None and value > floor for value, floor in zip(found, floors, strict=False))
            verdict = "" if not any(floors) else "  FLOOR MISSED" if missed else "  floor met"
            lines.append(f"{title:<50}{found[0]:>8.1%}{found[1]:>8.1%}{found[2]:>8.1%}  of {found[3]}{verdict}")
    wrong = sum(row["again"] or not row["held"] for row in ran)
    return [*lines, f"runs: {len(ran)} of {len(rows)}; did not fit as planned: {wrong} (floor 0)"]
