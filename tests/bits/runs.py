"""Cases that call `vb`: training, packing, writing text, estimating."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch

import vblackwell as vb
from tests.bits.case import CASES, Case, Results, case, metrics_of, text_to_learn, vb_command
from tests.bits.hashes import numbers_in, tensors_of
from tests.bits.models import FORMATS, causal_loss, llama_folder, make_stack

TRAIN = ("train", "--config", "tiny", "--fast-memory", "14MiB", "--host-memory", "24MiB", "--disk-memory", "1GiB")


@case
def train_tiny(folder: Path) -> Results:
    vb_command(folder, *TRAIN, "--max-steps", os.environ["BITS_STEPS"], "--out", "run")
    yield "weights", tensors_of(folder / "run" / "final")
    yield "metrics", metrics_of(folder / "run")
    yield "config", folder / "run" / "final" / "config.json"


SMALL = "{num_layers: 4, hidden_size: 64, intermediate_size: 128, num_heads: 4, num_kv_heads: 2}"


def small_run(folder: Path, out: str, *flags: str) -> Path:
    flags = ("--batch-size", "4", "--seq-length", "32", "--sample-tokens", "0", "--out", out, *flags)
    text = text_to_learn(folder)
    vb_command(folder, "train", "--architecture", SMALL, "--vocab-size", "320", "--data", str(text), *flags)
    return folder / out


def run_results(run: Path) -> dict[str, Any]:
    return {"weights": tensors_of(run / "final"), "metrics": metrics_of(run)}


def checkpoint_files(run: Path) -> list[str]:
    """Names of what a run with checkpoints leaves, without TensorBoard's, which have times in them."""
    files = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.parts[0] != "tensorboard")


CHECKPOINTED = ("--max-steps", "6", "--checkpoint-every", "2", "--keep-checkpoints", "3", "--placement", "streamed")


@case
def train_checkpoints(folder: Path) -> Results:
    caps = ("--fast-memory", "1MiB", "--host-memory", "1MiB", "--disk-memory", "64MiB")
    run = small_run(folder, "run", *CHECKPOINTED, *caps, "--accumulation-steps", "2")
    yield "files", checkpoint_files(run)
    yield "tensors", tensors_of(run)
    yield "metrics", metrics_of(run)
    shutil.rmtree(run / "final")
    newest = max(
        (path for path in run.rglob("*") if path.is_dir() and path.name.endswith("6")), key=lambda p: len(p.name)
    )
    shutil.rmtree(newest)
    small_run(folder, "run", *CHECKPOINTED, *caps, "--accumulation-steps", "2", "--resume")
    yield "files-resumed", checkpoint_files(run)
    yield "tensors-resumed", tensors_of(run)
    yield "metrics-resumed", metrics_of(run)


@case
def train_flags(folder: Path) -> Results:
    yield "vgpu-auto", run_results(small_run(folder, "auto", "--max-steps", "4", "--vgpu-auto"))
    flags = (
        "--max-steps",
        "4",
        "--mixed-precision",
        "--gradient-checkpointing",
        "--activations",
        "host",
        "--placement",
        "streamed",
    )
    run = small_run(folder, "bf16", *flags, "--fast-memory", "1MiB")
    yield "bf16-checkpointed", run_results(run)
    flags = ("--use-fp4", "--optimizer-states", "8bit", "--masters", "stochastic", "--mixed-precision")
    yield "fp4-8bit", run_results(small_run(folder, "fp4", "--max-steps", "4", *flags))


@case
def train_adapters(folder: Path) -> Results:
    source = llama_folder(folder, tokenizer=True)
    text = text_to_learn(folder)
    flags = (
        "--max-steps",
        "4",
        "--batch-size",
        "2",
        "--seq-length",
        "16",
        "--sample-tokens",
        "0",
        "--fast-memory",
        "1MiB",
    )
    vb_command(
        folder,
        "train",
        "--model",
        str(source),
        "--data",
        str(text),
        "--lora",
        "2",
        "--use-fp4",
        "--out",
        "lora",
        *flags,
    )
    yield "lora-fp4", [tensors_of(folder / "lora"), metrics_of(folder / "lora")]
    vb_command(folder, "train", "--model", str(source), "--data", str(text), "--out", "whole", *flags)
    yield "whole", run_results(folder / "whole")


def packed_case(name: str) -> Case:
    def quantized(folder: Path) -> Results:
        source = llama_folder(folder, tokenizer=True)
        more = ("--block-size", "32") if name in ("int4", "int8") else ()
        vb_command(folder, "quantize", "--model", str(source), "--out", "packed", "--format", name, *more)
        made = folder / "packed"
        kept = (path for path in made.iterdir() if path.suffix in (".safetensors", ".json"))
        told = ("manifest.json",)  # hashes of the others, and of trainer.json, which has versions in it
        for path in sorted(path for path in kept if path.name not in (*told, "trainer.json")):
            yield path.name, path
        with make_stack(folder, 128) as stack, torch.no_grad():
            model = vb.load_causal_lm(made, stack, trainable=False, placement="streamed").eval()
            yield "streamed-loss", causal_loss(model, 1)

    return quantized


for _name in FORMATS:
    CASES[f"packed-{_name}"] = packed_case(_name)


@case
def generate(folder: Path) -> Results:
    source = llama_folder(folder, tokenizer=True)
    asked = ("generate", "--model", str(source), "--prompt", "the layers", "--max-new-tokens", "12")
    drawn = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed", "3")
    caps = ("--fast-memory", "128KiB", "--host-memory", "16MiB")
    yield "greedy", vb_command(folder, *asked, "--temperature", "0")
    yield "drawn", vb_command(folder, *asked, *drawn)
    yield "streamed-greedy", vb_command(folder, *asked, "--temperature", "0", *caps)
    yield "streamed-drawn", vb_command(folder, *asked, *drawn, *caps)
    (folder / "prompts.txt").write_text("the layers\nmemory\na level\n", encoding="utf-8")
    many = (
        "generate",
        "--model",
        str(source),
        "--prompts",
        "prompts.txt",
        "--batch-size",
        "2",
        "--max-new-tokens",
        "8",
    )
    yield "fp4-batches", vb_command(folder, *many, *drawn, "--use-fp4")


ESTIMATES = {
    "gpt2-medium-8gib": "gpt2-medium --gpu-memory 8GiB --batch-size 8 --seq-length 1024",
    "tiny": "tiny --gpu-memory 2GiB --batch-size 4 --seq-length 256",
    "small-bf16-checkpointed": "small --gpu-memory 4GiB --batch-size 2 --seq-length 512 "
    "--precision bf16 --gradient-checkpointing",
    "gpt2-offload": "gpt2 --gpu-memory 3GiB --batch-size 1 --seq-length 512 --host-memory 16GiB --disk-memory 64GiB",
    "medium-autocast": "gpt2 --gpu-memory 24GiB --batch-size 4 --seq-length 256 "
    "--precision autocast --optimizer adamw-fused",
    "gpt2-gpus": "gpt2 --gpu 'A100 40GB' --batch-size 4 --seq-length 512 --gpus 4 --topology ring",
}


def estimate_case(words: str) -> Case:
    def estimated(folder: Path) -> Results:
        found = json.loads(vb_command(folder, "estimate", *shlex.split(words), "--json"))
        yield "numbers", numbers_in(found)

    return estimated


for _name, _words in ESTIMATES.items():
    CASES[f"estimate-{_name}"] = estimate_case(_words)


@case
def estimator(folder: Path) -> Results:
    del folder
    estimator = vb.VGPUResourceEstimator()
    config = vb.ModelConfig(vocab_size=5000, hidden_size=256, num_layers=4, num_heads=4, seq_length=256, batch_size=8)
    for precision in ("fp32", "bf16"):
        estimate = estimator.estimate_transformer(config, precision=precision)
        yield f"transformer-{precision}", dataclasses.asdict(estimate)
        for gpu in (900, 2000):
            levels = estimator.generate_vgpu_config(estimate, gpus=[gpu, 1024], target_hit_rate=0.9)["levels"]
            yield f"levels-{precision}-{gpu}", numbers_in(list(levels))
    yield "batch-size", estimator.recommend_batch_size(config, gpu_memory_mb=2048)
    yield "quick-gpt2", dataclasses.asdict(vb.quick_estimate("gpt2", 2, 256))
    yield (
        "communication",
        [
            vb.communication_cost(size, gpus, topology=topology)
            for size in (1 << 20, 1 << 30)
            for gpus in (2, 8)
            for topology in ("ring", "mesh", "all_to_all")
        ],
    )
