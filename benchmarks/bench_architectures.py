"""Which architectures of transformers go all the way: a small random model of each into a stack, a step, out again, packed, adapted.

``python benchmarks/bench_architectures.py [NAME ...]`` (a minute on one CPU core) prints a line for each:

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
from vblackwell.errors import VBError
from vblackwell.infer.batch import columns
from vblackwell.infer.quantized import load_quantized
from vblackwell.infer.sampling import Sampling
from vblackwell.train.quantize import quantize_folder

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OLD = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0}
HEAD = {**SIZES, "head_dim": 16}
WINDOW = {**HEAD, "sliding_window": 8}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **ROUTED}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SIZES, "mistral": {**SIZES, "sliding_window": 8}, "mixtral": {**SIZES, "num_local_experts": 4}, "qwen2": SIZES, "qwen3": HEAD,
    "qwen2_moe": {**SIZES, "num_experts": 4, "shared_expert_intermediate_size": 32, **ROUTED},
    "qwen3_moe": {**HEAD, "num_experts": 4, **ROUTED},
    "qwen3_next": {**HEAD, "num_experts": 4, "shared_expert_intermediate_size": 32, **ROUTED, **LINEAR},
    "gemma": HEAD, "gemma2": WINDOW, "gemma3_text": WINDOW, "phi": SIZES, "phi3": SIZES, "phimoe": {**SIZES, "num_local_experts": 4},
    "deepseek_v3": {**SIZES, "num_key_value_heads": 4, **GROUPS, **LATENT}, "glm4": HEAD, "glm4_moe": {**HEAD, **GROUPS},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}, "olmo2": SIZES, "granite": {**SIZES, "logits_scaling": 2.0},
    "granitemoe": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, "smollm3": SIZES, "starcoder2": SIZES, "stablelm": SIZES,
    "cohere": SIZES, "nemotron": SIZES, "exaone4": HEAD, "ernie4_5": HEAD, "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"] * 2},
    "gpt2": {**OLD, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "gptj": {**OLD, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "gpt_neox": {**SIZES, "num_key_value_heads": 4}, "bloom": {**OLD, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "falcon": {**OLD, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    "mpt": {"vocab_size": 96, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, "eos_token_id": 2},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}, "mamba": {**OLD, "hidden_size": 64, "num_hidden_layers": 4},
}  # fmt: skip
NEW = 6
IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


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
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}; default all")
    names = parser.parse_args(words).names or list(SHAPES)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n{'':14}{'  '.join(STAGES)}", flush=True)
    differ = 0
    for name in names:
        cells = []
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **SHAPES[name]))
            model.save_pretrained(folder)
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
