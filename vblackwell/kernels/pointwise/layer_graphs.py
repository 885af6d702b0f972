"""Passes of layers as CUDA graphs, where the GPU waits for the host that launches their kernels.

One pair of graphs, of the output and of the gradients, serves all layers of a kind: what differs between layers (input,
weights, the gradient of the output, tables of positions) is copied to where the graphs read it, and what they give is
copied out. These copies take some hundredths of what launches take. The kernels and their order are those of the
passes themselves, and so are the bits.

A kind is all that decides about kernels: shapes, types, numbers, which gradients are wanted, the stream, and PyTorch's
switches. What cannot be told apart by it is launched as it is.
"""

import re
import threading
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vblackwell.kernels.runtime.capture import Captured, capturing
from vblackwell.kernels.runtime.launch import raw_stream
from vblackwell.kernels.runtime.registry import asked_for, computes_at_once, functions_are_seen
from vblackwell.units import format_bytes

ALIGNMENT = 512  # bytes, of all that torch allocates on a GPU
_OPS = ("rms_norm", "swiglu", "rotary")  # of a layer: `use_backend` may name one
# PyTorch's own for products and attention, whatever it calls them.
_SWITCHES: list[Callable[[], Any]] = [
    getattr(torch._C, name)
    for name in dir(torch._C)
    if name.startswith("_get_") and re.search("sdp|cublas|blas_preferred|deterministic", name) and "tf32" not in name
]

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Foreign(Protocol):
    """Somebody else's part of a layer, of a tensor (..., D) and a list of others: attention, of queries, keys and
    values (..., N) as linears give them, which it empties, gives what the last linear takes; a whole layer, of its
    weights, gives its output (..., D). Draws no numbers, and no tensor of its own wants a gradient."""

    def __call__(self, x: Tensor, others: Any, /) -> Tensor: ...

    @property
    def kind(self) -> Hashable:
        """Equal for those that compute the same function of their arguments and `tensors`; None: nobody can tell."""

    def tensors(self) -> list[Tensor]:
        """What it reads beside its arguments."""
        ...

    def over(self, tensors: list[Tensor]) -> "Foreign":
        """The same for all layers of its `kind`, reading ``tensors``."""
        ...


class Passes(NamedTuple):
    """The output (..., D) of a layer, and the gradients of it with respect to the input and each weight, or None."""

    output: Callable[[Foreign, Tensor, Sequence[Tensor | None]], Tensor]
    gradients: Callable[[Foreign, Tensor, Tensor, Sequence[Tensor | None]], Sequence[Tensor | None]]


class Kind:
    """See the module's text. Its hash, of hundreds of numbers, is computed once."""

    def __init__(self, layer: Hashable, switches: Hashable) -> None:
        self.layer, self.switches = layer, switches
        self._hash = hash((layer, switches))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and (self.layer, self.switches) == (other.layer, other.switches)


def kind_of(
    foreign: Foreign, numbers: Hashable, x: Tensor, weights: Sequence[Tensor | None], forward: Kind | None = None
) -> Kind | None:
    """``numbers`` are the caller's; ``forward``: the kind of these tensors then. None: nobody can tell."""
    if not all(map(lies_as_usual, (x, *weights))) or not computes_at_once() or functions_are_seen():
        return None
    switches, tables = _switches(x.device), foreign.tensors()
    if forward is not None and forward.switches == switches:
        return forward
    if any(each.device != x.device for each in tables) or (own := foreign.kind) is None:
        return None
    shapes = tuple([None if each is None else (each.shape, each.dtype) for each in weights])
    read = tuple([(each.shape, each.stride(), each.dtype) for each in tables])
    return Kind((own, numbers, x.shape, x.dtype, x.device, shapes, read), switches)


def lies_as_usual(tensor: Tensor | None) -> bool:
    """Whether it lies as memory of its own does, for which libraries choose kernels by addresses too."""
    return tensor is None or (tensor.is_contiguous() and (not tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0))


def _switches(device: torch.device) -> Hashable:
    """What else chooses kernels."""
    stream = raw_stream(device.index) if device.type == "cuda" else 0
    found = [each() for each in _SWITCHES]
    switches = tuple([tuple(each) if type(each) is list else each for each in found])
    return stream, tuple(map(asked_for, _OPS)), torch.get_default_dtype(), _fp32_precision(), switches


def _fp32_precision() -> str | bool:
    products = torch.backends.cuda.matmul
    found: str | None = getattr(products, "fp32_precision", None)  # where it is set, the older name raises
    return products.allow_tf32 if found is None else found


class _Graphs:
    """The two passes of one kind of layers, and where they read what differs."""

    def __init__(
        self, passes: Passes, foreign: Foreign, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None], pool: Any
    ) -> None:
        self._x, self._dy = torch.empty_like(x), torch.empty_like(dy)
        self._weights = [None if each is None else torch.empty_like(each) for each in weights]
        self._tables = [torch.empty_like(each) for each in foreign.tensors()]
        self._filled: list[tuple[weakref.ref[Tensor], int | None]] = []  # whose values they have, and their versions
        self._foreign = own = foreign.over(self._tables)  # the kind names what it refers to
        compute = (
            lambda: passes.output(own, self._x, self._weights),
            lambda: passes.gradients(own, self._dy, self._x, self._weights),
        )
        self._fill(foreign, x, weights, dy)
        for each in compute:
            each()
        if pool is not None:
            self.wait()
            torch.cuda.empty_cache()  # of this stream: nothing else will run there
        self._output, self._gradients = (Captured[Any](each, pool) for each in compute)
        self.kind = own.kind  # of what was captured

    def _fill(self, foreign: Foreign, x: Tensor, weights: Sequence[Tensor | None], dy: Tensor | None = None) -> None:
        tables = foreign.tensors()
        versions = [None if each.is_inference() else each._version for each in tables]
        are_the_same = [
            found() is table and before == version is not None
            for (found, before), table, version in zip(self._filled, tables, versions, strict=False)
        ]
        if len(self._filled) != len(tables) or not all(are_the_same):  # mostly they are those of the layer before
            self._filled.clear()
            _copy_all(self._tables, tables)
            self._filled += [(weakref.ref(each), now) for each, now in zip(tables, versions, strict=True)]
        pairs = [(self._x, x), *zip(self._weights, weights, strict=True), *([] if dy is None else [(self._dy, dy)])]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        _copy_all([a for a, _ in pairs], [b for _, b in pairs])

    def forget_tables(self) -> None:
        """Copy what layers read beside their input anew: a forward begins, and not all that writes to it is counted.
        Within one, what writes to it between two layers has to be."""
        self._filled.clear()

    def output(self, foreign: Foreign, x: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        self._fill(foreign, x, weights)
        return self._output().clone()

    def gradients(
        self,
        foreign: Foreign,
        dy: Tensor,
        x: Tensor,
        weights: Sequence[Tensor | None],
        places: Sequence[Tensor | None] = (),
    ) -> list[Tensor | None]:
        """In the ``places`` of weights that are not None, where they are given."""
        self._fill(foreign, x, weights, dy)
        given, free = self._gradients(), iter(places)
        into = [None, *(None if each is None else next(free, None) for each in weights)]
        pairs = zip(given, into, strict=True)
        found = [None if each is None else torch.empty_like(each) if at is None else at for each, at in pairs]
        _copy_all([a for a in found if a is not None], [b for b in given if b is not None])
        return found

    def wait(self) -> None:
        """Return when the GPU is done with it."""
        if self._x.is_cuda:
            torch.cuda.synchronize(self._x.device)

    def seconds(self, foreign: Foreign, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None]) -> float:
        """What both passes take of the host; the first ones bring the graphs to the GPU."""
        begun = 0.0
        for _ in range(2):
            self.wait()
            begun = time.perf_counter()
            self.output(foreign, x, weights)
            self.gradients(foreign, dy, x, weights)
        return time.perf_counter() - begun


@dataclass
class _Launched:
    """Passes of a kind in one step, and how long the host launched them."""

    layers: int = 0
    seconds: float = 0.0
    idle: int = 0  # times that the GPU was done with the gradients of one layer when the host came with the next
    last: torch.cuda.Event | None = None  # after the newest gradients, on a GPU

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU did, mostly. For bytes it waits with what was launched already."""
        return self.last is None or 2 * self.idle >= self.layers - 1

    def begin(self) -> float:
        """The host comes with a layer's gradients."""
        self.idle += self.last is not None and self.last.query()
        return time.perf_counter()

    def end(self, begun: float, *, on_gpu: bool) -> None:
        self.layers += 1
        self.seconds += time.perf_counter() - begun
        if on_gpu:
            self.last = self.last or torch.cuda.Event()
            self.last.record()


class LayerGraphs:
    """The graphs of one model's layers: none until `allow`, and none that saves no time. Nothing of it waits for the
    GPU but a capture and `drop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[Hashable, _Graphs] = {}
        self._steps = deque[dict[Hashable, _Launched]](maxlen=2)
        self._step = defaultdict[Hashable, _Launched](_Launched)
        self._wanted: set[Hashable] = set()
        self._limit = self._held = 0
        self.peak_bytes = self.reserved_before = 0  # what they held at most, tried ones too; of torch before the first
        self.shared: dict[Hashable, Any] = {}  # what layers of one forward have in common: their callers' notes
        # By kind of foreign layers the number of their weights; None where they draw numbers or keep something.
        self.alone: dict[Hashable, int | None] = {}
        self.declined = ""  # why there are none, or no more
        # Whose gradients go elsewhere in the end tells here where: they are written there at once.
        self.places: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None] | None] = lambda leaves: None

    @property
    def about(self) -> str:
        """What became of layers, in words for people; empty where nothing has been decided."""
        held = f"layers as CUDA graphs, which hold {format_bytes(self._held)} of the GPU" if self._graphs else ""
        launched = f"layers are launched kernel by kernel: {self.declined}" if self.declined else ""
        return "; other ".join(filter(None, (held, launched)))

    @property
    def num_bytes(self) -> int:
        """Of the GPU's memory: what graphs hold, or may take in this step."""
        return max(self._limit, self._held)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, layers of this thread, and their gradients, go through the graphs that there are."""
        before, _used.graphs = getattr(_used, "graphs", None), weakref.ref(self)
        self.shared = {}
        for each in list(self._graphs.values()):
            each.forget_tables()
        try:
            yield
        finally:
            self.shared = {}
            _used.graphs = before

    def end_step(self) -> None:
        """A step is over: no graph is captured after the first that follows `allow`."""
        self._steps.append(dict(self._step))
        self._step.clear()
        self._wanted.clear()
        self._limit = 0

    def allow(self, num_bytes: int) -> None:
        """Let the next step capture, in so much of the GPU's memory, what each of the last two has launched and the GPU
        waited for. To try it takes as much: where the process has no more, nothing is captured."""
        both = set.intersection(*map(set, self._steps)) if len(self._steps) > 1 else set()
        self._wanted = {kind for kind in both if self._steps[-1][kind].waits_for_host}
        self.declined = "the GPU does not wait for the host" if both and not self._wanted else ""
        if self._wanted and num_bytes <= 0:
            self._wanted, self.declined = set(), "steps leave no memory for graphs"
        self._limit = num_bytes if self._wanted else 0

    def drop(self) -> None:
        """Give all memory back to torch's cache, when the GPU is done with it."""
        with self._lock:
            for graphs in self._graphs.values():
                graphs.wait()
            self._graphs.clear()
            self._wanted.clear()
        self._steps.clear()
        self._limit = self._held = 0
        self.declined = ""

    def output(
        self, kind: Hashable, passes: Passes, foreign: Foreign, x: Tensor, weights: Sequence[Tensor | None]
    ) -> Tensor:
        with self._lock:
            found = self._graphs.get(kind)
            if found is not None:
                return found.output(foreign, x, weights)
        began = time.perf_counter()
        y = passes.output(foreign, x, weights)
        self._step[kind].seconds += time.perf_counter() - began
        return y

    def gradients(
        self,
        kind: Hashable,
        passes: Passes,
        foreign: Foreign,
        dy: Tensor,
        x: Tensor,
        weights: Sequence[Tensor | None],
        leaves: Callable[[], Sequence[Tensor | None]] = lambda: (),
    ) -> Sequence[Tensor | None]:
        """``leaves``: of the weights that are not None, parameters whose gradients are added to theirs, or None."""
        places = (self.places(leaves()) if kind in self._graphs else None) or ()  # before the lock: others have it last
        with self._lock:
            if kind in self._wanted:
                self._wanted.discard(kind)
                self._capture(kind, passes, foreign, dy, x, weights)
            found = self._graphs.get(kind)
            if found is not None:
                return found.gradients(foreign, dy, x, weights, places)
        launched = self._step[kind]
        begun = launched.begin()
        gradients = passes.gradients(foreign, dy, x, weights)
        launched.end(begun, on_gpu=x.device.type == "cuda")
        return gradients

    def _capture(
        self, kind: Hashable, passes: Passes, foreign: Foreign, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None]
    ) -> None:
        given, on_gpu = (foreign, dy, x, weights), x.device.type == "cuda"
        if on_gpu and not self.peak_bytes:
            self.reserved_before = torch.cuda.max_memory_reserved(x.device)
        before = self._reserved(x.device) if on_gpu else 0
        try:
            if on_gpu:
                with capturing(x.device):
                    graphs = _Graphs(passes, *given, torch.cuda.graph_pool_handle())
                launched = self._steps[-1][kind]
                pays = graphs.seconds(*given) < launched.seconds / max(1, launched.layers)
                held = max(0, self._reserved(x.device) - before)
                self.peak_bytes = max(self.peak_bytes, self._held + held)
            else:
                graphs, pays, held = _Graphs(passes, *given, None), True, 0
            left = self._limit - self._held
            if graphs.kind != foreign.kind:  # as it was in forward
                self.declined = "something has changed what layers compute since their forward"
            elif pays and held <= left:
                self._graphs[kind] = graphs
                self._held += held
            elif pays:
                self.declined = (
                    f"a graph needs {format_bytes(held)} of the GPU, and steps leave it {format_bytes(left)}"
                )
            else:
                self.declined = "a replay takes the host as long"
        except torch.OutOfMemoryError:
            if on_gpu:
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_reserved(x.device) - before)
            self.declined = f"a graph needs more of the GPU than the {format_bytes(self._limit)} that steps leave it"
        except Exception as error:  # whatever a foreign attention raises: a reason to launch it
            told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.declined = f"they cannot be captured: {told}"
            warnings.warn(f"layers are launched kernel by kernel, as {self.declined}", stacklevel=2)
        if on_gpu and kind not in self._graphs:
            graphs = None
            self._reserved(x.device)  # what was tried goes back to the driver

    @staticmethod
    def _reserved(device: torch.device) -> int:
        torch.cuda.synchronize(device)  # memory that a stream still uses would be given back by the second call alone
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)


_used = threading.local()


def graphs_in_use() -> LayerGraphs | None:
    """What `LayerGraphs.used` says in this thread."""
    found = getattr(_used, "graphs", None)  # an interrupt may leave it there, when nothing else wants it any more
    return None if found is None else found()
