"""Which parameters stream together, what AdamW keeps of them, where they may be cut, and in which order they are used.

A *layer group* moves as one flat range: each child of an outermost `nn.ModuleList`, and each remaining module that owns
parameters directly. Within it every parameter starts at a multiple of 512 bytes, as torch's allocators place single
tensors: matrix kernels choose the same path, and vectorised optimizers round alike.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.optimizer.adamw import BLOCK
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK
from vblackwell.units import align_up

STATES = ("fp32", "8bit")
MASTERS = ("exact", "stochastic")

# Kinds of range. ``weight``: compute weights; ``master``: the whole fp32 truth; ``remainder``: what a bf16 weight
# leaves out of it; ``accumulated``: the fp32 sum of narrower gradients; ``old_weight``, ``old_gradient``: those of the
# last step, which states that are a step behind need (`movement.state.Behind`).
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
PACKED_MOMENTS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
STATE_KINDS = ("remainder", *MOMENTS, *PACKED_MOMENTS)  # what an update on level 0 brings up next to the weight
PARAMETER_KINDS = ("weight", "master", *STATE_KINDS)  # what a group that lives on level 0 has there
GRADIENTS = ("gradient", "accumulated")
KINDS = (*PARAMETER_KINDS, *GRADIENTS)
OLD_KINDS = OLD_WEIGHT, OLD_GRADIENT = "old_weight", "old_gradient"
NARROW_KINDS = ("weight", "remainder", "gradient", OLD_WEIGHT, OLD_GRADIENT)  # as wide as the compute weight

ALIGNMENT = 512
MAX_TRAINED = 4  # where frozen parameters are more than so many times the others, they form a separate group
# These read the parameters of modules inside them, whose forwards do not run; in eval mode for kernels with other bits,
# if all are plain.
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRAINED = "/trained"  # the name of the others' group then ends with this

CUT = 256  # elements: 512 bytes of the narrowest range, and more than any vector has
MAX_KINDS = 8  # in one buffer
WIDEST_ELEMENT = 16  # bytes of one element in a buffer at most: weight, remainder, moments, fp32 gradient
WIDEST_PACKED_ELEMENT = 11  # with moments of 8 bits
MIN_BUFFER_BYTES = 3 * CUT * WIDEST_ELEMENT
ROW_MULTIPLE = 16  # rows of a slice, so that every slice starts as aligned as the whole does
SLICES_AT_ONCE = 4  # two of weights, of which one loads ahead, and two of gradients

NEVER = 1 << 60
# Uses, after which a pass begins by itself: a model's parts may be called without the whole.
MAX_PASS = 1 << 16


# -- what AdamW keeps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formats:
    """What AdamW keeps of a group's parameters next to their compute weights.

    By default moments in fp32 and the fp32 master, whole or split (`storage.masters`). Two stated choices give up
    exactness for bytes. Random bits are a function of a seed, the parameter's name, its step and the element's index,
    so that no result depends on where, in what order or in what pieces it is computed.

    Attributes:
        states: of the moments: 'fp32', or '8bit': a code a moment and an fp32 scale for each 256 elements, which start
            with a parameter (`kernels.optimizer.adamw8`): 2.03 bytes instead of 8.
        masters: 'exact', or 'stochastic': a bf16 weight is its own master, rounded at random, by the user's ``seed``.

    Raises ConfigurationError: an unknown word, or 'stochastic' masters with fp32 states.
    """

    states: str = "fp32"
    masters: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise ConfigurationError(f"states {self.states!r} is none of {', '.join(STATES)}")
        if self.masters not in MASTERS:
            raise ConfigurationError(f"masters {self.masters!r} is none of {', '.join(MASTERS)}")
        if not self.packed and self.stochastic:
            raise ConfigurationError(
                "masters='stochastic' goes with states='8bit' alone: exact moments would be the larger part kept"
            )

    @property
    def packed(self) -> bool:
        return self.states == "8bit"

    @property
    def stochastic(self) -> bool:
        """Whether a bf16 weight is all there is of its parameter."""
        return self.masters == "stochastic"

    @property
    def moments(self) -> tuple[str, ...]:
        """The kinds of range that hold the moments, in the order of the kernel's arguments."""
        return PACKED_MOMENTS if self.packed else MOMENTS

    @property
    def cut(self) -> int:
        """Within a parameter, pieces start at multiples of so many elements."""
        return BLOCK if self.packed else CUT

    def seed_of(self, name: str) -> int:
        """64 bits for the parameter called ``name``."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest(), "little")


EXACT = Formats()


def range_bytes(kind: str, num_elements: int, itemsize: int) -> int:
    """Bytes of ``num_elements`` in a range of ``kind``, from a block's start; ``itemsize`` is the compute weight's."""
    if kind in CODES:
        return num_elements
    if kind in SCALES:
        return -(-num_elements // SCALE_BLOCK) * 4
    return num_elements * (itemsize if kind in NARROW_KINDS else 4)


def bytes_when_resident(model: nn.Module, compute_dtype: torch.dtype | None, formats: Formats = EXACT) -> int:
    """Level-0 bytes of weights, and of what training adds: fp32 gradients and masters, both moments."""
    total = 0
    for param in model.parameters():
        itemsize, count = compute_dtype_of(param, compute_dtype).itemsize, param.numel()
        total += count * itemsize
        if param.requires_grad:
            master = 4 if itemsize < 4 and not formats.stochastic else 0
            total += count * (4 + master) + sum(range_bytes(kind, count, itemsize) for kind in formats.moments)
    return total


def element_type(kind: str, compute_dtype: torch.dtype) -> torch.dtype:
    if kind == "remainder":
        return torch.int16
    if kind in CODES:
        return torch.uint8
    return compute_dtype if kind in NARROW_KINDS else torch.float32


def supports(formats: Formats, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a group with compute weights of ``dtypes`` can be kept so."""
    able, found = {torch.bfloat16} if formats.stochastic else {torch.bfloat16, torch.float32}, set(dtypes)
    return not formats.packed or (len(found) == 1 and found <= able)


def formats_summary(groups: Iterable["Group"]) -> dict[str, str]:
    """What a model was told, for reports: frozen groups that cannot be kept so stay exact."""
    formats = next((group.formats for group in groups if group.formats.packed), EXACT)
    return {"states": formats.states, "masters": formats.masters}


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Slot:
    """One parameter's place in its group, under its first name in the model."""

    name: str
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]  # so that layouts such as channels_last survive
    dtype: torch.dtype  # of the compute weight
    offset: int  # bytes from the group's start, for anything in `dtype`
    offset_fp32: int  # likewise in ranges of fp32
    group: "Group"
    plain_class: type  # what it is while its group is in use, `nn.Parameter` or the user's own child of it

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter inside ``flat``, the group's uint8 range in compute dtype; in its own shape and stride."""
        return self.view_typed(flat.view(self.dtype))  # sizes and offsets of ranges are multiples of `ALIGNMENT`

    def view_typed(self, typed: Tensor) -> Tensor:
        """The same inside the range as elements of the compute dtype."""
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset // self.dtype.itemsize)

    def view_fp32(self, flat: Tensor) -> Tensor:
        return self._shaped(self.flat_fp32(flat))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def flat(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Like `view`, as one dimension in memory order; ``dtype``: of the same width, to read the bytes as."""
        return flat[self.offset : self.offset + self.num_elements * self.dtype.itemsize].view(dtype or self.dtype)

    def flat_fp32(self, flat: Tensor) -> Tensor:
        """Like `view_fp32`, as one dimension in memory order."""
        return flat[self.offset_fp32 : self.offset_fp32 + self.num_elements * 4].view(torch.float32)


@dataclass(eq=False)
class Group:
    """Parameters that move as one flat range of ``num_bytes`` (``num_bytes_fp32`` for fp32 states). If all have one
    compute type (`uniform`), element ``i`` of the one range is element ``i`` of the other: all are cut alike.
    """

    index: int
    name: str
    slots: list[Slot] = field(default_factory=list)
    num_bytes: int = 0
    num_bytes_fp32: int = 0
    formats: Formats = EXACT

    def append(self, name: str, param: nn.Parameter, dtype: torch.dtype) -> Slot:
        # Dense memory keeps its stride; of any other the gaps would be stored and moved.
        dense = param if param.is_contiguous() else torch.empty_like(param, device="meta")
        stride = tuple(dense.stride())
        slot = Slot(name, param, param.shape, stride, dtype, self.num_bytes, self.num_bytes_fp32, self, type(param))
        self.slots.append(slot)
        block = SCALE_BLOCK if self.formats.packed else 1  # parameters start at multiples of so many elements
        stop, stop_fp32 = slot.offset + slot.num_elements * dtype.itemsize, slot.offset_fp32 + slot.num_elements * 4
        self.num_bytes = align_up(stop, max(ALIGNMENT, block * dtype.itemsize))
        self.num_bytes_fp32 = align_up(stop_fp32, max(ALIGNMENT, block * 4))
        if self.uniform:
            self.num_bytes_fp32 = max(self.num_bytes_fp32, self.num_bytes // dtype.itemsize * 4)
        return slot

    @property
    def uniform(self) -> bool:
        """Whether all compute weights have one type, of at most 4 bytes."""
        return len({slot.dtype for slot in self.slots}) == 1 and self.slots[0].dtype.itemsize <= 4

    @property
    def is_fp32(self) -> bool:
        """Whether gradients are fp32 already, so that their sum needs no range ``accumulated``."""
        return all(slot.dtype == torch.float32 for slot in self.slots if slot.dtype.is_floating_point)

    @property
    def needs_master(self) -> bool:
        """Whether some compute weight is narrower than the fp32 in which its truth is kept."""
        return not self.formats.stochastic and any(
            slot.dtype.is_floating_point and slot.dtype != torch.float32 for slot in self.slots
        )

    @property
    def master_kind(self) -> str:
        """Its masters' range: what completes bf16 weights to fp32, or whole ones."""
        return "remainder" if self.uniform and self.slots[0].dtype == torch.bfloat16 else "master"

    @property
    def dtype_names(self) -> str:
        return ", ".join(sorted({str(slot.dtype).removeprefix("torch.") for slot in self.slots}))

    def views(self, flat: Tensor, slots: Iterable[Slot]) -> list[Tensor]:
        """Of each of ``slots`` what `Slot.view` gives."""
        if not self.uniform:
            return [slot.view(flat) for slot in slots]
        typed = flat.view(self.slots[0].dtype)
        return [slot.view_typed(typed) for slot in slots]

    def size_of(self, kind: str) -> int:
        if kind in PACKED_MOMENTS:
            return bytes_of(self, kind, num_elements(self))
        return self.num_bytes if kind in NARROW_KINDS else self.num_bytes_fp32

    def trainable(self) -> list[Slot]:
        """Slots whose parameter requires a gradient now: users freeze and unfreeze."""
        with torch._C.DisableTorchFunctionSubclass():  # an offloaded parameter's own would be asked each time
            return [slot for slot in self.slots if slot.param.requires_grad]

    def all_trainable(self) -> bool:
        """Whether all of it is trained: only then is it updated before its step."""
        return len(self.trainable()) == len(self.slots)


def weight_ranges(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The ranges that the weights of ``groups`` need, and those that are trained their masters."""
    masters = [(group, group.master_kind) for group in groups if group.needs_master and group.trainable()]
    return [(group, "weight") for group in groups] + masters


def moment_ranges(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The ranges that the moments of ``groups`` need, kind by kind."""
    return [(group, kind) for kind in (*MOMENTS, *PACKED_MOMENTS) for group in groups if kind in group.formats.moments]


@dataclass(eq=False)
class Site:
    """A module at whose forward some groups must be on level 0, if ``when(args, kwargs)``."""

    module: nn.Module
    groups: list[Group]
    when: Callable[[Any, Any], bool] = lambda args, kwargs: True

    @cached_property
    def slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group.slots]

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The module and those inside it, when they were first asked for."""
        return list(self.module.modules())


Found = tuple[list[Group], list[Site]]  # what `find_groups` finds


def compute_dtype_of(param: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and param.is_floating_point() else param.dtype


def refuse_untrainable(name: str, dtype: torch.dtype) -> None:
    """Raise Unsupported if a parameter of this compute type cannot be trained exactly: AdamW's arithmetic is fp32."""
    if dtype not in TRAINED_DTYPES:
        raise Unsupported(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, and AdamW of a model in a stack computes in fp32: give "
            "compute_dtype=torch.float32, make the model fp32 by .float(), or freeze the parameter by "
            "requires_grad_(False)"
        )


def find_groups(
    model: nn.Module,
    compute_dtype: torch.dtype | None = None,
    given: Iterable[str] | None = None,
    formats: Formats = EXACT,
) -> Found:
    """Layer groups of ``model`` in registration order, and the modules that need them.

    Args:
        given: names of modules that each form one group, instead of the children of outermost ModuleLists.
        formats: of what AdamW keeps; frozen groups that cannot be kept so stay exact.

    Raises ConfigurationError: a given name is no module; Unsupported: a group that is trained cannot be kept so.
    """
    modules = dict(model.named_modules())
    if unknown := [name for name in given or () if name not in modules]:
        raise ConfigurationError(f"no module named {unknown[0]!r} in {type(model).__name__}: see named_modules()")
    whole = _list_children(modules.values()) if given is None else {modules[name] for name in given}
    # The readers that have none of these inside are read as a whole, too.
    readers = {module for module in modules.values() if isinstance(module, READERS)}
    whole |= {reader for reader in readers if whole.isdisjoint(reader.modules())}
    groups, sites, owner, inside = list[Group](), list[Site](), dict[nn.Parameter, Group](), set[nn.Module]()
    for name, module in modules.items():
        if module in inside:
            continue
        if module in whole:
            inside.update(module.modules())
        params = list(module.named_parameters(prefix=name, recurse=module in whole))
        fresh = [(param_name, param) for param_name, param in params if param not in owner]
        for part in _apart(fresh):
            ending = TRAINED if len(part) < len(fresh) and part[0][1].requires_grad else ""
            group = Group(len(groups), (name or type(model).__name__) + ending, formats=formats)
            for param_name, param in part:
                group.append(param_name, param, compute_dtype_of(param, compute_dtype))
                owner[param] = group
            groups.append(group)
        if params:
            sites.append(Site(module, list(dict.fromkeys(owner[param] for _, param in params))))
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoder) and module not in inside:
            first = dict.fromkeys(owner[param] for param in module.layers[0].parameters())
            sites.append(Site(module, list(first), partial(_may_nest, module)))
    for group in groups:
        if not supports(formats, (slot.dtype for slot in group.slots)):
            if group.trainable():
                raise Unsupported(
                    f"states={formats.states!r} with masters={formats.masters!r} is for groups that compute in "
                    f"{'bf16' if formats.stochastic else 'bf16 or fp32'} alone, and {group.name!r} has "
                    f"{group.dtype_names}: give compute_dtype=torch.bfloat16, or keep states='fp32' and masters='exact'"
                )
            group.formats = EXACT
    return groups, sites


def _apart(params: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Frozen parameters and the others, each as a separate group, where only a little is trained, as with adapters:
    gradients and states have the length of their group.
    """
    frozen = [(name, param) for name, param in params if not param.requires_grad]
    trained = [(name, param) for name, param in params if param.requires_grad]
    few, many = (sum(param.numel() for _, param in part) for part in (trained, frozen))
    has_bytes = bool(trained) and any(not param.is_floating_point() for _, param in frozen)
    apart = has_bytes or few * MAX_TRAINED < many
    return [part for part in ((frozen, trained) if apart else (params,)) if part]


def _list_children(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Of a model's ``modules``, the children of the outermost ModuleLists, where those children own parameters."""
    children, nested = set[nn.Module](), set[nn.Module]()
    for module in modules:
        if isinstance(module, nn.ModuleList) and module not in nested:
            children.update(child for child in module if any(True for _ in child.parameters()))
            nested.update(inner for child in module for inner in child.modules())
    return children


def _may_nest(encoder: nn.TransformerEncoder, args: Any, kwargs: Any) -> bool:
    """Whether ``encoder`` reads its first layer's parameters, to leave out padding if none needs a gradient."""
    padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    return padding is not None and not encoder.layers[0].training


# -- where a group may be cut ------------------------------------------------------------------------------------------

Part = tuple[Slot, int, int]


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a uniform group, the same parameters in each of its ranges. It starts with a
    parameter or a multiple of `Formats.cut` elements later: there arithmetic rounds as on the whole, and no block that
    shares a scale is divided. ``parts``: filled by `parts_of`.
    """

    start: int
    stop: int
    parts: list[Part] = field(default_factory=list, compare=False, repr=False)

    def __len__(self) -> int:
        return self.stop - self.start


def first_element(slot: Slot) -> int:
    """Where ``slot`` starts in a uniform group, in elements."""
    return slot.offset // slot.dtype.itemsize


def num_elements(group: Group) -> int:
    """Elements of a uniform group, gaps included."""
    return group.num_bytes // group.slots[0].dtype.itemsize


def bytes_of(group: Group, kind: str, num_elements: int) -> int:
    """Bytes of so many elements of a range of ``kind``, from a multiple of 256 on."""
    return range_bytes(kind, num_elements, group.slots[0].dtype.itemsize)


def smallest_buffer(group: Group) -> int:
    """Bytes of a buffer that holds two cuts of ``group``."""
    packed = 2 * group.formats.cut * WIDEST_PACKED_ELEMENT + MAX_KINDS * ALIGNMENT
    return packed if group.formats.packed else MIN_BUFFER_BYTES


def passing_bytes(group: Group) -> int:
    """Bytes of what passes through the ring: a group's remainders and moments."""
    narrow = group.slots[0].dtype.itemsize == 2 and not group.formats.stochastic
    kinds = [*(["remainder"] if narrow else []), *group.formats.moments]
    return sum(bytes_of(group, kind, num_elements(group)) for kind in kinds)


def pieces_of(group: Group, max_elements: int) -> list[Piece]:
    """A uniform ``group`` in as few pieces as possible of at most ``max_elements`` (at least two cuts)."""
    assert max_elements >= 2 * group.formats.cut, max_elements
    total = num_elements(group)
    found, start = list[Piece](), 0
    while start < total:
        stop = min(start + max_elements, total)
        if stop < total:  # the last place before it where a cut is allowed
            slot = max((slot for slot in group.slots if first_element(slot) <= stop), key=first_element)
            first, cut = first_element(slot), group.formats.cut
            stop = first + min(stop - first, slot.num_elements) // cut * cut
        found.append(Piece(start, stop))
        start = stop
    return found


def parts_of(group: Group, piece: Piece) -> list[Part]:
    """``(slot, first, last)``: the parameters' shares of ``piece`` of ``group``, as element numbers in the group."""
    if not piece.parts:
        for slot in group.slots:
            first = first_element(slot)
            start, stop = max(piece.start, first), min(piece.stop, first + slot.num_elements)
            if start < stop:
                piece.parts.append((slot, start, stop))
    return piece.parts


def rows_per_slice(group: Group, sites: Sequence[Site], free_bytes: int) -> int:
    """Rows of which `SLICES_AT_ONCE` slices fit ``free_bytes``; 0 if not even the smallest does, or something needs
    ``group`` but plain embeddings, and linear layers without bias, each nothing but it.
    """

    def reads_rows(module: nn.Module) -> bool:
        if type(module) is nn.Embedding:
            return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
        return type(module) is nn.Linear and module.bias is None

    users = [site for site in sites if group in site.groups]
    if len(group.slots) > 1 or not all(site.groups == [group] and reads_rows(site.module) for site in users):
        return 0
    slot = group.slots[0]
    row_bytes = slot.shape[1] * slot.dtype.itemsize
    return min(slot.shape[0], free_bytes // SLICES_AT_ONCE // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE)


# -- the order of use --------------------------------------------------------------------------------------------------


class AccessTrace:
    """Records uses of group indices; the last pass, a forward with what follows it, predicts the next. A deviation (a
    branch, a module called twice) only costs the prediction: the cursor moves to the next place of that group.
    """

    def __init__(self) -> None:
        self.last_pass: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._current: list[int] = []
        self._cursor: int | None = 0

    def begin_pass(self) -> None:
        """The next use opens a new pass; the recorded one becomes the prediction."""
        if self._current:
            self.last_pass, self._positions = self._current, {}
            for position, index in enumerate(self.last_pass):
                self._positions.setdefault(index, []).append(position)
        self._current, self._cursor = [], 0

    def forget_pass(self) -> None:
        """What was used since `begin_pass` is no pass to predict by."""
        self._current = []

    def use(self, index: int, *, once: bool = False) -> None:
        """Group ``index`` is used now. Repetitions in a row count once; ``once``: any repetition begins a pass."""
        if self._current and self._current[-1] == index and not once:
            return
        if len(self._current) == MAX_PASS or (once and index in self._current):
            self.begin_pass()
        self._current.append(index)
        if self._cursor is None or self._cursor >= len(self.last_pass) or self.last_pass[self._cursor] != index:
            self._cursor = self._find(index, self._cursor or 0)
        if self._cursor is not None:
            self._cursor += 1

    def _find(self, index: int, start: int) -> int | None:
        positions = self._positions.get(index, [])
        at = bisect_right(positions, start - 1)
        return positions[at] if at < len(positions) else None

    def next_use(self, index: int) -> int:
        """Uses until ``index`` comes again, counted on into the next pass; NEVER if that is not known."""
        positions = self._positions.get(index)
        if not positions or self._cursor is None:
            return NEVER
        position = self._find(index, self._cursor)
        return (len(self.last_pass) + positions[0] if position is None else position) - self._cursor

    def expect(self, order: list[int]) -> None:
        """Predict this for the first pass."""
        assert not self._current, "nothing was used yet"
        self._current = order
        self.begin_pass()

    def upcoming(self, limit: int, *, wrap: bool = False) -> list[int]:
        """The next ``limit`` distinct groups of this pass, soonest first; with ``wrap`` also of the next pass."""
        if self._cursor is None:
            return []
        found, count = dict[int, None](), len(self.last_pass)
        for position in range(self._cursor, count + self._cursor if wrap else count):
            found.setdefault(self.last_pass[position % count])
            if len(found) == limit:
                break
        return list(found)
