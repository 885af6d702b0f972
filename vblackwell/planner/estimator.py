"""How much memory a model will take, before anything is run: builds the module without weights and asks `vblackwell.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, nearest
from vblackwell.machine.gpus import NUM_SMS, RUNTIME_BYTES, context_bytes
from vblackwell.machine.rates import Rates
from vblackwell.memory.disk import PIECE_BYTES, THREADS
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.forecast import auto_share, forecast_step
from vblackwell.offload.layout.formats import EXACT
from vblackwell.offload.layout.groups import Group, find_groups
from vblackwell.offload.layout.lanes import LaneTimes, simulate
from vblackwell.offload.layout.pieces import num_elements
from vblackwell.offload.layout.placement import (
    CUDA_ACTIVATION_SHARE,
    CUDA_GROUPS,
    StreamingOptions,
    bytes_by_level,
    deferred_groups,
)
from vblackwell.planner.level_sizes import StackConfig, stack_config
from vblackwell.planner.memory_estimate import (
    Batches,
    MemoryEstimate,
    estimate_trace,
    fits,
    optimizer_named,
    part_of,
    peak_of,
)
from vblackwell.planner.model_spec import Subject, check_batch, find_subject, of_decoder
from vblackwell.trace.allocator import MIN_LARGE, replay, round_size, segment_size
from vblackwell.trace.causal_lm import language_batch, plain_batches
from vblackwell.trace.trace import Trace, trace_training
from vblackwell.trace.work import phase_seconds, streaming_work
from vblackwell.units import MiB, format_bytes

PRECISIONS = ("fp32", "bf16", "autocast")
PLENTY = 1 << 50
NOT_STATE = ("activations", "logits_and_loss", "workspace")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder and its batch, as `VGPUResourceEstimator` takes them.

    Args:
        vocab_size, hidden_size, num_layers, num_heads: the decoder's shape.
        seq_length, batch_size: tokens in a sequence, sequences in a forward.
        intermediate_size: of the feed-forward; None: 8/3 of ``hidden_size``, rounded up to 64, as Llama's.

    Raises:
        ConfigurationError: a size below 1, or a batch beyond any GPU.
    """

    vocab_size: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    seq_length: int = 1024
    batch_size: int = 8
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}: give a number between 1 and {(1 << 31) - 1}"
                )
        check_batch(self.batch_size, self.seq_length)

    def decoder(self) -> DecoderConfig:
        """The shape alone."""
        wide = self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64
        return DecoderConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=wide, num_layers=self.num_layers,
            num_heads=self.num_heads, max_position=self.seq_length,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A subject and how it is trained.

    Args:
        optimizer: of `vblackwell.planner.memory_estimate.OPTIMIZERS`. precision: of `PRECISIONS`.
        capability: of the GPU. expandable: segments of the allocator. num_sms: multiprocessors of the GPU.
    """

    subject: Subject
    seq_length: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    capability: tuple[int, int] = (8, 0)
    expandable: bool = False
    num_sms: int = NUM_SMS

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigurationError(
                f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}{nearest(self.precision, PRECISIONS)}"
            )
        optimizer_named(self.optimizer)

    def model(self) -> nn.Module:
        """The module on meta."""
        return self.prepared(self.subject.build(torch.bfloat16 if self.precision == "bf16" else torch.float32))

    def prepared(self, model: nn.Module) -> nn.Module:
        """``model`` with its checkpointing switched on, if that is asked for."""
        if self.checkpointing:
            if isinstance(model, Decoder):
                model.gradient_checkpointing = True
            elif hasattr(model, "gradient_checkpointing_enable"):
                _checkpoint(model)
            else:
                raise ConfigurationError(
                    f"{self.subject.name} has no switch for gradient checkpointing: leave the flag out"
                )
        if self.precision == "autocast" and isinstance(model, Decoder):
            raise ConfigurationError(
                "presets compute in bf16 from bf16 weights with fp32 masters, not under autocast: use --precision bf16"
            )
        return model

    def trace(self, batch_size: int) -> Trace:
        """What two steps with that batch allocate."""
        autocast = torch.bfloat16 if self.precision == "autocast" else None
        batch = language_batch(self.subject.vocab_size, batch_size, self.seq_length)
        model = self.model()
        with plain_batches():
            return trace_training(
                model, batch, self.subject.loss, optimizer_named(self.optimizer), autocast=autocast, capability=self.capability,
                num_sms=self.num_sms,
            )  # fmt: skip

    def largest_batch(self, gpu_bytes: int) -> int:
        """The largest batch whose replay fits a GPU of that size with P99's margin; 0 where one sequence does not."""
        one = self.trace(1)
        if not self.fits(one, gpu_bytes):
            return 0
        return Batches(self.trace, one).largest(lambda trace: self.fits(trace, gpu_bytes))

    def fits(self, trace: Trace, gpu_bytes: int) -> bool:
        """Whether the replay of ``trace`` fits a GPU of that size with P99's margin."""
        return fits(trace, gpu_bytes, self.capability, self.expandable)


def _checkpoint(model: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed in newer versions of transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def threads_bytes() -> int:
    """RAM that the threads of a disk level take in addition to the levels: a piece each. Eight were seen to take 70 MiB."""
    return THREADS * PIECE_BYTES


@dataclass(frozen=True)
class OffloadEstimate:
    """What the offload stack would hold, from the same code that places a model.

    Attributes:
        level0: bytes of level 0 for loaded weights, states passing through, gradients; activations and context come on top.
        host, disk: bytes of each; beside the RAM level's those that a disk level's threads take where it is used.
        step: activations, logits and workspace of the step.
        fragmentation: what the allocator reserves for both beyond what they take.
        refused: why it does not fit, instead of numbers.
    """

    level0: int
    host: int
    disk: int
    step: int
    fragmentation: int = 0
    refused: str | None = None


def estimate_offload(run: Run, trace: Trace, gpu_bytes: int, host_bytes: int, disk_bytes: int) -> OffloadEstimate:
    """The bytes of a streamed run beside the activations of ``trace`` on a GPU of ``gpu_bytes``."""
    step = peak_of(trace, NOT_STATE, outside="optimizer")  # the engine's own AdamW takes the place of torch's
    left = gpu_bytes - context_bytes(run.capability) - RUNTIME_BYTES - step
    if left <= 0:
        return OffloadEstimate(
            0, 0, 0, step, refused=f"activations, logits and workspace of this batch take {format_bytes(step)} alone"
        )
    threads = threads_bytes() if disk_bytes else 0
    capacities = [left, max(host_bytes // 2, host_bytes - threads)] + ([disk_bytes] if disk_bytes else [])
    try:
        table, late = _streamed(run.model(), capacities)
    except InsufficientMemory as error:
        said = f"{error}. Activations, logits and workspace of this batch take {format_bytes(step)} of the {format_bytes(gpu_bytes)}"
        return OffloadEstimate(0, 0, 0, step, refused=said)
    sums = [sum(row[level] for row in table.values()) for level in range(len(capacities))] + [0]
    host = sums[1] + late + (threads if sums[2] else 0)
    return OffloadEstimate(sums[0], host, sums[2], step, _fragments(run, trace, table, step))


def _fragments(run: Run, trace: Trace, table: dict[str, list[int]], step: int) -> int:
    """What segments hold beyond a streamed run's ``step`` and the groups that come and go: holes of the one, rounding of the other.

    Five small decoders on an H200 reserved 7 % more to 7 % less than with this; 5 to 13 % more than without.
    """
    alone = replay(part_of(trace, NOT_STATE, outside="optimizer"), None, run.expandable).peak_reserved - step
    if run.expandable:
        return alone
    sizes = sorted(group.num_bytes for group in find_groups(run.model(), None, None, EXACT)[0] if group.trainable())
    usual = sizes[len(sizes) // 2] if sizes else 1  # a block's weights
    moving = table["loaded"][0] + table["leaving"][0]
    return alone + moving * (segment_size(round_size(usual)) - usual) // usual if usual >= MIN_LARGE else alone


def _loaded_bytes(groups: list[Group], level0_bytes: int) -> int:
    """What the engine lets loaded weights take of level 0 on a GPU."""
    largest = max((group.num_bytes for group in groups), default=1)
    return max(1, min(CUDA_GROUPS * largest, int(level0_bytes * (1 - CUDA_ACTIVATION_SHARE))))


def _streamed(model: nn.Module, capacities: list[int]) -> tuple[dict[str, list[int]], int]:
    """The engine's own placement as on a GPU, and the bytes of gradients that wait at home for the norm.

    It is asked for level 0 on the CPU with a GPU's choices written out, because on 'cuda' it would open streams.
    """
    groups = [group for group in find_groups(model, None, None, EXACT)[0] if group.trainable()]
    largest = max((group.num_bytes for group in groups), default=1)
    weights = _loaded_bytes(groups, capacities[0])
    late = sum(group.num_bytes for group in deferred_groups(groups))
    table = bytes_by_level(model, capacities, StreamingOptions(update="level0", weight_bytes=weights), name="GPU")
    # One gradient is made while the one before leaves: three decoders on an H200 took 3 % more, 2 % less and 7 % more than all this.
    table["leaving"] = [2 * largest] + [0] * (len(capacities) - 1)
    return table, late


def streamed_seconds(run: Run, trace: Trace, capacities: list[int], rates: Rates) -> LaneTimes:
    """One step of ``run`` streaming through levels of ``capacities`` bytes, level 0 first; AdamW where `rates` make it fastest.

    Raises:
        InsufficientMemory: a level is too small.
    """
    model = run.model()
    groups = [group for group in find_groups(model, None, None, EXACT)[0] if group.trainable()]
    wishes = StreamingOptions(weight_bytes=_loaded_bytes(groups, capacities[0]))
    share = auto_share(model, wishes, rates)
    updates = share * sum(map(num_elements, groups)) / rates.cpu_adamw
    streaming = streaming_work(rates.streaming_issues(len(groups), share))
    seconds = phase_seconds((*trace.work, *streaming), rates, updates=updates)
    wishes = replace(wishes, update=share)
    return simulate(forecast_step(model, capacities, wishes, seconds).lanes, rates)


def streams_on(run: Run, gpu_bytes: int) -> bool:
    """Whether a GPU of that size holds what streaming this model needs of one at any batch size."""
    try:
        _streamed(run.model(), [gpu_bytes - context_bytes(run.capability) - RUNTIME_BYTES, PLENTY])
    except InsufficientMemory:
        return False
    return True


def minimum_gpu_bytes(run: Run) -> tuple[int, str]:
    """The GPU below which no batch and no setting of ours trains this model, and what sets it: streaming's floor and the context."""
    model, context = run.model(), context_bytes(run.capability) + RUNTIME_BYTES
    low, high = 0, 4 * sum(p.numel() * p.element_size() for p in model.parameters()) + 64 * MiB
    setting = "weights"
    while high - low > max(MiB, high // 64):
        middle = (low + high) // 2
        try:
            _streamed(model, [middle, PLENTY])
            high = middle
        except InsufficientMemory as error:
            low, setting = middle, _least_words(error)
    return (
        context + high,
        f"the CUDA context takes {format_bytes(context)} with the runtime's kernels and streams, and streaming needs "
        f"{format_bytes(high)} of level 0: {setting}",
    )


def _least_words(error: InsufficientMemory) -> str:
    """What a level lacks, without what is free at that moment and without the runtime's own remedy."""
    lacking = str(error).partition(" free, and ")[2].partition(": raise ")[0]
    return lacking.replace(" there (", " beside what stays there (") or str(error)


class VGPUResourceEstimator:
    """Memory of training, by name or shape.

    Args:
        gpu_capability: CUDA compute capability of the card that is meant.
    """

    def __init__(self, gpu_capability: tuple[int, int] = (8, 0)) -> None:
        self.capability = gpu_capability

    def estimate_transformer(
        self, config: ModelConfig, optimizer: str = "adamw", precision: str = "fp32"
    ) -> MemoryEstimate:
        """Peak bytes of training our decoder of that shape with that batch."""
        return estimate_trace(self._run(config, optimizer, precision).trace(config.batch_size), self.capability)

    def recommend_batch_size(
        self, config: ModelConfig, gpu_memory_mb: float, optimizer: str = "adamw", precision: str = "fp32"
    ) -> int:
        """The largest batch that fits ``gpu_memory_mb`` MiB with P99's margin; 0 where none does. ``config.batch_size`` is ignored."""
        if gpu_memory_mb <= 0:
            raise ConfigurationError(f"gpu_memory_mb is {gpu_memory_mb}: give the card's memory in MiB")
        return self._run(config, optimizer, precision).largest_batch(int(gpu_memory_mb * MiB))

    def generate_vgpu_config(
        self, estimate: MemoryEstimate, gpus: Sequence[float], target_hit_rate: float = 0.9, host_memory_mb: float | None = None
    ) -> StackConfig:  # fmt: skip
        """The dict that `VGPUStack` takes, for the states of ``estimate`` on GPUs of so many MiB; its ``rule_of_thumb`` is beside it.

        Arguments and errors as `vblackwell.planner.level_sizes.stack_config`.
        """
        return stack_config(estimate, gpus, target_hit_rate, host_memory_mb)

    def _run(self, config: ModelConfig, optimizer: str, precision: str) -> Run:
        subject = of_decoder("decoder", config.decoder())
        return Run(subject, config.seq_length, optimizer, precision, capability=self.capability)


def quick_estimate(name: str, batch_size: int = 8, seq_length: int = 1024, optimizer: str = "adamw") -> MemoryEstimate:
    """Peak bytes of training a known model in fp32 with that batch.

    Raises:
        ConfigurationError: the name is not known; the message has the nearest one.
    """
    check_batch(batch_size, seq_length)
    run = Run(find_subject(name, {}, seq_length), seq_length, optimizer)
    return estimate_trace(run.trace(batch_size), run.capability)
