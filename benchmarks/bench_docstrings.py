"""From nothing to a fine-tuned model: a decoder is pre-trained on the standard library, then taught to answer with its
docstrings.

``python benchmarks/bench_docstrings.py --out runs/docstrings`` (about ten minutes on two CPU cores) runs

1. ``vb train``: the preset `tiny` on the default corpus, as ``make train``;
2. ``benchmarks/lib/docstring_chat.py``: a signature and a question, the docstring as the answer;
3. ``vb train --model .. --data chat.jsonl --lora 16 --use-fp4``: adapters over the decoder packed to nvfp4, which
streams through 4 MiB;

and then opens what came out elsewhere: the adapter in peft, the merged folder in transformers. Losses are means over
the answers' tokens of the held-out conversations, measured by transformers' and peft's models on rows of one
conversation each. The exit code is 1 if the loss did not fall, or if logits that must be equal are not. Note that the
decoder has read these docstrings in their files while it was pre-trained: what the adapters add is how to answer, not
knowledge.

``--quick`` is a miniature of all of it in seconds; ``--base FOLDER`` leaves out the pre-training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import vblackwell as vb
from benchmarks.lib.docstring_chat import standard_library, talks, write
from vblackwell import cli
from vblackwell.data.chat import ChatDataset, prepare_chat
from vblackwell.data.documents import find_text
from vblackwell.generate.adapters import adapted

FORMAT = "nvfp4"
PRETRAIN = ["--fast-memory", "14MiB", "--host-memory", "24MiB", "--disk-memory", "1GiB"]
TUNE = [
    "--fast-memory", "4MiB", "--host-memory", "64MiB", "--seq-length", "128", "--max-steps", "250", "--eval-every",
    "50",
    "--learning-rate", "5e-3",
]  # fmt: skip
QUICK_PRETRAIN = [
    "--architecture", "{num_layers: 2, hidden_size: 32, intermediate_size: 64, num_heads: 2}", "--vocab-size", "300",
    "--seq-length", "192", "--batch-size", "2", "--learning-rate", "1e-2", "--max-steps", "12", "--sample-tokens", "4",
]  # fmt: skip
QUICK_TUNE = [
    "--fast-memory", "96KiB", "--seq-length", "192", "--max-steps", "30", "--batch-size", "4", "--sample-tokens", "4",
    "--learning-rate", "5e-3",
]  # fmt: skip
QUICK_MODULES = ("statistics", "turtle")
# The adapter's products are added to a layer's output, or to its weight beforehand: the same few hundred fp32 products
# in another order.
EQUAL = 1e-5  # of the logits' norm


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/docstrings"), help="a new folder")
    parser.add_argument("--base", type=Path, help="a model to teach instead of one that is pre-trained here")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(words)
    if args.out.exists():
        parser.error(f"--out {args.out} exists: give a new folder")
    args.out.mkdir(parents=True)
    chat, base, began = args.out / "chat.jsonl", args.base or args.out / "base" / "final", time.monotonic()
    modules = standard_library()
    if args.quick:
        modules = [pair for pair in modules if pair[0] in QUICK_MODULES]
    write(chat, talks(modules))
    if args.base is None:
        corpus = ["--data", str(modules[0][1])] if args.quick else []
        train(*(QUICK_PRETRAIN if args.quick else PRETRAIN), *corpus, "--out", str(args.out / "base"))
    pretrained = time.monotonic()
    tune = QUICK_TUNE if args.quick else TUNE
    train(
        "--model", str(base), "--data", str(chat), "--lora", "16", "--use-fp4", *tune, "--out", str(args.out / "tuned")
    )
    tuned = time.monotonic()
    rows = held_out_rows(chat, base, int(tune[tune.index("--seq-length") + 1]))
    numbers = compare(base, args.out / "tuned", rows)
    numbers |= {"seconds_base": pretrained - began, "seconds_tuning": tuned - pretrained}
    (args.out / "docstrings.json").write_text(json.dumps(numbers, indent=1))
    show(args.out / "tuned", base, chat)
    print(table(numbers, args.out / "tuned"))
    return 0 if numbers["loss_merged"] < numbers["loss_base"] and numbers["apart"] <= EQUAL else 1


def train(*words: str) -> None:
    """``vb train``.

    Raises:
        SystemExit: it ended with another code than 0.
    """
    print(f"$ vb train {' '.join(words)}", flush=True)
    code = cli.main(["train", *words, "--device", "cpu", "--no-tensorboard"])
    if code != 0:
        raise SystemExit(code)


def held_out_rows(chat: Path, tokenizer: Path, seq_length: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, (1, S) each, of the conversations that ``vb train`` holds out."""
    corpus = prepare_chat(find_text(chat), "alpaca", tokenizer, lambda text, share: None)
    rows = ChatDataset(corpus, seq_length, "validation", packing=False)
    return [rows.batch(np.asarray([index]))[:2] for index in range(len(rows))]  # type: ignore[misc]


@torch.no_grad()
def loss_and_logits(model: Any, rows: list[tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
    """Mean negative log-likelihood of the answers' tokens; the logits at them, (tokens, vocabulary)."""
    wanted, said = [], []
    for inputs_BS, targets_BS in rows:
        logits_BSV = model(input_ids=inputs_BS, use_cache=False).logits
        learnt = targets_BS != -100
        wanted.append(targets_BS[learnt])
        said.append(logits_BSV[learnt].float())
    logits_NV = torch.cat(said)
    return float(nn.functional.cross_entropy(logits_NV, torch.cat(wanted))), logits_NV


def compare(base: Path, run: Path, rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Losses and logits of the base, of the run's own model in a stack, and of what transformers and peft open."""
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    loss_base, _ = loss_and_logits(plain, rows)
    stack = vb.VGPUStack({"levels": [{"device": "arena", "capacity_mb": 64}, {"device": "cpu", "capacity_mb": 512}]})
    own = vb.load_causal_lm(
        base, stack, adapter=run / "adapter", fp4=FORMAT, trainable=False, placement="streamed"
    ).eval()
    loss_own, logits_own = loss_and_logits(own, rows)
    made = adapted(own)
    assert made is not None
    packed = [name for name, reason in made.packed.items() if reason is None]
    merged = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    loss_merged, logits_merged = loss_and_logits(merged, rows)
    loss_peft, _ = loss_and_logits(with_adapter(base, run, []), rows)
    loss_rounded, logits_rounded = loss_and_logits(with_adapter(base, run, packed), rows)
    stack.close()
    scale = float(logits_own.norm())
    apart = [float((other - logits_own).norm()) / scale for other in (logits_merged, logits_rounded)]
    return {
        "conversations": len(rows), "answer_tokens": len(logits_own), "packed_linears": len(packed),
        "loss_base": loss_base,
        "loss_own": loss_own, "loss_merged": loss_merged, "loss_peft": loss_peft, "loss_peft_rounded": loss_rounded,
        "apart_merged": apart[0], "apart_peft_rounded": apart[1], "apart": max(apart),
    }  # fmt: skip


@torch.no_grad()
def with_adapter(base: Path, run: Path, packed: list[str]) -> nn.Module:
    """The base in peft with the run's adapter; ``packed`` linears rounded as the run had them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    for name in packed:
        weight = model.get_submodule(name.removesuffix(".base_layer")).weight
        weight.copy_(vb.quantize(weight, FORMAT).dequantize())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what it is renaming
        return peft.PeftModel.from_pretrained(model, run / "adapter").eval()


@torch.no_grad()
def show(run: Path, base: Path, chat: Path) -> None:
    """What base and tuned model answer to the last held-out questions, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    models = {
        name: AutoModelForCausalLM.from_pretrained(path).eval()
        for name, path in (("base", base), ("tuned", run / "final"))
    }
    for line in chat.read_text(encoding="utf-8").splitlines()[-2:]:
        talk = json.loads(line)
        question = f"{talk['instruction']}\n\n{talk['input']}"
        print(f"\n{talk['instruction']}  {talk['input']}\n  docstring: {talk['output']}")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for name, model in models.items():
            made = model.generate(
                input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            answer = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            print(f"  {name}: {' '.join(answer.split())}")


def table(numbers: dict[str, Any], run: Path) -> str:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = ", ".join(f"{line['step']}: {line['val_loss']:.3f}" for line in lines if line.get("val_loss") is not None)
    rows = [
        ("base, transformers", "loss_base", None),
        ("adapter over nvfp4, in our stack", "loss_own", None),
        ("merged folder, transformers", "loss_merged", "apart_merged"),
        ("adapter in peft, base rounded alike", "loss_peft_rounded", "apart_peft_rounded"),
        ("adapter in peft, base not rounded", "loss_peft", None),
    ]
    text = [
        f"\nvb train's own validation loss by step: {curve}",
        f"held out: {numbers['conversations']} conversations, {numbers['answer_tokens']} tokens of answers; "
        f"{numbers['packed_linears']} linears packed",
        f"seconds: pre-training {numbers['seconds_base']:.0f}, adapters {numbers['seconds_tuning']:.0f}",
        f"{'':<38}{'loss':>8}  logits' distance from ours",
    ]
    for name, loss, apart in rows:
        text.append(f"{name:<38}{numbers[loss]:>8.4f}  {'' if apart is None else f'{numbers[apart]:.1e}'}")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
