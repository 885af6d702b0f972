"""NaN and infinity in data, weights, gradients and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.damage import GENERATE, QUANTIZE, TUNE, model_of
from tests.faults.lab import Lab, Place, is_clean, is_refused

VALUES = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def _set_weight(place: Place, name: str, value: float, dtype: str = "float32", elements: int = 1) -> None:
    """One weight (or as many as said) of a folder that is nobody's: without a manifest."""
    import torch
    from safetensors.torch import load_file, save_file

    model = model_of(place)
    weights = load_file(model / "model.safetensors")
    weights[name].view(-1)[5 : 5 + elements] = value
    save_file(
        {key: weight.to(getattr(torch, dtype)) for key, weight in weights.items()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    (model / "manifest.json").unlink()


def weights(lab: Lab, seed: int) -> Iterator[Try]:
    def tried(place: Place, words: tuple[str, ...], name: str, value: float, dtype: str) -> None:
        _set_weight(place, name, value, dtype)
        data = ("--data", str(lab.corpus)) if words[0] == "train" else ()
        is_refused(place.vb(*words, *data), name.removesuffix(".weight"))
        assert not (place.folder / "packed").exists() and not (place.folder / "tuned/final").exists()

    from safetensors import safe_open

    with safe_open(lab.finished / "final/model.safetensors", "pt") as file:
        names = sorted(file.keys())
    for command, words in {"train --model": TUNE, "quantize": QUANTIZE}.items():
        for what, value in VALUES.items():
            for name in names[:: max(1, len(names) // 4)]:
                for dtype in ("float32", "bfloat16"):
                    yield Try(
                        f"{command}: {what} in {name} ({dtype})",
                        partial(tried, words=words, name=name, value=value, dtype=dtype),
                    )


def gradients(lab: Lab, seed: int) -> Iterator[Try]:
    """Weights so large that every loss or gradient overflows: no step happens, and none is claimed."""

    def overflown(place: Place, words: tuple[str, ...], steps: int) -> None:
        _set_weight(place, "model.norm.weight", 3e38, elements=20)
        ended = place.vb(*TUNE, "--data", str(lab.corpus), *words, "--max-steps", str(steps))
        is_refused(ended)
        assert not (place.folder / "tuned/final").exists(), "a run without a step exported a model"

    for steps in (1, 3, 12):
        for words in (
            (),
            ("--accumulation-steps", "2"),
            ("--max-grad-norm", "0"),
            ("--precision", "bf16"),
            ("--gradient-checkpointing",),
        ):
            yield Try(f"{steps} steps {' '.join(words)}", partial(overflown, words=words, steps=steps))


def learning_rates(lab: Lab, seed: int) -> Iterator[Try]:
    def refused(place: Place, flag: str, value: str) -> None:
        is_refused(place.vb(*place.training(flag, value)), flag)
        assert not place.run.exists()

    def diverges(place: Place, rate: str) -> None:
        ended = place.vb(*place.training("--learning-rate", rate, "--warmup-steps", "0", "--max-skipped-steps", "2"))
        is_clean(ended)
        if ended.code != 0:
            is_refused(ended, "--learning-rate")
        _finite_checkpoints(place)

    for flag in (
        "--learning-rate",
        "--weight-decay",
        "--beta1",
        "--beta2",
        "--epsilon",
        "--max-grad-norm",
        "--epochs",
        "--min-learning-rate-ratio",
    ):
        for value in ("nan", "inf", "-inf", "-1"):
            yield Try(f"{flag} {value}", partial(refused, flag=flag, value=value))
    for rate in ("1e10", "1e20", "1e30", "1e38"):
        yield Try(f"--learning-rate {rate}", partial(diverges, rate=rate))


def _finite_checkpoints(place: Place) -> None:
    from safetensors.torch import load_file

    for path in place.run.rglob("*.safetensors"):
        for name, weight in load_file(path).items():
            assert weight.isfinite().all(), f"{path.relative_to(place.folder)}: {name} is not finite"


def data(lab: Lab, seed: int) -> Iterator[Try]:
    """Numbers where text belongs."""

    def refused(place: Place, lines: list[str]) -> None:
        (place.folder / "data.jsonl").write_text("\n".join(lines) + "\n")
        is_refused(place.vb(*place.training("--data", "data.jsonl")), "data.jsonl", "line")

    good = json.dumps({"text": "def f(x):\n    return x\n" * 40})
    for bad in (
        '{"text": NaN}',
        '{"text": Infinity}',
        '{"text": -Infinity}',
        '{"text": 1e999}',
        "NaN",
        '{"text": null}',
        "[NaN]",
    ):
        for lines in ([bad], [good] * 30 + [bad]):
            yield Try(f"line {len(lines)}: {bad}", partial(refused, lines=lines))

    def table(place: Place, value: float) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [value, 1.0]}), place.folder / "data.parquet")
        is_refused(place.vb(*place.training("--data", "data.parquet")), "data.parquet")

    for what, value in VALUES.items():
        yield Try(f"parquet: {what}", partial(table, value=value))


def generated(lab: Lab, seed: int) -> Iterator[Try]:
    """A model that answers NaN writes no text as if it had been drawn."""

    def tried(place: Place, value: float) -> None:
        _set_weight(place, "model.norm.weight", value, elements=20)
        is_refused(place.vb(*GENERATE))

    for what, value in VALUES.items():
        yield Try(f"generate: {what}", partial(tried, value=value))


CASES = [
    Case(
        "nan-in-weights",
        "NaN, inf, -inf in one weight of a foreign folder, fp32 and bf16, under train --model and quantize",
        "exit 2 and one line that names the tensor; nothing is written",
        weights,
        1,
    ),
    Case(
        "nan-in-gradients",
        "weights for which every loss or gradient overflows",
        "exit 2 and one line; no model is exported",
        gradients,
        1,
    ),
    Case(
        "nan-in-settings",
        "NaN, inf, -1 as rates, decays, norms; rates of 1e10 to 1e38",
        "exit 2 and one line; every checkpoint is finite",
        learning_rates,
        2,
    ),
    Case(
        "nan-in-data",
        "NaN, inf, null where a text belongs, in jsonl and parquet",
        "exit 2 and one line with file and line",
        data,
        1,
    ),
    Case("nan-in-a-text", "a model whose logits are NaN, under generate", "exit 2 and one line", generated, 1),
]
