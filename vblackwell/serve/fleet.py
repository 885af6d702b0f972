"""The models of one server in one stack: weights in host memory, under one budget of level 0 with pages of keys and
values.

A model that is larger than the budget runs in the same way as others, streamed at each forward; one that is wholly on
level 0 runs without hooks (`BoundWeights`). Where bytes are short, the model that was not used for longest gives groups
up, one after the other, so that of two models that nearly fit most stays. Models over one folder (itself, adapters)
share its weights, and sleep and wake together. Nothing is written to a disk.

All calls but those that read come from the thread that runs the models, or between its forwards.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, UnknownKey
from vblackwell.folders.checked import check_tokenizer
from vblackwell.folders.folder import read_tokenizer, stored_dtype
from vblackwell.generate.adapters import trained_over
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
from vblackwell.memory.pool import Reservation
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, is_accelerated, restore_causal_lm
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.generation import workspace_bytes
from vblackwell.serve.row_tiles import join_linears, restore_linears, tile_linears
from vblackwell.serve.served import Served
from vblackwell.serve.shared_base import open_over_one_base
from vblackwell.serve.sources import bytes_in_ram, check_names, folders_of, named, naming
from vblackwell.serve.sunk import LEVEL, SunkPages
from vblackwell.serve.weights import Weights
from vblackwell.units import format_bytes

# Operators on rows, fused on a GPU; of those with products, which compute in tiles, one that calls its linears.
FUSED = ("norm", "feed_forward", "activation", "gate", "rotary", "positions")
KEPT_S, KEPT_BUSY_S = 1.0, 30.0  # that freed memory stays reserved: giving it back takes 4 ms a GiB
IN_USE_S = 1.0  # until a model that is used beyond its time is looked at again
Family = tuple[Path, str]  # a folder of weights, and how they are packed as they are opened


class Fleet:
    """Models by name, in one ``stack``; close it at the end, or use it as a context manager.

    Args:
        models: folders, hub ids, run folders of `vb train` or adapters' folders, each as it is or as ``name=folder``.
            By default a folder's own name, or the hub id, is the model's name. Packed folders stay packed.
        budget: level 0 for weights and pages together, bytes or '12GiB'; by default a share of the free GPU memory.
        host_memory: RAM for all weights, and for pages that sink; by default a share of what is free.
        device: of level 0, by default the first GPU; 'cpu' makes it an arena in RAM.
        pin: names of models that are loaded at once and never leave level 0.
        preload: names of others that are loaded at once.
        keep_alive: seconds after which a model that is not used falls asleep (`sleep_idle`); None: never.
        trust_remote_code: run code that lies in folders, where the architecture is not one of transformers'.
        on_open: called with each model's name before it is read.

    Raises ConfigurationError: a name that is none, or is there twice; an unknown one in ``pin`` or ``preload``.
    InsufficientMemory, with both numbers: RAM that cannot hold all weights, or pinned models that do not fit the
    budget, before anything is read; pinned models that leave no room for the largest layer group of the others. What
    `load_causal_lm` raises, with the model's name.
    """

    def __init__(
        self,
        models: Sequence[str | Path],
        *,
        budget: str | int | None = None,
        host_memory: str | int | None = None,
        device: torch.device | str | None = None,
        pin: Collection[str] = (),
        preload: Collection[str] = (),
        keep_alive: float | None = None,
        trust_remote_code: bool = False,
        on_open: Callable[[str], None] = lambda name: None,
    ) -> None:
        sources = named(models)
        check_names(sources, pin, preload)
        families = dict[Family, dict[str, Path | None]]()
        sizes = dict[str, int]()
        for name, source in sources.items():
            with naming(name):
                folder, adapter = folders_of(source)
                family = folder.resolve(), json.dumps({} if adapter is None else trained_over(adapter)[1])
                sizes[name] = bytes_in_ram(None if family in families else folder, adapter)
                families.setdefault(family, {})[name] = adapter
        self._begin(create_vgpu_stack(budget, host_memory, 0, device=device, cap_process=False), keep_alive)
        try:
            self._check_host(sizes)
            pinned = {name for members in families.values() if not members.keys().isdisjoint(pin) for name in members}
            self._check_pinned({name: size for name, size in sizes.items() if name in pinned})
            for family, members in families.items():
                for name in members:
                    on_open(name)
                self._open(family, members, trust_remote_code=trust_remote_code, pinned=not pinned.isdisjoint(members))
            self._models |= {name: self._models.pop(name) for name in sources}  # in the order in which they were given
            self._settle(preload)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_modules(
        cls,
        models: Mapping[str, nn.Module],
        *,
        tokenizers: Mapping[str, Tokenizer] | None = None,
        budget: str | int | None = None,
        host_memory: str | int | None = None,
        device: torch.device | str | None = None,
        pin: Collection[str] = (),
        preload: Collection[str] = (),
        keep_alive: float | None = None,
    ) -> "Fleet":
        """A fleet of causal models of transformers that are in memory. Without a ``budget`` they are served where they
        are, always awake. With one they are frozen and their weights move into the stack, until `close` makes them
        plain modules on the CPU again. The other arguments and errors are those of `Fleet`."""
        check_names(models, pin, preload)
        fleet, stays = cls.__new__(cls), budget is None
        if stays and (host_memory is not None or pin or preload or keep_alive is not None):
            given = "host_memory, pin, preload and keep_alive"
            raise ConfigurationError(f"{given} are for models that may sleep: give budget=, or leave them out")
        if stays:
            device = next((param.device for model in models.values() for param in model.parameters()), "cpu")
        fleet._begin(create_vgpu_stack(budget, host_memory, 0, device=device, cap_process=False), keep_alive)
        try:
            if not stays:
                sizes = {name: sum(param.nbytes for param in model.parameters()) for name, model in models.items()}
                fleet._check_host(sizes)
                fleet._check_pinned({name: size for name, size in sizes.items() if name in pin})
            for name, model in models.items():
                with naming(name):
                    if offload_of(model) is not None:
                        raise ConfigurationError("it is in a stack already: release(model) first")
                    weights = None if stays else fleet._take_over(name, model, pinned=name in pin)
                    fleet._add(name, model, weights, (tokenizers or {}).get(name))
            fleet._settle(preload)
        except BaseException:
            fleet.close()
            raise
        return fleet

    def _begin(self, stack: VGPUStack, keep_alive: float | None) -> None:
        self.stack, self.keep_alive = stack, keep_alive
        self._models, self._weights = dict[str, Served](), list[Weights]()
        self.models: Mapping[str, Served] = MappingProxyType(self._models)
        self._reserved: dict[int, tuple[Tensor, Reservation]] = {}
        self._sunk: dict[int, SunkPages] = {}
        self._serial = 0
        self._freed_at: float | None = None  # when memory was freed that is still reserved
        self._undo = ExitStack()
        if keep_alive is not None and not 0 <= keep_alive < math.inf:
            self.close()
            raise ConfigurationError(f"keep_alive {keep_alive}: give seconds from 0, or None for never")

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(
        self, family: Family, members: Mapping[str, Path | None], *, trust_remote_code: bool, pinned: bool
    ) -> None:
        (folder, how), first = family, next(iter(members))
        with naming(first):
            tokenizer = read_tokenizer(folder)
            check_tokenizer(folder, tokenizer)
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, **json.loads(how)}
            options["weight_bytes"] = self._weight_bytes
            if len(members) > 1:
                modules = open_over_one_base(folder, members, self.stack, **options)
            else:
                options |= {"dtype": stored_dtype(folder), "trainable": False, "placement": "streamed"}
                modules = {first: load_causal_lm(folder, self.stack, first, adapter=members[first], **options).eval()}
        weights = self._weights_of(modules[first], tuple(members), pinned=pinned)
        self._undo.callback(weights.engine.close)
        for name, module in modules.items():
            if len(members) > 1:
                module.register_forward_pre_hook(lambda *_: weights.begin_pass())
            self._add(name, module, weights, tokenizer, folder, members[name])

    def _weights_of(self, model: nn.Module, names: tuple[str, ...], *, pinned: bool) -> Weights:
        engine = offload_of(model)
        assert isinstance(engine, Offload)
        self._weights.append(Weights(engine, names, pinned=pinned))
        return self._weights[-1]

    def _take_over(self, name: str, model: nn.Module, *, pinned: bool) -> Weights:
        modes = [(module, module.training) for module in model.modules()]
        trained = [param for param in model.parameters() if param.requires_grad]
        model.requires_grad_(False).eval()

        def restore() -> None:
            release(model)
            for param in trained:
                param.requires_grad_(True)
            for module, training in modes:
                module.training = training

        self._undo.callback(restore)  # first: what is below may raise
        options: dict[str, Any] = {"placement": "streamed", "accelerate": False}
        enable_vgpu_stack_optimization(model, self.stack, name, weight_bytes=self._weight_bytes, **options)
        return self._weights_of(model, (name,), pinned=pinned)

    def _add(
        self,
        name: str,
        module: nn.Module,
        weights: Weights | None,
        tokenizer: Tokenizer | None,
        folder: Path | None = None,
        adapter: Path | None = None,
    ) -> None:
        if weights is not None:
            self._undo.callback(restore_linears, join_linears(module, weights.lie_together))
        self._undo.callback(restore_linears, tile_linears(module))
        if self.stack.level0_device.type == "cuda" and not is_accelerated(module):
            accelerate_causal_lm(module, modules=FUSED, loss=False)
            self._undo.callback(restore_causal_lm, module)
        calls = self._make_room_for, self._hand_back
        self._models[name] = Served(name, module, weights, *calls, tokenizer, folder, adapter)

    def _settle(self, preload: Collection[str]) -> None:
        """All models are there: divide level 0 and load those that are wanted at once."""
        self._check_room(0)
        self._divide()
        for served in self._models.values():
            if served.pinned:
                served.wake()
        for name in preload:
            self._models[name].wake()

    def _check_host(self, sizes: Mapping[str, int]) -> None:
        if len(self.stack.levels) < 2:
            raise ConfigurationError("the models' weights lie in RAM, and host_memory is 0: give it their size")
        host = self.stack.levels[1]
        needed, free = sum(sizes.values()), host.free_bytes
        if needed > free:
            each = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
            raise InsufficientMemory(
                f"the models' weights need {format_bytes(needed)} of RAM ({each}), and {format_bytes(free)} are there "
                "for them: serve fewer or smaller ones (vb quantize), or raise host_memory",
                needed_bytes=needed,
                available_bytes=free,
            )

    def _check_pinned(self, sizes: Mapping[str, int]) -> None:
        """Raises InsufficientMemory where the pinned models do not fit level 0 together."""
        needed, free = sum(sizes.values()), self._weight_bytes
        if needed > free:
            each = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
            raise InsufficientMemory(
                f"the pinned models need {format_bytes(needed)} of level 0 ({each}), and the budget leaves "
                f"{format_bytes(free)} for weights: pin fewer, or raise the budget",
                needed_bytes=needed,
                available_bytes=free,
            )

    def _check_room(self, more_bytes: int) -> None:
        """Raises InsufficientMemory where next to ``more_bytes`` of pages not all models could run."""
        pinned = sum(weights.held_bytes for weights in self._weights if weights.pinned)
        others = [weights for weights in self._weights if not weights.pinned]
        largest = max(others, key=lambda weights: weights.least_bytes, default=None)
        needed, free = pinned + (0 if largest is None else largest.least_bytes), self._weight_bytes - more_bytes
        if needed > free:
            said = [f"{format_bytes(pinned)} of pinned models"] if pinned else []
            said += [f"the largest layer group of model {largest.names[0]!r}"] if largest is not None else []
            others = {"pages": more_bytes, "workspace": self._workspace_bytes}
            beside = [f"{format_bytes(size)} of {what}" for what, size in others.items() if size]
            pages = f" next to {' and '.join(beside)}" if beside else ""
            raise InsufficientMemory(
                f"weights need {format_bytes(needed)} of level 0 at once ({' and '.join(said)}), and the budget leaves "
                f"{format_bytes(max(0, free))} for them{pages}: raise the budget, or pin fewer models",
                needed_bytes=needed,
                available_bytes=max(0, free),
            )

    # -- level 0 -------------------------------------------------------------------------------------------------------

    @property
    def _workspace_bytes(self) -> int:
        """Of level 0, what a pass computes in; an arena counts none of that."""
        on_gpu = self.stack.level0_device.type == "cuda"
        return workspace_bytes(self.stack.levels[0].capacity_bytes) if on_gpu else 0

    @property
    def _weight_bytes(self) -> int:
        """Of level 0, what weights may take next to pages and workspace."""
        reserved = sum(each.extent.held_bytes for _, each in self._reserved.values())
        return max(0, self.stack.levels[0].capacity_bytes - self._workspace_bytes - reserved)

    def _divide(self) -> None:
        """Tell all weights what they may take, now that pages have changed."""
        pinned = sum(weights.held_bytes for weights in self._weights if weights.pinned)
        for weights in self._weights:
            weights.allow(weights.held_bytes if weights.pinned else self._weight_bytes - pinned)

    def _make_room(self, num_bytes: int, wanting: Weights | None = None) -> None:
        """Let others than ``wanting``, the longest unused first, give groups up until so many bytes are free."""
        level = self.stack.levels[0]
        able = [weights for weights in self._weights if weights is not wanting and not weights.pinned]
        for weights in sorted(able, key=lambda weights: weights.idle_s, reverse=True):
            while level.free_bytes - self._workspace_bytes < num_bytes and weights.give_way():
                pass

    def _make_room_for(self, weights: Weights) -> None:
        self._make_room(weights.missing_bytes, weights)

    def reserve(self, num_bytes: int) -> Tensor:
        """So many bytes of level 0, uint8, contents undefined, until `release`; weights give way. Raises
        InsufficientMemory where pinned models and the largest layer group do not fit next to them; nothing changed."""
        self._check_room(num_bytes)
        with self._locked():
            self._make_room(num_bytes)
            self._serial += 1
            made = self.stack.reserve(f"pages#{self._serial}", num_bytes, 0)
            tensor = made.bytes
            self._reserved[id(tensor)] = tensor, made
            self._divide()
        return tensor

    def reserve_ram(self, reserved: Tensor, block_bytes: int) -> SunkPages | None:
        """RAM for blocks of what `reserve` gave, until that is released: as many bytes, but not more than half of what
        is left next to the weights; None where that holds no block."""
        ram = self.stack.levels[LEVEL] if len(self.stack.levels) > LEVEL else None
        total = 0 if ram is None or ram.device is None else min(reserved.nbytes, ram.free_bytes // 2) // block_bytes
        if not total:
            return None
        name = f"sunk {self._reserved[id(reserved)][1].name}"
        made = self._sunk[id(reserved)] = SunkPages(self.stack, name, reserved, block_bytes, total)
        return made

    def release(self, reserved: Tensor) -> None:
        """Give back what `reserve` gave, and nothing reads any more; raises UnknownKey for anything else."""
        if id(reserved) not in self._reserved:
            raise UnknownKey("release takes a tensor that reserve gave, once")
        if id(reserved) in self._sunk:
            self._sunk.pop(id(reserved)).close()
        with self._locked():
            self.stack.unreserve(self._reserved.pop(id(reserved))[1])
            self._divide()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._weights[0].engine.lock if self._weights else nullcontext():  # one for all models of a stack
            yield

    # -- time ----------------------------------------------------------------------------------------------------------

    def sleep_idle(self, busy: Collection[str] = ()) -> float | None:
        """Let models fall asleep that were not used for ``keep_alive`` seconds; not those that are ``busy``, by name,
        since when they are used. Other programs get what was freed, soon. Seconds until there may be something to
        do; None where there will not, as long as nothing is used."""
        waits, slept = list[float](), False
        if self._freed_at is not None:
            left = self._freed_at + (KEPT_BUSY_S if busy else KEPT_S) - time.monotonic()
            if left <= 0:
                self._freed_at = None
                torch.cuda.empty_cache()
            else:
                waits.append(left)
        if self.keep_alive is None:
            return min(waits, default=None)
        for weights in self._weights:
            if weights.pinned or not weights.loaded_bytes:
                continue
            if not set(weights.names).isdisjoint(busy):
                weights.keep()
                waits.append(self.keep_alive)
                continue
            left = self.keep_alive - weights.idle_s
            if left <= 0 and weights.drop():
                slept = True
            else:
                waits.append(left if left > 0 else IN_USE_S)
        if slept:
            self._hand_back()
        return min(waits, default=None)

    def _hand_back(self) -> None:
        """Let other programs have what level 0 has freed and torch still keeps, soon: it takes as long as the next
        model's first layers."""
        if self.stack.level0_device.type == "cuda":
            self._freed_at = time.monotonic()

    def close(self) -> None:
        """Give everything back; modules that were given are plain again. Idempotent."""
        try:
            while self._sunk:
                self._sunk.popitem()[1].close()
            self._undo.close()
        finally:
            self._reserved.clear()
            self.stack.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
