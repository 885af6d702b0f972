"""Which way of training fits a machine and is the fastest: enumerated, pruned by arithmetic, predicted by the caller
(`vblackwell.planner.forecast`), and the best is a frozen plan.

Where bytes live changes no bit of a run; recomputing may round otherwise where it uses other kernels. What does change
numbers (8-bit states, a micro-batch other than the user's) is tried only where the `Space` allows it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from vblackwell.errors import InsufficientMemory, as_typed
from vblackwell.offload.layout.forecast import FastestUpdates
from vblackwell.units import format_bytes, format_seconds

ALIKE = 1.005  # predictions this close are told apart by what they take, not by their speed
MAX_SHOWN = 4
FAST = {True: "GPU memory", False: "fast memory"}  # what people call level 0, with a GPU and without one


def lane_words(lane: str, has_gpu: bool = True) -> str:
    """A lane of the simulation, as what limits a step."""
    if lane == "gpu":
        return "GPU" if has_gpu else "CPU"
    return {"up": "link to the GPU", "down": "link from the GPU", "cpu": "AdamW on the CPU"}.get(lane, lane)


@dataclass(frozen=True)
class Bounds:
    """Bytes that a run may take: of the GPU by its allocator (without the CUDA context), of RAM, and of a disk."""

    gpu: int
    host: int
    disk: int = 0

    def words(self, has_gpu: bool = True) -> str:
        disk = f", disk {format_bytes(self.disk)}" if self.disk else ""
        return f"{FAST[has_gpu]} {format_bytes(self.gpu)}, RAM {format_bytes(self.host)}{disk}"


@dataclass(frozen=True)
class Space:
    """What may be chosen, as in `Choice`; ``batches``: (sequences in a forward, forwards in a step)."""

    batches: tuple[tuple[int, int], ...]
    checkpointing: tuple[bool, ...] = (False, True)
    placements: tuple[str, ...] = ("resident", "streamed")
    updates: tuple[str | float, ...] = ("auto",)
    activations: tuple[str, ...] = ("level0", "host")
    states: tuple[str, ...] = ("fp32",)

    def choices(self) -> "Iterator[Choice]":
        """Every combination that means something."""
        for (batch, count), checkpointing, states in product(self.batches, self.checkpointing, self.states):
            one = Choice("resident", batch, count, checkpointing, states=states)
            if "resident" in self.placements:
                yield one
            streamed = product(self.activations, self.updates) if "streamed" in self.placements else ()
            for activations, update in streamed:
                if (activations == "level0" or checkpointing) and (states == "fp32" or update in ("device", "auto")):
                    yield replace(one, placement="streamed", activations=activations, update=update)


@dataclass(frozen=True)
class Choice:
    """One way to train: 'resident' or 'streamed', so many sequences in a forward and forwards in a step.

    Attributes:
        checkpointing: blocks are computed again in backward. states: format of AdamW's moments.
        update: where AdamW runs when streaming: 'device', 'host', or the share of the parameters that is updated on the
            host; 'auto' until that is decided. activations: where checkpoints' inputs wait: 'level0' or 'host'.
        level0_bytes, weight_bytes, resident_bytes: capacity of level 0, and what loaded weights and groups that live
            there may take of it; decided when the choice is predicted.
    """

    placement: str
    batch_size: int
    accumulation_steps: int
    checkpointing: bool
    update: str | float = "device"
    activations: str = "level0"
    states: str = "fp32"
    level0_bytes: int = 0
    weight_bytes: int = 0
    resident_bytes: int = 0

    @property
    def host_share(self) -> float:
        """Of the updates."""
        return float(self.update == "host") if isinstance(self.update, str) else self.update

    def __str__(self) -> str:
        return self.words()

    def words(self, has_gpu: bool = True) -> str:
        forwards = "" if self.accumulation_steps == 1 else f" x {self.accumulation_steps}"
        words = [self.placement, f"{self.batch_size}{forwards} sequences"]
        words += ["checkpointing"] * self.checkpointing + [f"{self.states} states"] * (self.states != "fp32")
        if self.placement == "streamed":
            places = {0.0: "AdamW on the GPU" if has_gpu else "AdamW in fast memory", 1.0: "AdamW on the CPU"}
            words += [places.get(self.host_share, f"{self.update} of AdamW on the CPU")] * (self.update != "auto")
            words += ["checkpoints in RAM"] * (self.activations == "host")
            kept = f"{format_bytes(self.resident_bytes)} kept in {FAST[has_gpu]}"
            words += [kept] * (self.resident_bytes > 0)
        return ", ".join(words)


@dataclass(frozen=True)
class Prediction:
    """What a choice is expected to take in one optimizer step of ``tokens``.

    Attributes:
        gpu, gpu_p99: bytes that the GPU's allocator reserves (without a GPU: of the arena): expected, and to plan for.
        host, disk: bytes. waiting: of checkpoints' inputs, part of ``host``. threads: of the disk level, in addition.
        busy: share of the step in which each lane works. clipped_seconds: of a step that clips, where that is another.
        disk_written: bytes a step. disk_hidden_from: tokens a step from which the disk costs nothing.
    """

    gpu: int
    gpu_p99: int
    host: int
    disk: int
    step_seconds: float
    tokens: int
    busy: dict[str, float] = field(default_factory=dict)
    clipped_seconds: float | None = None
    disk_written: int = 0
    disk_hidden_from: int | None = 0
    waiting: int = 0
    threads: int = 0

    @property
    def token_seconds(self) -> float:
        return self.step_seconds / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda lane: self.busy[lane], default="gpu")


@dataclass(frozen=True)
class Lacking:
    """Why a choice does not fit: bytes (0: not a matter of bytes) of ``what``; or ``words`` that say it better."""

    what: str
    num_bytes: int = 0
    words: str = ""

    def __str__(self) -> str:
        return self.words or (f"lacks {format_bytes(self.num_bytes)} of {self.what}" if self.num_bytes else self.what)


@dataclass(frozen=True)
class Plan:
    """The choice; others that fit, fastest first; what lacked what; how many arithmetic alone ruled out; what chose
    the CPU's share of the updates, where that was chosen."""

    choice: Choice
    prediction: Prediction
    others: tuple[tuple[Choice, Prediction], ...]
    rejected: tuple[tuple[Choice, Lacking], ...]
    pruned: int
    bounds: Bounds
    rates: str = ""
    has_gpu: bool = True
    updates: FastestUpdates | None = field(default=None, compare=False, repr=False)

    def lines(self) -> list[str]:
        best, has_gpu = self.prediction, self.has_gpu
        found = [f"plan: {self.choice.words(has_gpu)}", f"  {_numbers(best, has_gpu)}"]
        found.append(f"  within {self.bounds.words(has_gpu)}; rates: {self.rates}")
        if self.choice.weight_bytes:
            level0, weights = format_bytes(self.choice.level0_bytes), format_bytes(self.choice.weight_bytes)
            found.append(f"  of {level0} of {FAST[has_gpu]}, weights may take {weights}")
        if best.clipped_seconds is not None:
            found.append(f"  while steps clip: {best.tokens / best.clipped_seconds:,.0f} tokens/s")
        if best.disk_written:
            found.append(f"  written to the SSD: {format_bytes(1000 * best.disk_written)} in 1,000 steps")
            if best.disk_hidden_from != 0:
                hidden = "no" if best.disk_hidden_from is None else f"{best.disk_hidden_from:,}"
                found.append(f"  the disk costs nothing from {hidden} tokens a step on")
        instead: dict[Choice, tuple[Choice, Prediction]] = {}
        for each in self.others:
            if _kind(each[0]) != _kind(self.choice):
                instead.setdefault(_kind(each[0]), each)
        for choice, prediction in list(instead.values())[:MAX_SHOWN]:
            longer = prediction.token_seconds / best.token_seconds
            found.append(
                f"  instead, {longer:.2f} times as long: {choice.words(has_gpu)}: {_numbers(prediction, has_gpu)}"
            )
        found += [
            f"  not {choice.words(has_gpu)}: {lacking}" for choice, lacking in _nearest(self.rejected)[:MAX_SHOWN]
        ]
        if self.pruned:
            found.append(f"  {self.pruned} more were left out, which arithmetic alone shows to be slower")
        return [as_typed(line) for line in found]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"choice": asdict(self.choice), "predicted": asdict(self.prediction)}
        found |= {"bounds": asdict(self.bounds), "rates": self.rates}
        found["others"] = [{"choice": asdict(choice), "predicted": asdict(each)} for choice, each in self.others]
        found["rejected"] = [{"choice": asdict(choice), "lacked": asdict(each)} for choice, each in self.rejected]
        return found | {"pruned": self.pruned}


def make_plan(
    choices: Iterable[Choice],
    least_seconds: Callable[[Choice], float],
    predict: Callable[[Choice], tuple[Choice, Prediction] | Lacking],
    bounds: Bounds,
    rates: str = "",
    has_gpu: bool = True,
) -> Plan:
    """Predict ``choices`` (each with its sizes filled in, or what it lacks), those first that could be the fastest by
    the token, and leave out those that cannot be: no prediction may be below ``least_seconds``, by arithmetic, a token.
    Raises InsufficientMemory, with what the nearest lacks, where none fits."""
    found: list[tuple[Choice, Prediction]] = []
    rejected: list[tuple[Choice, Lacking]] = []
    pruned, best = 0, float("inf")
    for least, _, choice in sorted((least_seconds(each), number, each) for number, each in enumerate(choices)):
        if least > best * ALIKE:
            pruned += 1
            continue
        result = predict(choice)
        if isinstance(result, Lacking):
            rejected.append((choice, result))
        else:
            found.append(result)
            best = min(best, result[1].token_seconds)
    if not found:
        near, lacking = next(iter(_nearest(rejected)), (None, None))
        text = f"the nearest is {near.words(has_gpu)}, which {lacking}" if near else "there is nothing to choose from"
        remedy = "give fewer or shorter sequences, or more memory (--fast-memory, --host-memory, --disk-memory)"
        needed = lacking.num_bytes if lacking else 0
        raise InsufficientMemory(f"no plan fits {bounds.words(has_gpu)}: {text}; {remedy}", needed_bytes=needed)
    found.sort(key=lambda each: each[1].token_seconds)

    def taken(each: tuple[Choice, Prediction]) -> tuple[float, ...]:
        choice, prediction = each
        return choice.placement != "resident", choice.checkpointing, prediction.disk, prediction.host, prediction.gpu

    chosen = min((each for each in found if each[1].token_seconds <= best * ALIKE), key=taken)
    return Plan(
        *chosen, tuple(each for each in found if each is not chosen), tuple(rejected), pruned, bounds, rates, has_gpu
    )


def _nearest(rejected: Iterable[tuple[Choice, Lacking]]) -> list[tuple[Choice, Lacking]]:
    kept: dict[Any, tuple[Choice, Lacking]] = {}
    for choice, lacking in sorted(rejected, key=lambda each: each[1].num_bytes or float("inf")):
        kind = (choice.placement, choice.batch_size, choice.checkpointing, choice.states)
        kept.setdefault(kind, (choice, lacking))
    return list(kept.values())


def _kind(choice: Choice) -> Choice:
    """Neighbouring shares are of one: they say nothing new."""
    places = {0.0: "device", 1.0: "host"}
    update = places.get(choice.host_share, "both")
    return replace(choice, accumulation_steps=0, update=update, level0_bytes=0, weight_bytes=0, resident_bytes=0)


def _numbers(prediction: Prediction, has_gpu: bool) -> str:
    disk = f", disk {format_bytes(prediction.disk)}" if prediction.disk else ""
    if prediction.threads:
        disk += f" and {format_bytes(prediction.threads)} of RAM for its threads"
    busy = prediction.busy.get(prediction.bottleneck, 0.0)
    step, busiest = (
        format_seconds(prediction.step_seconds),
        f"{lane_words(prediction.bottleneck, has_gpu)} busy {busy:.0%}",
    )
    gpu, p99, host = map(format_bytes, (prediction.gpu, prediction.gpu_p99, prediction.host))
    speed = f"{prediction.tokens_per_second:,.0f} tokens/s ({step} a step, {busiest})"
    most = "" if p99 == gpu else f" (at most {p99})"
    ram = f", RAM {host}" if prediction.host else ""
    return f"{speed}, {FAST[has_gpu]} {gpu}{most}{ram}{disk}"
