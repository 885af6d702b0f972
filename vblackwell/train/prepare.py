"""Everything of a run but its folder: data, model, memory and optimizer, from settings. What cannot work is refused
here, before anything is written.
"""

import inspect
import math
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.data.chat import ChatCorpus, ChatDataset, chat_kind, prepare_chat
from vblackwell.data.corpus import Corpus, Dataset, PackedDataset, prepare_data
from vblackwell.data.documents import find_text
from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.folders.chat_prompt import ChatTemplate
from vblackwell.folders.folder import stored_dtype
from vblackwell.kernels.fp4.w4a8 import check_device
from vblackwell.machine.device import cap_process, choose_precision, has_bf16
from vblackwell.machine.facts import disk_facts, memory_facts
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
from vblackwell.memory.level import level_in_words
from vblackwell.nn.convert.training import checkpoint_layers, training_loss
from vblackwell.nn.decoder.config import find_preset
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import bytes_when_resident, enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.groups import Formats, supports
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.planner.placement import Plan
from vblackwell.trace.trace import Untraceable
from vblackwell.train.auto import MAX_SEQUENCES, apply_plan, make_training_plan, planned_sizes
from vblackwell.train.config import TrainConfig
from vblackwell.train.defaults import (
    UNKNOWN_LENGTH,
    Facts,
    bound_length,
    choose,
    longest_document,
    longest_that_fits,
    most_sequences,
    shorter_lengths,
)
from vblackwell.train.model import (
    TrainableModel,
    check_length,
    check_rows,
    choose_attention,
    convert_linears,
    find_model,
    preset_model,
)
from vblackwell.train.progress import Progress, StopRequest
from vblackwell.train.trainer import LossScaler, Parts, Schedule, default_warmup_steps
from vblackwell.units import format_bytes

PROBE_TOKENS = 8  # of a document


@dataclass(kw_only=True)
class Prepared(Parts):
    """A run that is ready to start: ``config`` with steps and warm-up decided, whose tokenizer's files go with the
    model (None for the corpus' tokenizer), the attention backend that runs, in words.
    """

    config: TrainConfig
    model_config: dict[str, Any]
    corpus: Corpus
    tokenizer_folder: Path | None
    plan: Plan | None
    attention: str

    @property
    def template(self) -> ChatTemplate | None:
        """How conversations were written down; None for plain text, and for completions of plain prompts."""
        return self.corpus.template if isinstance(self.corpus, ChatCorpus) else None

    @property
    def turn_end(self) -> int | None:
        """The token that the model learns to end an answer with; None for plain text, or where the template writes
        none, or takes no plain question."""
        if isinstance(self.corpus, ChatCorpus) and self.template is None:
            return self.corpus.end_of_text_id
        with suppress(ConfigurationError):
            return None if self.template is None else self.template.turn_end(self.corpus.tokenizer)
        return None


@dataclass(frozen=True)
class Decided:
    """What a run is of, before anything takes memory: its settings as planned, model on the meta device and data."""

    config: TrainConfig
    found: TrainableModel
    compute_dtype: torch.dtype | None
    plan: Plan | None
    corpus: Corpus
    train: Dataset
    validation: Dataset

    @property
    def packs(self) -> bool:
        """Whether several documents share a row, which must not see each other."""
        return isinstance(self.train, ChatDataset) and self.train.packing

    @property
    def computed_in(self) -> str:
        return str(self.compute_dtype or torch.float32).removeprefix("torch.")


def decide(
    config: TrainConfig, device: torch.device, progress: Progress, stop: StopRequest, cleanup: ExitStack
) -> Decided:
    """Data, model and, where the flags ask for one, the plan, which is told. Raises as `prepare`."""
    if device.type == "cuda" and isinstance(config.fast_memory, int):
        cap_process(device, config.fast_memory)  # first: what probes and tunes keeps to it
    chosen_batch = config.auto_batch_size is None
    config, found, facts, reasons = begin(config, device, cleanup)  # before the data, which may take long to read
    compute_dtype = choose_precision(config.precision, config.mixed_precision, bf16=facts.bf16)
    if config.fp8_activations:
        check_device(device, "--fp8-activations", compute_dtype or torch.float32)
        check_rows(config)
    with stop.interrupting():
        corpus, train, validation = open_data(config, found, progress, facts, reasons)
    if config.auto_seq_length:
        config = replace(config, seq_length=train.seq_length)
    torch.manual_seed(config.seed)
    found = found or preset_model(config, corpus.vocab_size, corpus.end_of_text_id)
    found = convert_linears(config, found, device, progress.say)
    plan = None
    if config.vgpu_auto or config.auto_batch_size:
        bounded, before = chosen_batch and config.auto_batch_size, config.seq_length
        shorter = config.auto_seq_length and not config.deterministic
        lengths = shorter_lengths(config.seq_length) if shorter else (config.seq_length,)
        try:

            def plan_of(length: int) -> tuple[TrainConfig, Plan]:
                tried = replace(config, seq_length=length)
                most = most_sequences(len(train) * before // length) if bounded else MAX_SEQUENCES
                return tried, make_training_plan(tried, found.model, compute_dtype, device, progress.say, most)

            config, plan = longest_that_fits(lengths, plan_of)
            progress.say("\n".join(plan.lines()))
            config = apply_plan(config, plan)
            if config.seq_length < before:
                reasons.append(f"cut to {config.seq_length:,}, which fit")
                packs = isinstance(train, ChatDataset) and train.packing
                train, validation = make_datasets(config, corpus, packs)
            if reasons:
                reasons.append(f"{plan.choice}, the fastest of the plans that fit")
        except Untraceable as error:
            if config.plan or (config.auto_batch_size and not chosen_batch):
                raise
            config = replace(config, auto_batch_size=False)
            said = "No plan: sizes that are not given are probed, and the rest is as the flags say"
            progress.say(f"--vgpu-auto: {error}. {said}")
    if reasons:
        progress.say(f"chosen: {'; '.join(reasons)}")
    config = decide_steps(config, len(train))
    return Decided(config, found, compute_dtype, plan, corpus, train, validation)


def begin(
    config: TrainConfig, device: torch.device, cleanup: ExitStack
) -> tuple[TrainConfig, TrainableModel | None, Facts, list[str]]:
    """Settings with what is chosen before the data is seen, the model of ``--model``, what the choice went by, and the
    reasons for it."""
    found = find_model(config, cleanup)
    facts = facts_of(config, device, found)
    config, reasons = choose(config, facts)
    if found is not None and found.folder is not None and not config.auto_seq_length:
        check_length(config, found, found.folder / "config.json")
    return config, found, facts, reasons


def facts_of(config: TrainConfig, device: torch.device, found: TrainableModel | None) -> Facts:
    gpu, bf16 = device.type == "cuda", has_bf16(device)
    if found is None or found.folder is None:
        return Facts(gpu, bf16, None, find_preset(config.preset).max_position)
    return Facts(gpu, bf16, stored_dtype(found.folder), found.config.get("max_position_embeddings"))


def prepare(
    config: TrainConfig, device: torch.device, progress: Progress, stop: StopRequest, cleanup: ExitStack
) -> Prepared:
    """Data, model, stack and optimizer of a run. What must be closed is left to ``cleanup``. Raises Stopped: the run
    was asked to stop while its data was read; VBError: something of it cannot be had.
    """
    with ExitStack() as opened:
        prepared = _prepare(config, device, progress, stop, opened)
        if prepared is not None:
            cleanup.push(opened.pop_all())
            return prepared
    prepared = _prepare(replace(config, packing=False), device, progress, stop, cleanup)
    assert prepared is not None
    return prepared


def _prepare(
    config: TrainConfig, device: torch.device, progress: Progress, stop: StopRequest, cleanup: ExitStack
) -> Prepared | None:
    """As `prepare`; None, which is said, where the model mixes documents that were packed without being asked for."""
    decided = decide(config, device, progress, stop, cleanup)
    config, found, plan = decided.config, decided.found, decided.plan
    model, compute_dtype = found.model, decided.compute_dtype
    assert config.max_steps is not None and config.warmup_steps is not None
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    formats, attention, stack, state_bytes = set_up(decided, device, cleanup)
    progress.say(
        f"{config.name}: {sum(param.numel() for param in model.parameters()) / 1e6:.2f} M parameters, "
        f"{config.max_steps} steps of {config.tokens_per_step} tokens at a rate of {config.learning_rate:g}, "
        f"{decided.computed_in} on {device}, attention: {attention}"
    )
    cleanup.callback(lambda: (engine := offload_of(model)) and engine.close())  # also when what follows fails
    levels = [f"{level_in_words(level.name)} {format_bytes(level.capacity_bytes)}" for level in stack.levels]
    levels[0] += "" if device.type == "cuda" else " (RAM that stands for a GPU)"
    progress.say(f"memory: {', then '.join(levels)}; training state {format_bytes(state_bytes)}")
    activations = config.activations
    if activations == "auto":  # on a GPU in host memory, which is why one checkpoints there
        activations = "host" if config.gradient_checkpointing and device.type == "cuda" else "level0"
    enable_vgpu_stack_optimization(
        model,
        stack,
        placement=config.placement,
        compute_dtype=compute_dtype,
        update=config.update_place,
        activations=activations,
        states=formats.states,
        masters=formats.masters,
        rounding_seed=formats.seed,
        initialize=found.initialize,
        **({} if plan is None else planned_sizes(plan)),
    )
    engine = offload_of(model)
    if plan is not None and plan.updates is not None and isinstance(engine, Offload):
        engine.share_by(plan.updates)
    if decided.packs and not isinstance(model, Decoder):
        reason = why_not_apart(model, found.config["vocab_size"], device)
        if reason is not None:
            _not_packed(config, reason, progress)
            return None
    peak = config.learning_rate
    return Prepared(
        model=model,
        optimizer=make_optimizer(model, config),
        stack=stack,
        data=decided.train,
        validation=decided.validation,
        schedule=Schedule(peak, peak * config.min_learning_rate_ratio, config.warmup_steps, config.max_steps),
        scaler=LossScaler() if compute_dtype is torch.float16 else None,
        device=device,
        loss=training_loss(model),
        config=config,
        model_config=found.config,
        corpus=decided.corpus,
        tokenizer_folder=found.folder if config.tokenizer is None else None,
        plan=plan,
        attention=attention,
    )


def set_up(decided: Decided, device: torch.device, cleanup: ExitStack) -> tuple[Formats, str, VGPUStack, int]:
    """What a run asks of the machine after `decide`, and before it takes memory: AdamW's formats, the attention that
    runs, the stack, both until ``cleanup``, and the bytes of the training state. Raises Unsupported: the machine or the
    model has no such format or attention; others as `build_stack`.
    """
    config, dtype = decided.config, decided.compute_dtype
    formats = Formats(config.optimizer_states, config.masters, config.seed)
    if not supports(formats, [dtype or torch.float32]):
        flags = "--masters stochastic" if formats.stochastic else "--optimizer-states 8bit"
        remedy = "add --precision bf16, or drop the flag"
        raise Unsupported(f"{flags} cannot be had with {decided.computed_in} compute: {remedy}")
    attention = choose_attention(config, decided.found, dtype, device, cleanup, decided.packs)
    state_bytes = bytes_when_resident(decided.found.model, dtype, formats)
    stack = build_stack(config, device, decided.plan, state_bytes=state_bytes)
    cleanup.callback(stack.close)
    return formats, attention, stack, state_bytes


def decide_steps(config: TrainConfig, windows_per_epoch: int) -> TrainConfig:
    """``config`` with the number of steps and of warm-up steps that its epochs mean."""
    steps = config.max_steps
    if steps is None:
        windows = (config.epochs or 1.0) * windows_per_epoch
        steps = max(1, math.ceil(windows / (config.batch_size * config.accumulation_steps)))
    warmup = default_warmup_steps(steps) if config.warmup_steps is None else config.warmup_steps
    return replace(config, max_steps=steps, epochs=None, warmup_steps=warmup)


def make_optimizer(model: nn.Module, config: TrainConfig) -> VGPUAdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    return VGPUAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        max_grad_norm=config.max_grad_norm or math.inf,  # inf: measure, so that what is not finite is met, never clip
        update_in_backward=True,
        accumulation_steps=config.accumulation_steps,
    )


def open_data(
    config: TrainConfig,
    model: TrainableModel | None,
    progress: Progress,
    facts: Facts | None = None,
    reasons: list[str] | None = None,
) -> tuple[Corpus, Dataset, Dataset]:
    """The data of ``--data``, what of it is trained on, and what is held out. It is encoded with ``--tokenizer``, or
    else with that of the model's folder; without either one is trained. A length that is 'auto' is chosen by ``facts``,
    and ``reasons`` are told why."""
    path = None if config.data is None else Path(config.data)
    tokenizer_path = Path(config.tokenizer) if config.tokenizer is not None else model and model.folder
    source = find_text(path)
    if source.left_out:
        names = ", ".join(str(found.relative_to(source.root)) for found in source.left_out)
        progress.say(f"data: {source.name}: left out, being no data: {names}")
    kind = chat_kind(source)
    if kind is None:
        corpus = prepare_data(path, tokenizer_path, config.vocab_size, progress.phase)
    else:
        corpus = prepare_chat(source, kind, tokenizer_path, progress.phase)
    packs = config.packing is not False
    if kind is not None and packs and model is not None and (reason := why_no_positions(model.model)):
        _not_packed(config, reason, progress)
        packs = False
    if config.auto_seq_length and facts is not None:
        most = facts.positions or UNKNOWN_LENGTH
        length, why = bound_length(facts, longest_document(corpus, most), len(corpus.tokens) if kind is None else 0)
        config = replace(config, seq_length=length)
        (reasons if reasons is not None else []).append(why)
    train, validation = make_datasets(config, corpus, packs)
    if not isinstance(corpus, ChatCorpus):
        return corpus, train, validation
    assert isinstance(train, ChatDataset) and isinstance(validation, ChatDataset)
    shared = "several share a row, positions begin again at 0 with each and none sees another"
    how = shared if train.packing else "each has a separate row"
    written = "as they are" if corpus.template is None else f"with {corpus.template.origin}"
    learnt = "completions" if "completion" in corpus.kind else "answers"
    progress.say(
        f"data: {corpus.name}: {len(corpus.lengths)} conversations ({corpus.kind}), written {written}; "
        f"learnt are the {learnt}, {train.learnt_share:.0%} of the tokens; {train.conversations} to train on in "
        f"{len(train)} rows of {train.seq_length} ({train.filled:.0%} filled): {how}"
    )
    cut, left_out = train.cut + validation.cut, train.left_out + validation.left_out
    if cut:
        lost = f"; {left_out} of them have no answer before the cut and are left out" if left_out else ""
        progress.say(f"data: {cut} conversations are longer than --seq-length {train.seq_length} and cut there{lost}")
    return corpus, train, validation


def make_datasets(config: TrainConfig, corpus: Corpus, packs: bool) -> tuple[Dataset, Dataset]:
    """What of ``corpus`` is trained on, and what is held out, in rows of the run's length; ``packs``: conversations
    share them.
    """
    length, seed = config.seq_length, config.seed
    if isinstance(corpus, ChatCorpus):
        train = ChatDataset(corpus, length, seed=seed, packing=packs)
        return train, ChatDataset(corpus, length, "validation", packing=packs)
    return PackedDataset(corpus, length, seed=seed), PackedDataset(corpus, length, "validation")


def _not_packed(config: TrainConfig, reason: str, progress: Progress) -> None:
    """Say why conversations do not share rows; Unsupported where ``--packing`` asks for it."""
    if config.packing:
        raise Unsupported(f"--packing: {reason}: add --no-packing: each conversation gets a separate row")
    progress.say(f"no packing: {reason}: each conversation gets a separate row")


def why_no_positions(model: nn.Module) -> str | None:
    """Why ``model``, maybe on meta, cannot be told that positions begin again within a row; None where it can."""
    if isinstance(model, Decoder) or "position_ids" in inspect.signature(model.forward).parameters:
        return None
    return f"{type(model).__name__} takes no positions, by which documents of a row are kept apart"


@torch.no_grad()
def why_not_apart(model: nn.Module, vocab_size: int, device: torch.device) -> str | None:
    """How ``model``, one of transformers', mixes packed documents; None where it keeps them apart.

    Two rows end in the same document after different ones, a third begins with it; its logits must be the same in all.
    """
    made: Any = model
    generator = torch.Generator().manual_seed(0)
    first, other, same = torch.randint(vocab_size, (3, PROBE_TOKENS), generator=generator)
    rows = torch.stack((torch.cat((first, same)), torch.cat((other, same)), torch.cat((same, first)))).to(device)
    positions = torch.arange(PROBE_TOKENS).repeat(3, 2).to(device)
    training = model.training
    model.eval()
    try:
        logits_BSV = made(input_ids=rows, position_ids=positions, use_cache=False).logits.float()
    finally:
        model.train(training)
    alone = logits_BSV[2, :PROBE_TOKENS]
    # What is masked adds exact zeros; sums of other lengths may round otherwise, by a few units of the compute type.
    tolerance = (2e-2 if next(model.parameters()).dtype != torch.float32 else 1e-4) * float(alone.norm())
    apart = max(float((alone - after_another).norm()) for after_another in logits_BSV[:2, PROBE_TOKENS:])
    if apart <= tolerance:
        return None
    return (
        f"{type(model).__name__} lets a document see what is before it in its row (its logits differ by "
        f"{apart / max(float(alone.norm()), 1e-30):.2g} of their norm)"
    )


def build_stack(
    config: TrainConfig, device: torch.device, plan: Plan | None = None, *, state_bytes: int | None = None
) -> VGPUStack:
    """The stack of a run on ``device``: of the sizes that were planned, or else asked for. ``state_bytes``: the most
    that will come to a level, by default all that it may hold. Raises ConfigurationError: a size that the machine does
    not have, a path that is no directory on a disk; InsufficientMemory: less is free than the sizes need.
    """
    if config.disk_memory:  # its bytes are reserved when they are first needed: a run is told before
        assert isinstance(config.disk_memory, int)
        disk = disk_facts(config.disk_path or default_disk_path())
        total, free = shutil.disk_usage(disk.path).total, disk.free_bytes
        said = f"{format_bytes(free)} of {format_bytes(total)} are free at {disk.path}"
        said = f"--disk-memory {format_bytes(config.disk_memory)}: {said}"
        remedy = "make room, choose another --disk-path, or lower --disk-memory"
        _refuse_lack(config.disk_memory, state_bytes, total, free, said, remedy)
    if device.type == "cpu":  # levels 0 and 1 are RAM: a run that fills both would be killed without a word
        asked = {"--fast-memory": config.fast_memory, "--host-memory": config.host_memory}
        given = {flag: size for flag, size in asked.items() if isinstance(size, int) and size}
        facts = memory_facts()
        total, free = facts.total_bytes, facts.available_bytes
        said = " and ".join(f"{flag} {format_bytes(size)}" for flag, size in given.items()) + " are RAM on a CPU: "
        said += f"{format_bytes(free)} of {format_bytes(total)} are available (limited by {facts.limited_by})"
        _refuse_lack(sum(given.values()), state_bytes, total, free, said, "give less")
    sizes = (config.fast_memory, config.host_memory, config.disk_memory if config.has_disk else 0)
    if plan is not None:
        sizes = (plan.choice.level0_bytes, plan.bounds.host, plan.bounds.disk)
    return create_vgpu_stack(*sizes, config.disk_path, device=device, cap_process=False)  # `prepare` does, first of all


def _refuse_lack(asked: int, state_bytes: int | None, total: int, free: int, said: str, remedy: str) -> None:
    """Caps are held against what there is in all; what is free now need only hold the run's state, if that is less."""
    needed = asked if state_bytes is None else min(asked, state_bytes)
    if asked > total or needed > free:
        raise InsufficientMemory(
            f"{said}, and up to {format_bytes(needed)} are needed; {remedy}", needed_bytes=needed, available_bytes=free
        )
