"""``vb bench MODEL``: what each setting of ours costs and brings for a model on this machine, measured, as a table or
JSON.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.folders.checked import check_weights
from vblackwell.folders.folder import read_config
from vblackwell.folders.hub import find_folder, is_hub_id
from vblackwell.generate.generate import position_limit
from vblackwell.generate.load import load_model, resolve_model
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import GPT2_VOCAB_SIZE, PRESETS
from vblackwell.planner.model_spec import check_batch
from vblackwell.tools.bench_ladder import LADDER, NEW_TOKENS, Case, Phase, Row, climb
from vblackwell.tools.cost import Bottleneck
from vblackwell.units import format_bytes

PHASES = ("training", "inference")
LONGEST_DEFAULT = 512
MIN_STEPS = 3
_SPARE = 2 * NEW_TOKENS  # positions for decoding
_ZIPF = 1.1  # exponent of the tokens' frequencies, about that of words


def bench_command(
    model: str,
    batch_size: int = 4,
    seq_length: int | None = None,
    steps: int = 7,
    rungs: str = "all",
    phases: str = "all",
    vocab_size: int = GPT2_VOCAB_SIZE,
    learning_rate: float = 3e-4,
    device: torch.device | str = "cpu",
    json_file: str | None = None,
    seed: int = 0,
) -> int:
    """Measure, print the table, and write ``json_file`` if it is given; 0.

    Args:
        model: a preset, or a folder: a Hugging Face one, or a run of ``vb train``.
        batch_size: sequences of a training step, and of a pass.
        seq_length: tokens of a sequence; None: 512, or what the model's limit leaves.
        steps: training steps of each rung; the first two are not timed.
        rungs, phases: 'all', or names with commas between them, of ``LADDER`` and ``PHASES``.
        vocab_size: of a preset.
        learning_rate: of the training steps.
        json_file: '-' prints the JSON instead of the table.

    Raises:
        VBError: no such model, values out of range, a file that cannot be written; nothing was measured.
    """
    chosen = tuple(rung for rung in LADDER if rung.name in _names(rungs, "--rungs", [each.name for each in LADDER]))
    wanted = tuple(_names(phases, "--phases", list(PHASES)))
    if steps < MIN_STEPS:
        raise ConfigurationError(f"--steps {steps}: give at least {MIN_STEPS}, the first two are not timed")
    if not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"--learning-rate {learning_rate}: give a number above 0")
    check_batch(batch_size, 1 if seq_length is None else seq_length)
    _refuse_path(json_file)
    subject = _open(model, vocab_size, seq_length, seed)
    length = _length(subject, seq_length)
    device = torch.device(device)
    size = _vocabulary(subject)
    case = Case(subject, zipf_tokens(size, (steps, batch_size, length + 1), seed), device, learning_rate)
    rows = []
    for row in climb(case, chosen, wanted, lambda text: print(text, file=sys.stderr, flush=True)):
        rows.append(row)
    report = report_of(model, case, rows)
    if json_file != "-":
        _show(report, rows)
    if json_file is not None:
        _write(json_file, json.dumps(report, indent=2))
    return 0


def _names(text: str, flag: str, known: list[str]) -> list[str]:
    names = known if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{flag} {name!r} is none of {', '.join(known)}{nearest(name, known)}; give some, with commas "
                "between, or all"
            )
    return [name for name in known if name in names]


def _refuse_path(json_file: str | None) -> None:
    if json_file is None or json_file == "-":
        return
    path = Path(json_file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--json {json_file}: give the name of a file in a folder that exists, or - to print it"
        )


def _write(json_file: str, text: str) -> None:
    if json_file == "-":
        print(text)
        return
    try:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--json {json_file}: {error.strerror}") from error


# -- the model and its tokens ------------------------------------------------------------------------------------------


def _open(text: str, vocab_size: int, seq_length: int | None, seed: int) -> nn.Module:
    """The model in fp32 on the CPU."""
    if text in PRESETS:
        if not 2 <= vocab_size < 1 << 31:
            raise ConfigurationError(f"--vocab-size {vocab_size}: give at least 2")
        preset = PRESETS[text]
        longest = (seq_length or min(LONGEST_DEFAULT, preset.max_position)) + _SPARE
        return Decoder(preset.decoder_config(vocab_size, max(longest, preset.max_position)), seed=seed, device="cpu")
    if not Path(text).is_dir() and not is_hub_id(text):
        raise ConfigurationError(
            f"model {text!r} is unknown{nearest(text, PRESETS)}; give one of {', '.join(PRESETS)}, a Hugging Face "
            "folder or hub id, or a "
            "run folder of vb train"
        )
    folder = resolve_model(find_folder(text)).folder
    if read_config(folder).get("quantization_config"):
        raise ConfigurationError(f"{folder} is packed already: give the folder that it was made from")
    check_weights(folder)
    return load_model(folder, "cpu", torch.float32)


def _length(model: nn.Module, seq_length: int | None) -> int:
    limit = position_limit(model)
    room = None if limit is None else limit - _SPARE
    if room is not None and room < 1:
        raise ConfigurationError(f"the model's limit of {limit} tokens leaves no room for {_SPARE} new ones")
    if seq_length is None:
        return LONGEST_DEFAULT if room is None else min(LONGEST_DEFAULT, room)
    if room is not None and seq_length > room:
        raise ConfigurationError(
            f"--seq-length {seq_length}: the model's limit is {limit}, and {_SPARE} tokens are decoded after them: "
            f"give at most {room}"
        )
    return seq_length


def _vocabulary(model: Any) -> int:
    config = model.config if isinstance(model, Decoder) else model.config.get_text_config()
    return int(config.vocab_size)


def zipf_tokens(vocab_size: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Tokens (int64, CPU) whose frequencies fall as words' do (Zipf), so that a few steps of training have something to
    learn.
    """
    generator = torch.Generator().manual_seed(seed)
    weights_V = torch.arange(1, vocab_size + 1, dtype=torch.float64).pow(-_ZIPF)
    drawn = torch.rand(shape, dtype=torch.float64, generator=generator) * weights_V.sum()
    return torch.searchsorted(weights_V.cumsum(0), drawn).clamp(max=vocab_size - 1)


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(model: str, case: Case, rows: list[Row]) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    steps, batch_size, length = case.tokens_NBS.shape
    on_gpu = case.device.type == "cuda"
    return {
        "model": model,
        "parameters": sum(param.numel() for param in case.model.parameters()),
        "batch_size": batch_size,
        "seq_length": length - 1,
        "steps": steps,
        "learning_rate": case.learning_rate,
        "device": torch.cuda.get_device_name(case.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "threads": None if on_gpu else torch.get_num_threads(),
        "rungs": [_row_values(row) for row in rows],
    }


def _row_values(row: Row) -> dict[str, Any]:
    output = None
    if row.output is not None:
        decibels = row.output.sqnr_db
        output = {
            "max": row.output.absolute, "rms": row.output.rms, "relative": row.output.relative,
            "sqnr_db": decibels if math.isfinite(decibels) else None,
        }  # fmt: skip
    training, inference = _phase_values(row.training), _phase_values(row.inference)
    if training is not None:
        training |= {"loss": row.loss, "loss_change": row.loss_change}
    if inference is not None:
        inference |= {
            "token_milliseconds": row.token_milliseconds,
            "weight_bytes": row.weight_bytes,
            "output_change": output,
        }
    return {
        "name": row.rung.name, "flags": row.rung.flags, "attention": row.attention, "training": training, "inference": inference,
        "refused": row.refused,
    }  # fmt: skip


def _phase_values(phase: Phase | None) -> dict[str, Any] | None:
    if phase is None:
        return None
    return {
        "milliseconds": phase.milliseconds, "peak_bytes": phase.peak_bytes,
        "bottleneck": {"kind": phase.bottleneck.kind} | asdict(phase.bottleneck),
    }  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------

_TRAINING = ("rung", "attention", "ms a step", "memory", "loss", "change", "most time in")
_INFERENCE = ("rung", "attention", "ms a pass", "ms a token", "memory", "weights", "rms change", "max", "most time in")


def tables_of(rows: list[Row]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """(title, header, lines) of each phase that was measured."""
    found = []
    for title, header, cells in (("training", _TRAINING, _training_cells), ("inference", _INFERENCE, _inference_cells)):
        lines = [cells(row) for row in rows if getattr(row, title) is not None]
        if lines:
            found.append((title, header, lines))
    return found


def _training_cells(row: Row) -> list[str]:
    phase = row.training
    assert phase is not None and row.loss is not None
    change = "" if row.loss_change is None else f"{row.loss_change:+.4f}"
    return [
        row.rung.name,
        row.attention,
        f"{phase.milliseconds:.2f}",
        format_bytes(phase.peak_bytes),
        f"{row.loss:.4f}",
        change,
        describe(phase.bottleneck),
    ]


def _inference_cells(row: Row) -> list[str]:
    phase, output = row.inference, row.output
    assert phase is not None and row.token_milliseconds is not None and row.weight_bytes is not None
    apart = ["", ""] if output is None else [f"{output.relative:.2%}", f"{output.absolute:.3g}"]
    return [
        row.rung.name,
        row.attention,
        f"{phase.milliseconds:.2f}",
        f"{row.token_milliseconds:.2f}",
        format_bytes(phase.peak_bytes),
        format_bytes(row.weight_bytes),
        *apart,
        describe(phase.bottleneck),
    ]


def describe(bottleneck: Bottleneck) -> str:
    """What took most of the time, in a few words."""
    share = bottleneck.shares.get(bottleneck.kind, 0.0)
    inside = f" ({bottleneck.name} {bottleneck.name_share:.0%})" if bottleneck.name else ""
    return f"{bottleneck.kind} {share:.0%}{inside}"


def _show(report: dict[str, Any], rows: list[Row]) -> None:
    print(
        f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters, {report['batch_size']} x "
        f"{report['seq_length']} tokens, "
        f"{report['device']}, torch {report['torch']}"
    )
    for title, header, lines in tables_of(rows):
        print()
        if sys.stdout.isatty():
            _show_rich(title, header, lines)
        else:
            print("\n".join([f"{title}:", *_aligned(header, lines)]))
    print(
        f"\nchange: from {rows[0].rung.name}; rms change: of the logits, relative. Memory: weights and all else held "
        "at the peak."
    )
    for row in rows:
        for phase, reason in row.refused.items():
            print(f"{row.rung.name}, {phase}: not measured: {reason}")


def _aligned(header: tuple[str, ...], lines: list[list[str]]) -> list[str]:
    every = [list(header), *lines]
    widths = [max(len(line[column]) for line in every) for column in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in every
    ]


def _show_rich(title: str, header: tuple[str, ...], lines: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for line in lines:
        table.add_row(*line)
    Console().print(table, markup=False)
