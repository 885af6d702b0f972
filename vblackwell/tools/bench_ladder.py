"""The rungs that ``vb bench`` measures: from fp32 through bf16, FP4, fused attention and checkpointing, each with what the one before has.

Every rung starts from the same weights, sees the same tokens and does what the flags of ``vb train`` do. Training goes through the
resident engine (fp32 masters, our AdamW with clipping), so what is compared is arithmetic and kernels, not places of bytes. Inference is
one pass over the batch up to the logits behind its last token, and then tokens one by one with a cache; linears of the FP4 rungs are
packed there.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import Unsupported, VBError
from vblackwell.generate.generate import stepper
from vblackwell.machine.device import has_bf16
from vblackwell.memory.cache.config import LevelConfig
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.attention.interface import use_dispatcher
from vblackwell.nn.convert.linears import convert_linears
from vblackwell.nn.convert.training import attention_heads, chosen_backend, fused_backend, training_loss
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import bytes_when_resident, enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.tools.compare import Comparison, difference
from vblackwell.tools.cost import Bottleneck, Measured, measure, time_of, weight_bytes
from vblackwell.units import MiB

NEW_TOKENS = 8  # decoded one by one; their median counts
_WARM_UP = 2


@dataclass(frozen=True)
class Rung:
    """What is switched on. ``flags``: of ``vb train``, for the same."""

    name: str
    flags: str
    bf16: bool = False
    fp4: bool = False
    flash: bool = False
    checkpointing: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """What the weights are computed in; None: fp32, as they are."""
        return torch.bfloat16 if self.bf16 else None


_BF16 = Rung("bf16", "--mixed-precision", bf16=True)
_FP4 = replace(_BF16, name="fp4", flags=f"{_BF16.flags} --use-fp4", fp4=True)
_FLASH = replace(_FP4, name="flash", flags=f"{_FP4.flags} --use-flash-attn", flash=True)
_LAST = replace(_FLASH, name="checkpointing", flags=f"{_FLASH.flags} --gradient-checkpointing", checkpointing=True)
LADDER = (Rung("fp32", ""), _BF16, _FP4, _FLASH, _LAST)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        model: fp32, on the CPU; never changed.
        tokens_NBS: (steps, B, S + 1) int64 on the CPU: every training step's tokens and the one behind the last.
        learning_rate: of all steps.
    """

    model: nn.Module
    tokens_NBS: Tensor
    device: torch.device
    learning_rate: float

    @property
    def num_steps(self) -> int:
        """Timed training steps."""
        return len(self.tokens_NBS)


@dataclass(frozen=True)
class Phase:
    """Training or inference of a rung.

    Attributes:
        milliseconds: a training step, or a pass over the batch; median.
        peak_bytes: most that was held at a time, weights and, in training, gradients, AdamW states and masters included.
    """

    milliseconds: float
    peak_bytes: int
    bottleneck: Bottleneck


@dataclass(frozen=True)
class Row:
    """A rung, measured. What was refused is None, with the reason in ``refused`` under 'training' or 'inference'.

    Attributes:
        attention: backend that runs.
        loss: of the last step.
        loss_change: from the first rung's that was trained.
        token_milliseconds: to decode one token for each sequence of the batch.
        weight_bytes: of the model at inference.
        output: last-batch logits (first sequence) against those of the first rung that ran; None of that one.
    """

    rung: Rung
    attention: str = ""
    training: Phase | None = None
    loss: float | None = None
    loss_change: float | None = None
    inference: Phase | None = None
    token_milliseconds: float | None = None
    weight_bytes: int | None = None
    output: Comparison | None = None
    refused: dict[str, str] = field(default_factory=dict)


def climb(case: Case, rungs: tuple[Rung, ...], phases: tuple[str, ...], say: Callable[[str], None]) -> Iterator[Row]:
    """Each rung's row. A rung that does not fit the memory, or is refused, says so in its row; the next one is tried.

    Args:
        phases: 'training', 'inference' or both.
        say: told what begins.
    """
    _begin(case.device)
    first_logits: Tensor | None = None
    first_loss: float | None = None
    for number, rung in enumerate(rungs, 1):
        refused: dict[str, str] = {}
        row = Row(rung, refused=refused)
        if "inference" in phases and not rung.checkpointing:  # which changes nothing there
            say(f"{number}/{len(rungs)} {rung.name}: inference")
            with _refusals(refused, "inference"):
                row, logits_SV = _infer(case, rung, row)
                if first_logits is None:
                    first_logits = logits_SV
                else:
                    row = replace(row, output=difference(first_logits, logits_SV))
        if "training" in phases:
            say(f"{number}/{len(rungs)} {rung.name}: training")
            with _refusals(refused, "training"):
                row = _train(case, rung, row)
                if first_loss is None:
                    first_loss = row.loss
                elif row.loss is not None:
                    row = replace(row, loss_change=row.loss - first_loss)
        yield row


def _begin(device: torch.device) -> None:
    """What the first products of a process and of its backward allocate for good must not count for the first rung."""
    if device.type == "cuda":
        leaf = torch.ones(16, 16, device=device, requires_grad=True)
        (leaf.exp() @ leaf).sum().backward()


@contextmanager
def _refusals(refused: dict[str, str], phase: str) -> Iterator[None]:
    try:
        yield
    except VBError as error:
        refused[phase] = str(error)
    except torch.OutOfMemoryError:
        refused[phase] = "out of memory"
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _attend(case: Case, rung: Rung, model: nn.Module) -> str:
    """Chooses the attention that the rung asks for; its name."""
    length = case.tokens_NBS.shape[2] - 1
    wanted = (*attention_heads(model), length, rung.dtype or torch.float32, case.device)
    if rung.bf16 and not has_bf16(case.device):
        raise Unsupported(f"{torch.cuda.get_device_name(case.device)} does not compute in bf16")
    made: Any = model
    if not rung.flash:
        kind = "sdpa" if isinstance(model, Decoder) else str(made.config._attn_implementation)
        return chosen_backend(*wanted) if kind == "sdpa" else kind
    name = fused_backend(*wanted)
    if isinstance(model, Decoder):
        model.use_attention(name)
        return name
    use_dispatcher(model)  # decoding may want another one
    return f"auto: {name}"


# -- inference -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _infer(case: Case, rung: Rung, row: Row) -> tuple[Row, Tensor]:
    device = case.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = copy.deepcopy(case.model).to(dtype=rung.dtype or torch.float32)
    attention = _attend(case, rung, model)
    if rung.fp4:
        convert_linears(model, use_fp4=False)
    model.to(device).eval()
    for module in model.modules():
        quantize: Any = getattr(module, "quantize", None)
        if rung.fp4 and quantize is not None:
            quantize()
    tokens_BS = case.tokens_NBS[0, :, :-1].to(device)
    logits_SV = _logits(model, tokens_BS[:1])[0].float().cpu()
    found = measure(lambda: _last_logits(model, tokens_BS), device)
    held = weight_bytes(model)
    resting = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else held
    row = replace(
        row, attention=attention, inference=Phase(found.cost.milliseconds, resting + found.cost.peak_bytes, found.bottleneck),
        token_milliseconds=_token_milliseconds(model, tokens_BS), weight_bytes=held,
    )  # fmt: skip
    return row, logits_SV


def _logits(model: Any, tokens_BS: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model(tokens_BS)
    return model(input_ids=tokens_BS, use_cache=False).logits


def _last_logits(model: Any, tokens_BS: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model.lm_head(model.hidden(tokens_BS)[:, -1])
    return model(input_ids=tokens_BS, use_cache=False, logits_to_keep=1).logits


def _token_milliseconds(model: nn.Module, tokens_BS: Tensor) -> float:
    step = stepper(model, tokens_BS.shape[1] + 2 * NEW_TOKENS)
    step(tokens_BS)

    def decode() -> None:
        step(tokens_BS[:, -1:])

    return time_of(decode, tokens_BS.device, NEW_TOKENS, _WARM_UP)


# -- training ------------------------------------------------------------------------------------------------------------


def _train(case: Case, rung: Rung, row: Row) -> Row:
    with ExitStack() as cleanup:
        device = case.device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model = copy.deepcopy(case.model).train()
        attention = _attend(case, rung, model)
        if rung.checkpointing:
            _checkpoint(model)
        if rung.fp4:
            convert_linears(model)
        needed = bytes_when_resident(model, rung.dtype)
        stack = VGPUStack(
            [LevelConfig("cuda:0" if device.type == "cuda" else "arena", needed + needed // 4 + 16 * MiB)]
        )
        cleanup.callback(stack.close)
        enable_vgpu_stack_optimization(model, stack, placement="resident", compute_dtype=rung.dtype)
        cleanup.callback(_close, model)
        trainer = _Steps(case, model)
        found = trainer.measured()
        level = stack.get_stats()["levels"][0]["used_bytes"]
        resting = trainer.resting_bytes - before if device.type == "cuda" else level
        phase = Phase(found.cost.milliseconds, resting + found.cost.peak_bytes, found.bottleneck)
        return replace(
            row, attention=row.attention or attention, training=phase, loss=trainer.losses[case.num_steps - 1]
        )


def _checkpoint(model: nn.Module) -> None:
    if isinstance(model, Decoder):
        model.gradient_checkpointing = True
        return
    made: Any = model
    if not getattr(made, "supports_gradient_checkpointing", False):
        raise Unsupported(f"{type(model).__name__} does not offer gradient checkpointing")
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _close(model: nn.Module) -> None:
    engine = offload_of(model)
    if engine is not None:
        engine.close()


class _Steps:
    """Training steps over the case's tokens, again from the first when they end; ``losses`` of all steps so far."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self._case = case
        self._loss = training_loss(model)
        self._optimizer = VGPUAdamW(
            model.parameters(), lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0,
            update_in_backward=True,
        )  # fmt: skip
        self._tokens_NBS = case.tokens_NBS.to(case.device)
        self._kept: list[Tensor] = []
        self.resting_bytes = 0

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in self._kept]

    def step(self) -> None:
        tokens_BS = self._tokens_NBS[len(self._kept) % len(self._tokens_NBS)]
        loss = self._loss(tokens_BS[:, :-1], tokens_BS[:, 1:])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._kept.append(loss.detach())

    def measured(self) -> Measured:
        """Warm-up, timed and profiled steps."""
        for _ in range(_WARM_UP):
            self.step()
        if self._case.device.type == "cuda":
            torch.cuda.synchronize(self._case.device)
            self.resting_bytes = torch.cuda.memory_allocated(self._case.device)
        return measure(self.step, self._case.device, max(1, self._case.num_steps - _WARM_UP), warmup=0)
