"""Everything of a run but its folder: data, model, memory and optimizer, from settings.

What cannot work is refused here, before anything is written.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.data.chat_template import ChatTemplate
from vblackwell.data.corpus import Corpus
from vblackwell.data.dataset import BatchStream
from vblackwell.data.inspect_data import inspect_lines
from vblackwell.errors import Unsupported
from vblackwell.generate.adapters import adapt, adapted, packed_linears
from vblackwell.machine.device import Precision, cap_process, choose_precision
from vblackwell.nn.attention.interface import use_dispatcher, why_not
from vblackwell.nn.convert.assignment import BITS, Assignment, apply_assignment
from vblackwell.nn.convert.lora_config import Lora
from vblackwell.nn.convert.model import convert
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import bytes_when_resident, enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.layout.formats import Formats, supports
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.planner.placement import Plan
from vblackwell.trace.trace import refuse_frozen
from vblackwell.train.attention import attention_backends, chosen_backend, fused_backend
from vblackwell.train.auto import apply_plan, plan_run, planned_sizes
from vblackwell.train.config import TrainConfig
from vblackwell.train.levels import build_stack, describe_levels
from vblackwell.train.model import Learner, Source, find_source, fuse
from vblackwell.train.progress import Progress
from vblackwell.train.run_data import check_packing, open_data
from vblackwell.train.scaler import LossScaler
from vblackwell.train.schedule import Schedule, default_warmup_steps
from vblackwell.train.signals import StopRequest
from vblackwell.train.trainer import Parts
from vblackwell.units import format_bytes


@dataclass
class Prepared:
    """A run that is ready to start.

    Attributes:
        config: with ``max_steps`` and ``warmup_steps`` decided.
        model_config: the model's Hugging Face config.json.
        tokenizer_folder: the folder whose tokenizer's files go with the model; None to write the corpus' tokenizer.
        template: how conversations were written down; None for plain text.
        plan: what ``config`` and the stack follow, where one was asked for.
        attention: the backend that runs, in words.
    """

    config: TrainConfig
    model_config: dict[str, Any]
    corpus: Corpus
    parts: Parts
    tokenizer_folder: Path | None = None
    template: ChatTemplate | None = None
    plan: Plan | None = None
    attention: str = ""

    @property
    def turn_end(self) -> int | None:
        """The token that the model learns to end an answer with; None for plain text."""
        return None if self.template is None else self.template.turn_end(self.corpus.tokenizer)


def prepare(
    config: TrainConfig, device: torch.device, progress: Progress, stop: StopRequest, cleanup: ExitStack
) -> Prepared:  # fmt: skip
    """Data, model, stack and optimizer of a run. What must be closed is left to ``cleanup``.

    Raises:
        Stopped: somebody asked the run to stop while its data was read.
        VBError: whatever of it cannot be had.
    """
    if device.type == "cuda" and isinstance(config.fast_memory, int):
        cap_process(device, config.fast_memory)  # first: what probes and tunes keeps to it
    source = find_source(config, cleanup)  # before the data, which may take long to read
    with stop.interrupting():
        data = open_data(config, source.tokenizer_path, progress)
    corpus = data.corpus
    torch.manual_seed(config.seed)
    learner = source.build(config, corpus)
    model = learner.model
    if config.lora is not None:
        learner = _adapt(config, learner, source, device, progress)
    elif config.use_fp4:
        _use_fp4(config, model, progress)
    elif config.assignment is not None:
        _use_assignment(config.assignment, model, progress)
    refuse_frozen(model)
    fused = fuse(model)
    if fused is not None:
        progress.say(
            f"{type(model).__name__} of transformers, fused where that is the same: {fused}".replace("\n", ", ")
        )
    precision = choose_precision(config.precision, config.mixed_precision, device)
    plan = plan_run(config, model, precision, device, progress)
    config = decide_steps(config if plan is None else apply_plan(config, plan), len(data.train))
    if config.gradient_checkpointing:
        _checkpoint_layers(model)
    formats = choose_formats(config, precision)
    attention = _choose_attention(config, learner, precision, device, cleanup, data.packs_documents)
    progress.say(
        f"{config.name}: {sum(param.numel() for param in model.parameters()) / 1e6:.2f} M parameters, {config.max_steps} steps of "
        f"{config.tokens_per_step} "
        f"tokens at a rate of {config.learning_rate:g}, {precision.name} on {device}, attention: {attention}"
    )
    state_bytes = bytes_when_resident(model, precision.compute_dtype, formats)
    stack = build_stack(config, device, plan, state_bytes=state_bytes)
    cleanup.callback(stack.close)
    cleanup.callback(_close_engine, model)  # first, and also when what follows fails
    progress.say(f"memory: {describe_levels(stack)}; training state {format_bytes(state_bytes)}")
    enable_vgpu_stack_optimization(
        model, stack, placement=config.placement, compute_dtype=precision.compute_dtype, update=place_or_share(config.update),
        activations=choose_activations(config, device), states=formats.states, masters=formats.masters,
        rounding_seed=formats.seed, initialize=learner.initialize, **({} if plan is None else planned_sizes(plan)),
    )  # fmt: skip
    if data.packs_documents and not isinstance(model, Decoder):
        check_packing(model, learner.config["vocab_size"], device)
    parts = Parts(
        model=model,
        optimizer=_make_optimizer(model, config),
        stack=stack,
        stream=BatchStream(data.train, config.batch_size),
        validation=data.validation,
        schedule=_make_schedule(config),
        scaler=LossScaler() if precision.needs_scaler else None,
        device=device,
        loss=learner.loss,
    )
    return Prepared(config, learner.config, corpus, parts, source.tokenizer_folder, data.template, plan, attention)


def inspect_data(config: TrainConfig, progress: Progress) -> None:
    """``--inspect-data``: print the first rows as the model would see them.

    Raises:
        VBError: the model's folder, its tokenizer or the data cannot be used.
    """
    with ExitStack() as opened:
        source = find_source(config, opened)
        data = open_data(config, source.tokenizer_path, progress)
    for line in inspect_lines(data.train, data.corpus.tokenizer):
        progress.say(line)


def _adapt(
    config: TrainConfig, learner: Learner, source: Source, device: torch.device, progress: Progress
) -> Learner:  # fmt: skip
    """Adapters around the model's linears, over a base that is frozen and, with ``--use-fp4``, packed."""
    assert config.lora is not None and config.model is not None and learner.initialize is not None
    assert source.folder is not None
    model, given = learner.model, Path(config.model)
    name = str(given.resolve()) if given.is_dir() else config.model
    fill = adapt(
        model, learner.initialize, source.folder, Lora.parse(config.lora), name=name, fp4="nvfp4" if config.use_fp4 else None,
        fp4_layers=config.fp4_layers, keep=config.keep, tiled=device.type == "cuda", seed=config.seed, device=device,
    )  # fmt: skip
    made = adapted(model)
    assert made is not None
    trained = [param.numel() for param in model.parameters() if param.requires_grad]
    left = [f"{left} ({reason})" for left, reason in made.packed.items() if reason is not None and ".lora_" not in left]
    base = (
        f"packed to nvfp4 in {packed_linears(model)} linears (left: {', '.join(left[:3]) or 'none'})"
        if made.packed
        else "as it is"
    )
    progress.say(
        f"--lora: rank {made.lora.rank}, scale {made.lora.scale:g}, around {len(trained) // 2} linears "
        f"({', '.join(made.config['target_modules'])}): {sum(trained) / 1e6:.2f} M parameters are trained; the base is frozen, {base}"
    )
    return replace(learner, initialize=fill)


def _use_fp4(config: TrainConfig, model: nn.Module, progress: Progress) -> None:
    """Linears, and experts, straight through nvfp4; heads, embeddings and norms stay as they are."""
    done = convert(model, fp4_layers=config.fp4_layers, keep=config.keep, attention=None, fused=False)
    experts = len(done.replaced.get("experts", []))
    progress.say(
        f"--use-fp4: {len(done.replaced.get('linear', []))} linears {f'and the experts of {experts} layers ' if experts else ''}compute "
        "with their weights rounded to nvfp4, gradients straight through; masters stay fp32, and so do the saved weights (vb quantize "
        f"packs them)\n{done}"
    )


def _use_assignment(path: str, model: nn.Module, progress: Progress) -> None:
    """Linears straight through the precisions that a file assigns to them."""
    assignment = Assignment.load(path)
    apply_assignment(model, assignment, "training")
    counts = ", ".join(f"{len(assignment.names(precision))} in {precision}" for precision in BITS)
    progress.say(
        f"--assignment: {counts}, {assignment.bits:.2f} bits a weight of theirs; gradients straight through, masters stay fp32, and so do "
        "the saved weights"
    )


def _checkpoint_layers(model: nn.Module) -> None:
    if isinstance(model, Decoder):
        model.gradient_checkpointing = True
        return
    made: Any = model
    if not made.supports_gradient_checkpointing:
        raise Unsupported(f"--gradient-checkpointing: {type(model).__name__} does not offer it; leave the flag out")
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _choose_attention(
    config: TrainConfig, learner: Learner, precision: Precision, device: torch.device, cleanup: ExitStack, packs: bool
) -> str:
    """Allow what the flags allow until ``cleanup``; the backend that runs in this model."""
    if packs and config.use_flash_attn:
        raise Unsupported(
            "--use-flash-attn fixes a backend for causal attention, and conversations that share rows need a mask: add --no-packing"
        )
    allowed = attention_backends(use_flash_attn=config.use_flash_attn, deterministic=config.deterministic)
    cleanup.enter_context(allowed)
    model: Any = learner.model
    kind, foreign = getattr(model.config, "_attn_implementation", "sdpa"), not isinstance(model, Decoder)
    if config.use_flash_attn and foreign:
        _refuse_foreign(model, config.seq_length)
    elif kind != "sdpa":
        return kind
    elif packs and device.type == "cuda" and (not foreign or why_not(model) is None):
        # Documents that share rows need a mask, for which SDPA's fastest is nine times slower (docs/log-attention.md).
        if foreign:
            cleanup.callback(use_dispatcher(model))
        return "the dispatcher's, with a mask of documents"
    wanted = (*learner.heads, config.seq_length, precision.compute_dtype or torch.float32, device)
    if not config.use_flash_attn:
        return chosen_backend(*wanted)
    name = fused_backend(*wanted, deterministic=config.deterministic)
    if foreign:
        cleanup.callback(use_dispatcher(model, name, cached="auto"))  # the sample at the end writes with a cache
    else:
        model.use_attention(name)
    return f"{name}, as --use-flash-attn asks"


def _refuse_foreign(model: Any, seq_length: int) -> None:
    """Raises Unsupported where a model of transformers cannot be told how to attend, or needs more than causality."""
    reason, window = why_not(model), getattr(model.config.get_text_config(), "sliding_window", None)
    if reason is None and window is not None and window < seq_length:
        reason = f"its sliding window of {window} is shorter than --seq-length {seq_length} and needs a mask"
    if reason is not None:
        raise Unsupported(f"--use-flash-attn: {type(model).__name__}: {reason}; leave the flag out")


def place_or_share(text: str) -> str | float:
    """``--update`` as `enable_vgpu_stack_optimization` takes it: a place by its name, or a share."""
    try:
        return float(text)
    except ValueError:
        return text


def choose_formats(config: TrainConfig, precision: Precision) -> Formats:
    """What ``--optimizer-states`` and ``--masters`` mean.

    Raises:
        Unsupported: the compute type cannot be kept so.
    """
    formats = Formats(config.optimizer_states, config.masters, config.seed)
    if not supports(formats, [precision.compute_dtype or torch.float32]):
        flags = "--masters stochastic" if formats.stochastic else "--optimizer-states 8bit"
        raise Unsupported(
            f"{flags} cannot be had with {precision.name} compute: add --precision bf16, or drop the flag"
        )
    return formats


def choose_activations(config: TrainConfig, device: torch.device) -> str:
    """Where checkpointed layers' inputs wait: on a GPU in host memory, which is why one checkpoints there."""
    if config.activations != "auto":
        return config.activations
    return "host" if config.gradient_checkpointing and device.type == "cuda" else "level0"


def decide_steps(config: TrainConfig, windows_per_epoch: int) -> TrainConfig:
    """``config`` with the number of steps and of warm-up steps that its epochs mean."""
    steps = config.max_steps
    if steps is None:
        windows = (config.epochs or 1.0) * windows_per_epoch
        steps = max(1, math.ceil(windows / (config.batch_size * config.accumulation_steps)))
    warmup = default_warmup_steps(steps) if config.warmup_steps is None else config.warmup_steps
    return replace(config, max_steps=steps, epochs=None, warmup_steps=warmup)


def _make_optimizer(model: nn.Module, config: TrainConfig) -> VGPUAdamW:
    matrices = [param for param in model.parameters() if param.requires_grad and param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.requires_grad and param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return VGPUAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        # inf: measure, so that what is not finite is met, and never clip.
        max_grad_norm=config.max_grad_norm or math.inf,
        update_in_backward=True,
        accumulation_steps=config.accumulation_steps,
    )


def _make_schedule(config: TrainConfig) -> Schedule:
    assert config.max_steps is not None and config.warmup_steps is not None
    floor = config.learning_rate * config.min_learning_rate_ratio
    return Schedule(config.learning_rate, floor, config.warmup_steps, config.max_steps)


def _close_engine(model: nn.Module) -> None:
    engine = offload_of(model)
    if engine is not None:
        engine.close()
