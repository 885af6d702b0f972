"""Which architectures of transformers go all the way: a small random model of each into a stack, a step, out again, packed, adapted.

``python benchmarks/bench_architectures.py [NAME ...]`` (some minutes on one CPU core) prints a line for each:

- step: one AdamW step with weights streamed through a level 0 that cannot hold them; the folder that comes out, opened by transformers, has
  the bits of transformers' model and torch's AdamW doing the same in fp32;
- text: greedy tokens of the streamed model are those of transformers' ``generate``;
- packed: ``vb quantize`` to nvfp4, and the folder opens again;
- adapters: LoRA over the nvfp4 base takes a step, and the merged folder opens in transformers.

A cell is 'yes', or why not. The exit code is 1 if bits of a step or tokens of a text differ, or something fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import vblackwell as vb
from benchmarks.lib.tiny_models import IDS, small_kinds, tiny_model
from vblackwell.errors import VBError
from vblackwell.generate.batch import columns
from vblackwell.generate.quantized import load_quantized
from vblackwell.generate.sampling import Sampling
from vblackwell.tools.quantize import quantize_folder

NEW = 6


def step(model: Any, optimizer: Any) -> Tensor:
    """One training step; the loss before it."""
    torch.manual_seed(2)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def stack_for(plain: Any) -> vb.VGPUStack:
    """Level 0 of 0.7 of the weights; more where one layer wants it."""
    whole = sum(4 * param.numel() for param in plain.parameters())
    return vb.create_vgpu_stack(fast_memory=int(0.7 * whole), host_memory=64 << 20, disk_memory=0, device="cpu")


def stepped(folder: Path, out: Path) -> str:
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    expected = step(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    with stack_for(plain) as stack:
        model = vb.load_causal_lm(folder, stack, placement="streamed")
        found = step(model, vb.VGPUAdamW(model.parameters(), lr=1e-2))
        vb.save_causal_lm(model, out)
    opened = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    wrong = [name for name, param in plain.named_parameters() if not torch.equal(opened[name], param)]
    return "yes" if torch.equal(found, expected) and not wrong else f"DIFFERS: {wrong[:2] or 'loss'}"


def texted(folder: Path, out: Path) -> str:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.generation_config.eos_token_id = None  # both write on behind it
    expected = plain.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    with stack_for(plain) as stack, torch.no_grad():
        model = vb.load_causal_lm(folder, stack, trainable=False, placement="streamed").eval()
        found = list(columns(model, IDS.tolist(), NEW, Sampling(temperature=0), 0, None))
    return "yes" if torch.equal(torch.tensor(found).T, expected[:, IDS.shape[1] :]) else "DIFFERS"


def packed(folder: Path, out: Path) -> str:
    report = quantize_folder(folder, out)
    with torch.no_grad():
        answer: Any = load_quantized(out)(IDS)
        finite = bool((answer if isinstance(answer, Tensor) else answer.logits).isfinite().all())
    return f"yes, {len(report.layers)} linears" if finite else "DIFFERS"


def adapters(folder: Path, out: Path) -> str:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with stack_for(plain) as stack:
        model = vb.load_causal_lm(folder, stack, lora=vb.Lora(4), fp4="nvfp4", placement="streamed")
        loss = step(model, vb.VGPUAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        vb.save_causal_lm(model, out)
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    return "yes" if loss.isfinite() and merged(IDS).logits.isfinite().all() else "DIFFERS"


STAGES: dict[str, Callable[[Path, Path], str]] = {
    "step": stepped,
    "text": texted,
    "packed": packed,
    "adapters": adapters,
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of transformers' causal architectures; default all")
    names = parser.parse_args(words).names or small_kinds()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n{'':14}{'  '.join(STAGES)}", flush=True)
    differ = 0
    for name in names:
        cells = []
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            tiny_model(name).save_pretrained(folder)
            for stage, run in STAGES.items():
                try:
                    cells.append(run(folder, Path(place) / stage))
                except VBError as error:
                    cells.append(f"{type(error).__name__}: {' '.join(str(error).replace(place, '').split())[:110]}")
                except Exception as error:  # of one architecture, which the others shall not wait for
                    traceback.print_exc()
                    cells.append(f"FAILED: {type(error).__name__} {' '.join(str(error).split())[:110]}")
        differ += any(cell.startswith(("DIFFERS", "FAILED")) for cell in cells)
        print(f"{name:14}{'; '.join(cells)}", flush=True)
    print(f"{len(names)} architectures, {differ} differ or fail")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
