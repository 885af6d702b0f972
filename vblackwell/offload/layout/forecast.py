"""Bytes and seconds of a streamed step beforehand: the runtime's placement of a model, and a simulation of its lanes.
Seconds of compute come from a trace of the resident model, by phase; groups get parts of them by the parameters that
they multiply tokens with, and the last of those the head's and the loss's.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported, VBError
from vblackwell.machine.rates import Rates
from vblackwell.offload.layout import placement
from vblackwell.offload.layout.groups import (
    GRADIENTS,
    KINDS,
    PARAMETER_KINDS,
    Found,
    Group,
    find_groups,
    moment_ranges,
    num_elements,
    passing_bytes,
)
from vblackwell.offload.layout.lanes import GroupWork, LanePlan, least_seconds, simulate
from vblackwell.offload.layout.placement import StreamedPlacement, StreamingOptions, place_groups, place_streamed
from vblackwell.offload.layout.storage_plan import LevelSpace, StoragePlan
from vblackwell.trace.trace import Trace, peak_with_gradients

SHARES = (*(number / 40 for number in range(25)), 1.0)  # of the parameters, that the host may update
LOADED = 0.3  # of level 0 for weights, where nothing else says how much: what steps leave becomes theirs
ALIKE = 1.01  # of steps this close the one with the smaller share: one too large costs more than one too small
MANY = 16  # micro-batches: with more the CPU is as busy adding up, and a simulation takes longer
HALVINGS = 6  # of the interval in which a micro-batch's compute is sought
COARSE_PIECES = 6  # of a ring of states: more take longer to simulate and choose the same


class Step(NamedTuple):
    """Of so many micro-batches, whose updates can be rolled back (``undo``); the CPU updates so many parameters/s.
    ``clips``: no update begins before the norm is known."""

    micro_batches: int
    undo: bool
    cpu: float
    clips: bool = False


Asked = tuple[LanePlan, Rates]
Update = str | float  # a place, or the share of the parameters that the host updates


@dataclass(frozen=True)
class StepForecast:
    """A streamed model before it is one: bytes by level of each kind of range and of 'staging', 'ring', 'loaded',
    'leaving', 'locked' and 'undo', and what a step asks of the lanes.
    """

    bytes_by_level: dict[str, list[int]]
    lanes: LanePlan

    def bytes_of(self, level: int) -> int:
        """All of one level; 0 for a level that is not there."""
        return sum(row[level] for row in self.bytes_by_level.values() if level < len(row))

    def shadow_bytes(self, level: int) -> int:
        """Of ``level``, for rollbacks: what is free, at most."""
        row = self.bytes_by_level.get("undo", [])
        return row[level] if level < len(row) else 0


def forecast_step(
    model: nn.Module,
    capacities: Sequence[int],
    options: StreamingOptions,
    seconds: Mapping[str, float],
    *,
    input_bytes: int = 0,
    micro_batches: int = 1,
    undo: bool = False,
    host_norms: bool = False,
    on_gpu: bool = True,
    groups: Found | None = None,
) -> StepForecast:
    """Where the bytes of ``model``, which may be on meta, would be while it streams, and the tasks of a step.

    Args:
        capacities: bytes of level 0, of RAM and, if there is one, of the disk. on_gpu: level 0 is one.
        options: with a stated ``update``.
        seconds: of each phase of one micro-batch of a resident step (`vblackwell.trace.work.phase_seconds`).
        input_bytes: of the input of a checkpointed group that waits in host memory; 0: they stay on level 0.
        undo: updates after the backward can be rolled back, as far as host memory goes.
        host_norms: norms of gradients are taken on the host.
        groups: what `find_groups` finds, where it has.

    Raises as `place_streamed`; InsufficientMemory too where optimizer states find no room.
    """
    found = place_streamed(model, placement.spaces(capacities, on_gpu=on_gpu), options, groups)
    return _forecast(found, seconds, input_bytes, micro_batches, undo, host_norms)


def _forecast(
    found: StreamedPlacement,
    seconds: Mapping[str, float],
    input_bytes: int,
    micro_batches: int,
    undo: bool,
    host_norms: bool,
) -> StepForecast:
    trainable = found.trainable
    gradients = found.gradient_ranges(trainable, micro_batches, undo=undo)
    incoming_bytes = found.incoming_bytes(micro_batches, undo=undo)
    storage = replace(found.storage, incoming_bytes=incoming_bytes)
    storage = storage.with_ranges(gradients + moment_ranges(trainable))
    behind, shadowed = found.early(storage, micro_batches) if undo else ([], [])
    early = {*behind, *shadowed} if undo else {group for group in trainable if group.all_trainable()}
    deferred = [group for group in trainable if group not in early]
    lanes = _plan(found, storage, deferred, behind, seconds, input_bytes, micro_batches, host_norms)
    return StepForecast(_table(found, storage, behind, shadowed), replace(lanes, stores_gradients=undo))


def _table(
    found: StreamedPlacement, storage: StoragePlan, behind: Sequence[Group], shadowed: Sequence[Group]
) -> dict[str, list[int]]:
    """Ranges, 'staging' with what rounding adds, and what is in no range: loaded weights, gradients, rollbacks."""
    table, levels = storage.bytes_by_level(), storage.levels
    held, rest = [sum(row) for row in zip(*table.values(), strict=True)], [0] * (len(levels) - 1)
    largest = max((group.num_bytes for group in found.trainable), default=0)
    table["staging"] = [level.used_bytes - num_bytes for level, num_bytes in zip(levels, held, strict=True)]
    table["ring"] = [found.ring_bytes, *rest]
    table["loaded"] = [min(found.budget_bytes, sum(group.num_bytes for group in found.groups)), *rest]
    table["leaving"] = [found.max_in_flight * largest, *rest]
    table["locked"] = [found.max_locked * largest if found.on_level0 else 0, *rest]
    if behind or shadowed:
        table["undo"] = [0] * len(levels)
        for group in behind:
            for kind in placement.old_kinds(group, on_host=group not in found.on_level0):
                host = storage.staging_level
                table["undo"][host] += levels[host].held_bytes(group.size_of(kind))
        for pair in itertools.product(shadowed, PARAMETER_KINDS):
            if pair in storage:
                placed = storage.range(*pair)
                table["undo"][placed.level] += levels[placed.level].held_bytes(placed.num_bytes)
    return table


def level0_bytes(found: StreamedPlacement) -> int:
    """What a model that streams as ``found`` takes of level 0 while its layers compute, before steps have shown what
    they leave there. Gradients and weights that leave are as large as a layer's then: embeddings and head, which may be
    larger, leave when layers do not compute.
    """
    table = _table(found, found.storage, (), ())
    layer = max((group.num_bytes for group in layers_of(found.groups)), default=0)
    leaving = (found.max_in_flight + (found.max_locked if found.on_level0 else 0)) * layer
    return leaving + sum(row[0] for kind, row in table.items() if kind not in ("leaving", "locked"))


def step_bytes(trace: Trace, groups: Sequence[Group], input_bytes: int, gpu_bytes: int, *, on_gpu: bool = True) -> int:
    """What a step, traced without an optimizer, takes of a GPU beside `level0_bytes`: activations, logits, workspace,
    and a parameter's gradient before its group's buffer takes it. ``input_bytes``: `checkpoint_bytes` where inputs of
    checkpoints wait in RAM; 0: they stay. ``gpu_bytes``: what the process may take of the GPU.
    """
    slots = (slot for group in groups for slot in group.slots if slot.param.requires_grad)
    gradient = max((slot.num_elements * slot.dtype.itemsize for slot in slots), default=0)
    found = peak_with_gradients(trace, 0.0) + gradient
    if input_bytes:
        ahead = placement.checkpoints_ahead(input_bytes, gpu_bytes, on_gpu=on_gpu)
        found -= max(0, len(layers_of(groups)) - placement.NEWEST - ahead) * input_bytes
    return max(gradient, found)


def layers_of(groups: Sequence[Group]) -> list[Group]:
    """Those of ``groups`` that have about as many parameters as the one with most: no embeddings, norms or head."""
    most = max((len(group.slots) for group in groups), default=0)
    return [group for group in groups if len(group.slots) * 2 > most]


def checkpoint_bytes(model: nn.Module, tokens: int) -> int:
    """Of the input of one checkpointed layer. Raises Unsupported where the model does not state its hidden size."""
    config = getattr(model, "config", None)
    hidden = getattr(getattr(config, "get_text_config", lambda: config)(), "hidden_size", None)
    if hidden is None:
        raise Unsupported("the hidden size of the model is not known, so checkpoints' inputs cannot be counted")
    return tokens * int(hidden) * max(param.element_size() for param in model.parameters())


def gradient_traffic(
    gradients: int, sums: int, micro_batches: int, is_fp32: bool, norms: bool = False
) -> tuple[int, int]:
    """Bytes a step that are (read, written) for so many of gradients, and of their fp32 sums, that are on the disk.
    One in fp32 is itself the sum. Of narrower ones the first alone is read, and the sum is written with every later
    micro-batch and read after each. ``norms``: one more pass takes norms on the host.
    """
    again = norms * (sums if micro_batches > 1 and not is_fp32 else gradients)
    if is_fp32:
        return micro_batches * gradients + again, (2 * micro_batches - 1) * gradients
    added = (micro_batches - 1) * sums
    return gradients + added + again, micro_batches * gradients + added


def _plan(
    found: StreamedPlacement,
    storage: StoragePlan,
    deferred: Collection[Group],
    behind: Collection[Group],
    seconds: Mapping[str, float],
    input_bytes: int,
    micro_batches: int,
    host_norms: bool,
) -> LanePlan:
    modules = {module for site in found.sites for module in site.modules}
    tables = (module for module in modules if isinstance(module, nn.Embedding))
    looked_up = {id(param) for table in tables for param in table.parameters(recurse=False)}
    on_level0 = set(found.on_level0)
    multiplied = [sum(slot.num_elements for slot in g.slots if id(slot.param) not in looked_up) for g in found.groups]
    last = max((index for index, count in enumerate(multiplied) if count), default=len(found.groups) - 1)
    body = sum(count for index, count in enumerate(multiplied) if index != last) or 1
    works = []
    for index, (group, count) in enumerate(zip(found.groups, multiplied, strict=True)):
        if index == last:
            forward, backward = seconds.get("loss", 0.0), seconds.get("loss_backward", 0.0)
        else:
            forward, backward = (seconds.get(phase, 0.0) * count / body for phase in ("forward", "backward"))
        is_block = index != last and count * 10 > max(multiplied)  # not a norm
        trained = num_elements(group) if group.trainable() else 0
        kinds = [kind for kind in KINDS if (group, kind) in storage and storage.level_of(group, kind).kind == "disk"]
        on_disk = {kind: group.size_of(kind) for kind in kinds}
        weight, on_host = on_disk.get("weight", 0), group not in on_level0 and bool(trained)
        states = sum(on_disk.get(kind, 0) for kind in PARAMETER_KINDS if kind != "weight")
        gradients, sums = (on_disk.get(kind, 0) for kind in GRADIENTS)
        read, written = gradient_traffic(gradients, sums, micro_batches, group.is_fp32, host_norms)
        works.append(
            GroupWork(
                trained,
                group.num_bytes,
                forward,
                backward,
                input_bytes=input_bytes if is_block else 0,
                on_host=on_host,
                deferred=group in deferred,
                behind=group in behind,
                resident=storage.range(group, "weight").level == 0,
                disk_read=states + read + on_host * weight if trained else 0,
                disk_write=states + weight + written if trained else 0,
                weights_on_disk="weight" in on_disk,
            )
        )
    states_up = max((passing_bytes(group) / num_elements(group) for group in found.on_level0), default=10.0)
    width = max((slot.dtype.itemsize for group in found.groups for slot in group.slots), default=2)
    return LanePlan(
        tuple(works),
        found.budget_bytes,
        max(1, found.ring_bytes),
        states_up=states_up,
        states_down=states_up + width,
        gradient=float(width),
        micro_batches=micro_batches,
        disk_sets=max(1, storage.staging.num_sets),
        max_staying=found.max_locked if found.on_level0 else 0,
    )


# -- where updates run -------------------------------------------------------------------------------------------------


class FastestUpdates:
    """Where updates run in steps of so many micro-batches, whose updates can be rolled back (True) or not.

    Attributes:
        cpu: parameters/s that the CPU is taken to update in a step, and calls may know better; 0: the place is stated.
    """

    def __init__(self, placed: Mapping[float, StreamedPlacement], link: float, cpu: float, place: Update = 0.0) -> None:
        self.cpu = cpu
        self._placed, self._link, self._place = placed, link, place
        # No functools.cache, whose circle keeps groups alive.
        self._found: dict[Step, float] = {}
        self._lanes: dict[tuple[float, int, bool], LanePlan | None] = {}

    def __call__(
        self,
        micro_batches: int,
        undo: bool,
        cpu: float | None = None,
        shown: tuple[float, float] | None = None,
        clips: bool = False,
    ) -> Update:
        """``shown``: the share and the seconds of the last steps, by which what the GPU computes is known. Of several
        micro-batches that decides: the CPU adds gradients up all the time, and updates where compute hides it. That
        share is kept where it is as good. ``clips``: steps do, so that the CPU begins when the norm is known, and has
        less of the step's time than of one that does not.
        """
        if not self._placed:
            return self._place
        step = Step(micro_batches, undo, cpu or self.cpu, clips)
        if shown is not None and micro_batches > 1:
            return self._better(step, *shown)
        if step not in self._found:
            self._found[step] = self._fastest(step)
        return self._found[step]

    def _better(self, step: Step, share: float, seconds: float) -> float:
        now = min(self._placed, key=lambda each: abs(each - share))
        compute = self._compute(now, step, seconds)
        best = self._fastest(step, compute)
        return share if self._seconds(now, step, compute) <= ALIKE * self._seconds(best, step, compute) else best

    def _compute(self, share: float, step: Step, seconds: float) -> float:
        """Seconds of a micro-batch's compute with which a step with this ``share`` takes as long as steps did."""
        count = min(step.micro_batches, MANY)  # as many seconds more one more of a micro-batch's compute costs at most
        least, most = 0.0, seconds / count
        shorter, longer = least, most  # up to this one a step is known to be shorter, from that one on longer
        for _ in range(HALVINGS):
            middle = (least + most) / 2
            if shorter < middle < longer:
                more = (self._seconds(share, step, middle) - seconds) / count
                shorter, longer = (shorter, middle - more) if more >= 0 else (middle - more, longer)
            least, most = (least, middle) if middle >= longer else (middle, most)
        return least

    def _asked(self, share: float, step: Step, compute: float) -> Asked | None:
        """What a step asks of the lanes, and their rates; None without memory for it."""
        key = share, min(step.micro_batches, MANY), step.undo
        if key not in self._lanes:
            try:
                phases = {"forward": 0.25, "backward": 0.75}  # with checkpoints
                lanes = _forecast(self._placed[share], phases, 0, *key[1:], host_norms=False).lanes
                coarse = max(lanes.piece_bytes, lanes.ring_bytes // COARSE_PIECES)
                self._lanes[key] = replace(lanes, piece_bytes=coarse)
            except InsufficientMemory:
                self._lanes[key] = None
        lanes = self._lanes[key]
        if lanes is None:
            return None
        # With an endless disk: where one bounds a step, all shares would seem alike.
        passing = self._link, self._link, self._link, self._link
        rates = Rates(math.inf, math.inf, math.inf, *passing, step.cpu, disk_read=math.inf, disk_write=math.inf)
        groups = (
            replace(each, forward=compute * each.forward, backward=compute * each.backward) for each in lanes.groups
        )
        return replace(lanes, groups=tuple(groups), clips=step.clips), rates

    def _seconds(self, share: float, step: Step, compute: float) -> float:
        """Of a step; without memory for it endless. Simulated steps may take less than the CPU works: it adds the sums
        of a rollback up after the last of them, as none waits for these."""
        asked = self._asked(share, step, compute)
        return math.inf if asked is None else max(simulate(*asked).step_seconds, least_seconds(*asked))

    def _least_seconds(self, share: float, step: Step, compute: float) -> float:
        asked = self._asked(share, step, compute)
        return math.inf if asked is None else least_seconds(*asked)

    def _fastest(self, step: Step, compute: float = 0.0) -> float:
        """Of every fourth share and all on the host, and of those near the best of these. What takes longer than
        another in any case is not simulated.
        """
        seconds = functools.cache(lambda share: self._seconds(share, step, compute))
        least = functools.cache(lambda share: self._least_seconds(share, step, compute))

        def best_of(some: Sequence[float]) -> float:
            best = min(some, key=least)
            for share in sorted(some, key=least):
                if least(share) > seconds(best):
                    break
                best = min(best, share, key=lambda each: (seconds(each), each))
            return best

        shares = list(self._placed)
        some = [*shares[::4], shares[-1]]
        best = best_of(some)
        near = shares.index(best)
        tried = sorted({*some, *shares[max(0, near - 2) : near + 3]}) if seconds(best) < math.inf else shares
        enough = ALIKE * seconds(best_of(tried))
        if enough == math.inf and step.undo:
            return self._fastest(step._replace(undo=False), compute)
        return next(each for each in tried if least(each) <= enough and seconds(each) <= enough)


def fastest_updates(
    model: nn.Module,
    levels: Sequence[LevelSpace],
    options: StreamingOptions,
    measured: Callable[[], tuple[float, float]],
    found: Found | None = None,
) -> FastestUpdates:
    """Where the updates of ``model`` run on a GPU: as ``options`` say, and for 'auto' the share of the shortest step,
    by simulation, with nothing to compute.

    More to compute hides more of the link and of the CPU, whatever their shares are: in 242 simulated steps of drawn
    models and machines, what is chosen without compute takes 1.01 of the best share's time with it in the mean, 1.02 in
    nine of ten, and 1.15 at most (docs/journal/offload.md). So no batch is needed, and a plan chooses what a run
    without one does; of several micro-batches steps tell later.

    Args:
        levels: without the model. measured: the link both ways at once in bytes/s each, and AdamW on the CPU beside
            such copies in parameters/s, which is about its rate in steps (0.73 to 1.29 of it on seven hosts); asked
            if they decide. found: what `find_groups` finds, where it has.

    Raises as `place_streamed`.
    """
    if options.update != "auto":
        return FastestUpdates({}, 0.0, 0.0, options.update)
    if options.formats.packed:
        return FastestUpdates({}, 0.0, 0.0, "device")
    groups, sites = found or find_groups(model, options.compute_dtype, options.groups, options.formats)
    if options.weight_bytes is None:
        options = replace(options, weight_bytes=int(levels[0].free_bytes * LOADED))
    placed, refused = dict[float, StreamedPlacement](), list[VBError]()
    for share in SHARES:
        try:
            placed[share] = place_groups(groups, sites, levels, replace(options, update=share))
        except (InsufficientMemory, ConfigurationError) as error:  # states on a disk take RAM; nothing lives on level 0
            refused.append(error)
    if not placed:
        raise refused[0]
    if not any(found.on_level0 for found in placed.values()):
        return FastestUpdates({}, 0.0, 0.0, "host")
    link, cpu = measured()
    return FastestUpdates(placed, link, cpu)
