"""``vb bench MODEL``: what fp32, bf16, FP4, fused attention and checkpointing, each with what the one before has, cost
and bring a model on this machine.

Every rung starts from the same weights, sees the same tokens and does what the flags of ``vb train`` do, through the
resident engine. Inference is one pass over the batch up to the logits after its last token, and then tokens one by one
with a cache; FP4 linears are packed there. Of a packed folder, which does not train, inference is measured as it is
packed, without and with fused attention. Legend: B batch, S sequence, V vocabulary.
"""

import copy
import functools
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported, VBError, nearest
from vblackwell.folders.folder import read_config, stored_dtype
from vblackwell.folders.hub import is_hub_id
from vblackwell.generate.generate import position_limit, stepper
from vblackwell.generate.load import load_model, resolve_model
from vblackwell.machine.device import has_bf16
from vblackwell.memory.cache.config import LevelConfig
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.attention.backends import use_dispatcher
from vblackwell.nn.convert import training
from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.decoder.config import PRESET_BATCHES, PRESETS, TOKENIZER_SIZE
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.packed_linear import PackedLinear
from vblackwell.offload.api import bytes_when_resident, enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.planner.model_spec import check_batch
from vblackwell.tools.compare import difference
from vblackwell.tools.cost import Measured, measure, synchronize, time_of
from vblackwell.units import MiB, columns, format_bytes

LADDER = ("fp32", "bf16", "fp4", "flash", "checkpointing")  # each with what those before it have
PACKED_LADDER = ("packed", "flash")  # of a packed folder
_FLAGS = ("--mixed-precision", "--use-fp4", "--use-flash-attn", "--gradient-checkpointing")  # of vb train, for the same
PHASES = ("training", "inference")
BATCH_SIZE, LONGEST_DEFAULT = 4, 512
WARM_UP = 2  # steps, and tokens, that are not timed
NEW_TOKENS = 8  # decoded one by one; their median counts
_SPARE = 2 * NEW_TOKENS  # positions for decoding


def bench_command(
    model: str,
    batch_size: int | None = None,
    seq_length: int | None = None,
    steps: int = 7,
    rungs: str = "all",
    phases: str = "all",
    vocab_size: int = TOKENIZER_SIZE,
    learning_rate: float = 3e-4,
    device: torch.device | str = "cpu",
    json: str | None = None,
    seed: int = 0,
) -> int:
    """Measure, print the table, and write ``json`` if it is given ('-' prints the JSON instead); 0.

    ``model``: a preset, a Hugging Face folder, or a run of ``vb train``; ``batch_size``, ``seq_length``: None for those
    of ``vb train --config``, and of other models for 4 sequences of 512 tokens, or what the model's limit leaves;
    ``rungs``, ``phases``: 'all', or names of ``LADDER`` (of a packed folder ``PACKED_LADDER``) and ``PHASES`` with
    commas. Raises VBError: no such model, values out of range, a file that cannot be written; nothing was measured.
    """
    folder = _folder_of(model)
    stated = None if folder is None else read_config(folder).get("quantization_config")
    wanted = _names(phases, "--phases", PHASES)
    if folder is not None and stated:
        if phases != "all" and "training" in wanted:
            said = f"--phases {phases}: {folder} is packed, and packed weights are not trained"
            raise Unsupported(f"{said}: give --phases inference, or the folder that it was packed from")
        wanted = ["inference"]
    chosen = _names(rungs, "--rungs", PACKED_LADDER if stated else LADDER)
    if steps <= WARM_UP:
        raise ConfigurationError(f"--steps {steps}: give at least {WARM_UP + 1}, the first two are not timed")
    if not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"--learning-rate {learning_rate}: give a number above 0")
    size, length = PRESET_BATCHES.get(model, (BATCH_SIZE, None))
    batch_size, seq_length = size if batch_size is None else batch_size, length if seq_length is None else seq_length
    check_batch(batch_size, 1 if seq_length is None else seq_length)
    path = None if json is None or json == "-" else Path(json)
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigurationError(f"--json {json}: give the name of a file in a folder that exists, or - to print it")
    if folder is None:
        subject: Any = _preset(model, vocab_size, seq_length, seed)
    else:
        subject = load_model(folder, "cpu", None if stated else torch.float32)
    length, device = _length(subject, seq_length), torch.device(device)
    known: Any = subject.config if isinstance(subject, Decoder) else subject.config.get_text_config()
    tokens_NBS = zipf_tokens(int(known.vocab_size), (steps, batch_size, length + 1), seed)
    case = Case(subject, tokens_NBS, device, learning_rate, stored_dtype(folder) if folder and stated else None)
    linears = [layer for layer in subject.modules() if isinstance(layer, PackedLinear)]
    packed = sum(layer.in_features * layer.out_features for layer in linears)
    report: dict[str, Any] = {
        "model": model,
        "parameters": packed + sum(param.numel() for param in subject.parameters()),
        "batch_size": batch_size,
        "seq_length": length,
        "steps": steps,
        "learning_rate": learning_rate,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": None if device.type == "cuda" else torch.get_num_threads(),
        "rungs": list(climb(case, chosen, wanted)),
    }
    print(dumps(report, indent=2) if json == "-" else "\n".join(_lines(report)))
    if path is not None:
        try:
            path.write_text(dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--json {json}: {error.strerror}") from error
    return 0


def _names(text: str, flag: str, known: tuple[str, ...]) -> list[str]:
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{flag} {name!r} is none of {', '.join(known)}{nearest(name, known)}; give some, with commas "
                "between, or all"
            )
    return [name for name in known if name in names]


# -- the model and its tokens ------------------------------------------------------------------------------------------


def _preset(name: str, vocab_size: int, seq_length: int | None, seed: int) -> Decoder:
    """The preset's model in fp32 on the CPU."""
    if not 2 <= vocab_size < 1 << 31:
        raise ConfigurationError(f"--vocab-size {vocab_size}: give at least 2")
    preset = PRESETS[name]
    longest = (seq_length or 0) + _SPARE
    shape = replace(preset, vocab_size=vocab_size, max_position=max(longest, preset.max_position))
    return Decoder(shape, seed=seed, device="cpu")


def _folder_of(text: str) -> Path | None:
    """The folder of the model that is meant; None for a preset."""
    if text in PRESETS:
        return None
    if not Path(text).is_dir() and not is_hub_id(text):
        raise ConfigurationError(
            f"model {text!r} is unknown{nearest(text, PRESETS)}; give one of {', '.join(PRESETS)}, a Hugging Face "
            "folder or hub id, or a run folder of vb train"
        )
    return resolve_model(text)[0]


def _length(model: nn.Module, seq_length: int | None) -> int:
    limit = position_limit(model)
    most = math.inf if limit is None else limit - _SPARE
    if most < 1:
        raise ConfigurationError(f"the model's limit of {limit} tokens leaves no room for {_SPARE} new ones")
    if seq_length is not None and seq_length > most:
        raise ConfigurationError(
            f"--seq-length {seq_length}: the model's limit is {limit}, and {_SPARE} tokens are decoded after them: "
            f"give at most {most}"
        )
    return int(min(LONGEST_DEFAULT, most)) if seq_length is None else seq_length


def zipf_tokens(vocab_size: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Tokens (int64, CPU) whose frequencies fall as words' do (Zipf), so that a few steps have something to learn."""
    generator = torch.Generator().manual_seed(seed)
    weights_V = torch.arange(1, vocab_size + 1, dtype=torch.float64).pow(-1.1)  # about the exponent of words
    drawn = torch.rand(shape, dtype=torch.float64, generator=generator) * weights_V.sum()
    return torch.searchsorted(weights_V.cumsum(0), drawn).clamp(max=vocab_size - 1)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is measured: an fp32 ``model`` on the CPU, or one with packed linears in its folder's type, ``packed_in``,
    never changed; int64 tokens there, every step's and the one after.
    """

    model: nn.Module
    tokens_NBS: Tensor
    device: torch.device
    learning_rate: float
    packed_in: torch.dtype | None = None

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def climb(case: Case, rungs: Sequence[str], phases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each rung's measurements as JSON values, or the reason why there are none; standard error has what begins."""
    if case.device.type == "cuda":  # what the first products and their backward allocate for good counts for no rung
        leaf = torch.ones(16, 16, device=case.device, requires_grad=True)
        (leaf.exp() @ leaf).sum().backward()
    first: dict[str, Any] = {}  # logits and loss of the first rung that ran
    for number, rung in enumerate(rungs, 1):
        refused: dict[str, str] = {}
        flags = " ".join(_FLAGS[: LADDER.index(rung)]) if case.packed_in is None else ""
        row = {"name": rung, "flags": flags, "attention": "", "training": None, "inference": None, "refused": refused}
        for phase, measured in (("inference", _infer), ("training", _train)):
            if phase not in phases or (phase, rung) == ("inference", "checkpointing"):  # which changes nothing there
                continue
            print(f"{number}/{len(rungs)} {rung}: {phase}", file=sys.stderr, flush=True)
            try:
                row |= measured(case, rung, first)
            except VBError as error:
                refused[phase] = str(error)
            except torch.OutOfMemoryError:
                refused[phase] = "out of memory"
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        yield row


def _has(rung: str, what: str) -> bool:
    return rung != "packed" and LADDER.index(rung) >= LADDER.index(what)


def _attend(case: Case, rung: str, model: Any) -> tuple[torch.dtype, str]:
    """Chooses the attention that the rung asks for: the type of compute weights, and its name."""
    length, dtype = case.tokens_NBS.shape[2] - 1, torch.bfloat16 if _has(rung, "bf16") else torch.float32
    dtype = case.packed_in or dtype
    request = training.training_request(training.attention_heads(model), length, dtype, case.device)
    if dtype == torch.bfloat16 and not has_bf16(case.device):
        raise Unsupported(f"{torch.cuda.get_device_name(case.device)} does not compute in bf16")
    if not _has(rung, "flash"):
        kind = "sdpa" if isinstance(model, Decoder) else str(model.config._attn_implementation)
        return dtype, training.chosen_backend(request) if kind == "sdpa" else kind
    name = training.fused_backend(request)
    if isinstance(model, Decoder):
        model.use_attention(name)
        return dtype, name
    use_dispatcher(model)  # decoding may want another one
    return dtype, f"auto: {name}"


def _values(found: Measured, resting_bytes: int) -> dict[str, Any]:
    """A phase's median milliseconds, the most that was held at a time, weights included, and what took most time."""
    shares = asdict(found.bottleneck) | {"kind": found.bottleneck.kind}
    peak = resting_bytes + found.peak_bytes
    return {"milliseconds": found.milliseconds, "peak_bytes": peak, "bottleneck": shares}


@torch.no_grad()
def _infer(case: Case, rung: str, first: dict[str, Any]) -> dict[str, Any]:
    device, before = case.device, case.allocated_bytes()
    model: Any = copy.deepcopy(case.model)
    dtype, attention = _attend(case, rung, model)
    if case.packed_in is None:
        model.to(dtype=dtype)
    if case.packed_in is None and _has(rung, "fp4"):
        replace_linears(model, select_linears(model), FusedFP4Linear.from_linear)
    model.to(device).eval()
    for module in model.modules():
        if isinstance(module, FusedFP4Linear):
            module.quantize()
    tokens_BS = case.tokens_NBS[0, :, :-1].to(device)
    ours = isinstance(model, Decoder)
    logits_BSV = model(tokens_BS[:1]) if ours else model(input_ids=tokens_BS[:1], use_cache=False).logits
    logits_SV = logits_BSV[0].float().cpu()
    del logits_BSV

    def last_logits() -> Tensor:
        if ours:
            return model.lm_head(model.hidden(tokens_BS)[:, -1])
        return model(input_ids=tokens_BS, use_cache=False, logits_to_keep=1).logits

    found = measure(last_logits, device, holder=model)
    values = _values(found, case.allocated_bytes() - before if device.type == "cuda" else found.weight_bytes)
    step = stepper(model, tokens_BS.shape[1] + _SPARE)
    step(tokens_BS)
    values["token_milliseconds"] = time_of(lambda: step(tokens_BS[:, -1:]), device, NEW_TOKENS, WARM_UP)
    values |= {"weight_bytes": found.weight_bytes, "output_change": None}
    if "logits" in first:
        apart = difference(first["logits"], logits_SV)
        sqnr_db = apart.sqnr_db if math.isfinite(apart.sqnr_db) else None
        change = {"max": apart.absolute, "rms": apart.rms, "relative": apart.relative, "sqnr_db": sqnr_db}
        values["output_change"] = change
    first.setdefault("logits", logits_SV)
    return {"attention": attention, "inference": values}


def _train(case: Case, rung: str, first: dict[str, Any]) -> dict[str, Any]:
    with ExitStack() as cleanup:
        device, before = case.device, case.allocated_bytes()
        model = copy.deepcopy(case.model).train()
        dtype, attention = _attend(case, rung, model)
        if rung == "checkpointing":
            training.checkpoint_layers(model)
        if _has(rung, "fp4"):
            straight_through = functools.partial(FusedFP4Linear.from_linear, use_fp4=True)
            replace_linears(model, select_linears(model), straight_through)
        compute_dtype = dtype if _has(rung, "bf16") else None
        needed = bytes_when_resident(model, compute_dtype)
        capacity = needed + needed // 4 + 16 * MiB
        stack = VGPUStack([LevelConfig("cuda:0" if device.type == "cuda" else "arena", capacity)])
        cleanup.callback(stack.close)
        enable_vgpu_stack_optimization(
            model, stack, placement="resident", compute_dtype=compute_dtype, accelerate=False
        )
        engine = offload_of(model)
        assert engine is not None
        cleanup.callback(engine.close)
        compute_loss, tokens_NBS = training.training_loss(model), case.tokens_NBS.to(device)
        recipe: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}
        optimizer = VGPUAdamW(model.parameters(), lr=case.learning_rate, update_in_backward=True, **recipe)
        losses: list[Tensor] = []

        def step() -> None:
            tokens_BS = tokens_NBS[len(losses) % len(tokens_NBS)]
            loss = compute_loss(tokens_BS[:, :-1], tokens_BS[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(WARM_UP):
            step()
        synchronize(device)
        resting = case.allocated_bytes() - before
        found = measure(step, device, max(1, len(tokens_NBS) - WARM_UP), warmup=0)
        if device.type != "cuda":
            resting = stack.get_stats()["levels"][0]["used_bytes"]
        loss = float(losses[len(tokens_NBS) - 1])
        change = loss - first["loss"] if "loss" in first else None
        first.setdefault("loss", loss)
        return {"attention": attention, "training": _values(found, resting) | {"loss": loss, "loss_change": change}}


# -- the table ---------------------------------------------------------------------------------------------------------

_HEADERS = {
    "training": ("rung", "attention", "ms a step", "memory", "loss", "change", "most time in"),
    "inference": (
        "rung", "attention", "ms a pass", "ms a token", "memory", "weights", "rms change", "max", "most time in",
    ),
}  # fmt: skip


def _cells(row: dict[str, Any], phase: str) -> list[str]:
    found = row[phase]
    memory, most = format_bytes(found["peak_bytes"]), found["bottleneck"]
    if phase == "training":
        change = "" if found["loss_change"] is None else f"{found['loss_change']:+.4f}"
        numbers = [memory, f"{found['loss']:.4f}", change]
    else:
        output = found["output_change"]
        apart = ["", ""] if output is None else [f"{output['relative']:.2%}", f"{output['max']:.3g}"]
        numbers = [f"{found['token_milliseconds']:.2f}", memory, format_bytes(found["weight_bytes"]), *apart]
    inside = f" ({most['name']} {most['name_share']:.0%})" if most["name"] else ""
    spent = f"{most['kind']} {most['shares'].get(most['kind'], 0.0):.0%}{inside}"
    return [row["name"], row["attention"], f"{found['milliseconds']:.2f}", *numbers, spent]


def _lines(report: dict[str, Any]) -> list[str]:
    rows = report["rungs"]
    lines = [
        f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters, {report['batch_size']} x "
        f"{report['seq_length']} tokens, {report['device']}, torch {report['torch']}"
    ]
    for phase, header in _HEADERS.items():
        cells = [_cells(row, phase) for row in rows if row[phase] is not None]
        if cells:
            lines += ["", f"{phase}:", *(f"  {line}" for line in columns([header, *cells]))]
    lines += [
        "",
        f"change: from {rows[0]['name']}; rms change: of the logits, relative. Memory: weights and all else held at "
        "the peak.",
    ]
    refused = [(row["name"], *each) for row in rows for each in row["refused"].items()]
    return lines + [f"{name}, {phase}: not measured: {reason}" for name, phase, reason in refused]
