"""`vb estimate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.cli.test_bad_input import refused
from tests.cli.test_folders import folders  # noqa: F401 - a fixture
from vblackwell.nn.decoder.config import PRESETS
from vblackwell.planner.estimate.command import defaults_of
from vblackwell.planner.model_spec import positions_of
from vblackwell.trace.trace import CATEGORIES
from vblackwell.train.config import resolve
from vblackwell.units import MiB

PARTS = (*CATEGORIES, "fragmentation", "context")
QUICK = ["--batch-size", "2", "--seq-length", "64"]
CONFIG = {
    "model_type": "llama", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
FACTORIES = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
    def forward(self, tokens):
        return self.head(self.embedding(tokens).relu())

class Reads(Tiny):
    def forward(self, tokens):
        return super().forward(tokens) if tokens.max() > 3 else tokens

def broken():
    raise KeyError("no such layer")

def number():
    return 3

VALUE = 3
"""


def test_json_of_a_preset_adds_up(place):
    words = ["estimate", "tiny", "--gpu-memory", "8GiB", "--no-advice", "--json", *QUICK]
    found = json.loads(place.vb(*words).stdout)
    values = found["bytes"]
    assert found["parameters"] == 2_967_936
    assert sum(values[name] for name in PARTS) == values["peak_p50"] < values["peak_p99"]
    assert values["state_bytes"] == 16 * found["parameters"]
    assert found["fits"] is True and found["plan"]["largest_batch_size"] > 2 and found["assumptions"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_model_that_is_trained_by_that_name(name):
    config = resolve({"config": name})
    trained = replace(PRESETS[name], vocab_size=config.vocab_size)
    assert PRESETS[name] == trained and defaults_of(name) == (config.batch_size, config.seq_length, None)
    assert not config.mixed_precision and config.precision == "auto"  # fp32, as an estimate's


def test_a_length_that_is_not_given_is_what_the_model_learnt(place):
    (place.folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 96}))
    found = place.vb("estimate", "config.json", "--no-advice")
    said = "config.json learnt 96 positions (max_position_embeddings): --seq-length is 96 by default"
    assert "batch 8 x 96 tokens" in found.stdout and f"assumes {said}" in found.stdout and said in found.stderr
    longer = place.vb("estimate", "config.json", "--no-advice", "--seq-length", "100")
    assert "batch 8 x 100 tokens" in longer.stdout and "by default" not in longer.stdout + longer.stderr
    nested = {"model_type": "m", "text_config": {"max_position_embeddings": 32}}
    assert [positions_of(each) for each in (CONFIG, nested, {"n_positions": 64})] == [None, 32, 64]


def test_a_known_card_says_how_fast(place):
    """Resident where it fits, streamed where a stack is asked for, and on two; the same as a page."""
    machine = ["--gpu", "H200", "--host-memory", "8GiB", "--gpus", "2"]
    words = [*machine, "--html", "tiny.html", "--no-advice", "--json", *QUICK]
    found = json.loads(place.vb("estimate", "tiny", *words).stdout)
    several = found["plan"]["several_gpus"]
    assert several["num_gpus"] == 2 and several["fits"] and several["efficiency"] > 0
    assert "2 such GPUs" in (place.folder / "tiny.html").read_text()
    speed = found["plan"]["speed"]
    assert found["fits"] and found["tokens_per_second"] == speed["resident"] > speed["streamed"] > 0
    assert speed["rates"] == "data sheet of H200" and any(speed["rates"] in line for line in found["assumptions"])


def slowness() -> float:
    """How much longer this core adds 5 million numbers up, busy as the machine is, than the one that the limit is for;
    at least 1."""
    began, total = time.process_time(), 0
    for number in range(5_000_000):
        total += number
    return max(1.0, (time.process_time() - began) / 0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["gemma-2-9b --gpu 4070", "llama-3-70b --gpu RTX-3090", "gpt-oss-20b --gpu RTX-3060-12GB"]
)
def test_every_way_of_a_large_model_takes_15_seconds_of_a_cpu(words: str):
    """In a process of its own, its imports included; of a CPU, for others work on this machine as well."""
    slow, before = slowness(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "vblackwell", "estimate", *words.split()], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15 * max(slow, slowness())


def test_a_folder_and_its_config_are_the_same_model(place):
    folder = place.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    first, second = (place.vb("estimate", name, *QUICK).stdout for name in ("model", "model/config.json"))
    assert first.splitlines()[2:] == second.splitlines()[2:]


def test_what_does_not_fit_is_shown_with_the_offload_stack(place):
    words = [
        "estimate",
        "large",
        "--gpu",
        "rtx 3070",
        "--gpu-memory",
        "3GiB",
        "--gradient-checkpointing",
        "--host-memory",
        "32GiB",
        "--no-advice",
    ]
    found = json.loads(place.vb(*words, "--json", *QUICK).stdout)
    assert found["fits"] is False and found["plan"]["largest_batch_size"] == 0
    offload = found["plan"]["offload"]
    # Weights, moments and a share of the gradients are stored in RAM.
    assert offload["host"] >= 12 * found["parameters"] and offload["level0"] < 3 << 30
    assert found["advice"] == []


def test_own_factories(place):
    (place.folder / "mine.py").write_text(FACTORIES)
    out = place.vb("estimate", "mine:Tiny", *QUICK).stdout
    assert f"{300 * 32 + 32 * 300 + 300:,} parameters" in out
    refused(place, ["estimate", "mine:broken"], "mine:broken", "KeyError", "no such layer")
    refused(place, ["estimate", "mine:number"], "gives int, not a torch.nn.Module")
    refused(place, ["estimate", "mine:gone"], "mine:gone cannot be imported: AttributeError", "working folder")
    refused(place, ["estimate", "mine:VALUE"], "mine:VALUE is int: give a function or class")
    measured = place.vb("estimate", "mine:Reads", *QUICK)
    assert (
        "two real steps are measured instead" in measured.stderr
        and "assumes the model cannot be traced" in measured.stdout
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--batch-size", "4"], ["--batch-size belongs to a MODEL"]),
        (["--gpu", "RTX 3091"], ["RTX 3091", "the nearest: 'RTX 3090'"]),
        (["--gpu", "T4", "--ram", "lots"], ["--ram 'lots'"]),
        (["--gpu", "T4", "--ram", "0"], ["--ram 0: nothing runs without RAM"]),
        (["gpt2", "--batch-size", "2.5"], ["--batch-size 2.5: a whole number is needed; see vb estimate --help"]),
        (["llama-7"], ["'llama-7' is unknown", "the nearest: llama-7b, "]),
        (["gpt2", "--gpu", "RTX 3091"], ["RTX 3091", "the nearest: 'RTX 3090'"]),
        (["gpt2", "--optimizer", "adamv"], ["'adamv'", "did you mean 'adamw'"]),
        (["gpt2", "--precision", "fp31"], ["'fp31'", "did you mean 'fp32'"]),
        (["gpt2", "--batch-size", "-1"], ["batch size -1", "at least 1"]),
        (["gpt2", "--seq-length", "4096"], ["positions up to 1024", "4096"]),
        (["tiny", "--batch-size", "1000000000"], ["tokens in one forward"]),
        (["tiny", "--gpu-memory", "much"], ["--gpu-memory 'much'", "8GiB"]),
        (["tiny", "--gpu-memory", "-8GiB"], ["--gpu-memory '-8GiB' is not a size"]),
        (["tiny", "--gpu-memory", "9000TiB"], ["--gpu-memory 9000TiB is no GPU"]),
        (
            ["tiny", "--gpu-memory", "64MiB"],
            ["below the minimum for tiny", "CUDA context takes", "largest layer group"],
        ),
        (["gone.json"], ["gone.json", "No such file"]),
        (["tiny", "--gpus", "2"], ["--gpus", "--gpu 'RTX 3090'"]),
        (["tiny", "--gpu", "T4", "--gpus", "1", *QUICK], ["1 GPUs", "2 to 65536"]),
        (["tiny", "--gpu", "T4", "--gpus", "2", "--topology", "rings", *QUICK], ["did you mean 'ring'"]),
        (["tiny", "--html", "gone/page.html", *QUICK], ["--html gone/page.html", "is no folder"]),
    ],
)
def test_refusals(place, words, parts):
    refused(place, ["estimate", *words], *parts)


def test_a_config_that_lacks_a_field(place):
    (place.folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}))
    refused(place, ["estimate", "config.json"], "config.json lacks the field 'num_hidden_layers'")
    (place.folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    refused(place, ["estimate", "config.json"], "config.json lacks the field 'vocab_size'")
    (place.folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 65}))
    refused(
        place,
        ["estimate", "config.json"],
        "does not describe a causal model: ",
        "65",
    )
    (place.folder / "config.json").write_text("{")
    refused(place, ["estimate", "config.json"], "is not JSON")


def figures_of(text: str) -> list[str]:
    """What a plan says without seconds."""
    return re.findall(r"plan: .*|fast memory .*?RAM [\d.]+ \S+(?=$|;)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("qwen3", ["--lora", "4", "--use-fp4", "--mixed-precision"]),
        (None, ["--accumulation-steps", "2", "--gradient-checkpointing"]),
    ],
)
def test_flags_of_a_run_give_its_plan(kind, flags, place, folders):  # noqa: F811
    """To the byte. Seconds are measured in each process; of one way to go nothing depends on them."""
    levels = ["--fast-memory", "1MiB", "--host-memory", "8MiB", "--disk-memory", "0", "--device", "cpu"]
    flags = [*flags, *levels, "--placement", "streamed", "--update", "host", "--seq-length", "32"]
    if kind is None:
        shape = ["--architecture", "{num_layers: 3, hidden_size: 32, intermediate_size: 64, num_heads: 2}"]
        flags += [*shape, "--vocab-size", "300"]
    model = [] if kind is None else ["--model", str(folders(kind))]
    made = place.vb("train", *model, "--data", str(place.corpus), *flags, "--plan").stdout
    told = place.vb("estimate", *(model[1:] or ["tiny"]), *flags).stdout
    plans = [figures_of(text) for text in (made, told)]
    assert len(plans[0]) == 3 and plans[0] == plans[1], (made, told)
    if kind is None:  # its vocabulary is the tokenizer's where one is given
        file = folders("llama") / "tokenizer.json"
        flags = [*flags[: flags.index("--vocab-size")], "--tokenizer", str(file)]
        assert figures_of(place.vb("estimate", "tiny", *flags).stdout) == plans[0]
    else:
        found = json.loads(place.vb("estimate", *model[1:], *flags, "--json").stdout)
        assert found["choice"]["placement"] == "streamed"
        assert found["bounds"] == {"gpu": MiB, "host": 8 * MiB, "disk": 0}


def test_a_run_is_planned_for_a_card_by_name(place):
    """Of a known model, whose weights nobody has."""
    flags = [
        "--gpu",
        "RTX 3060",
        "--ram",
        "32GiB",
        "--disk",
        "0",
        "--lora",
        "8",
        "--mixed-precision",
        "--batch-size",
        "2",
    ]
    text = place.vb("estimate", "gpt2", *flags).stdout
    assert re.match(
        r"gpt2, 124,439,808 parameters, on RTX 3060, 1,024 tokens a sequence\nplan: resident, 2 sequences", text
    ), text
    assert "rates: data sheet of RTX 3060" in text
    stated = place.vb("estimate", "gpt2", "--gpu", "RTX 3060", *flags[6:])  # next to it not what this machine has
    assert "RAM 48.0 GiB, disk 466 GiB; rates" in stated.stdout
    assert "assumes 64.0 GiB of RAM and 466 GiB of disk next to a card that this machine lacks" in stated.stderr
    for wrong, reason in (
        (["--html", "page.html"], "--html belongs to an estimate of plain PyTorch"),
        (["--lora", "8", "--precision", "autocast"], "--precision 'autocast' is not one of auto, fp32, bf16, fp16"),
        (["--use-fp4", "--fp8-activations"], "RTX 3060 has no FP8 tensor cores"),
        (["--use-fp4", "--fp8-activations", "--gpu", "H100", "--seq-length", "32"], "a forward has 64 tokens"),
        (["--device", "cpu"], "--device says where this machine computes"),
        (["--seq-length", "1025"], "beyond the 1024 positions of gpt2"),
    ):
        refused(place, ["estimate", "gpt2", *flags, *wrong], reason)
