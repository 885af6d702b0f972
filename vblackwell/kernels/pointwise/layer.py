"""A whole layer as one operation that keeps its input and its weights alone, and computes the rest again in backward:
in place of a checkpoint around it, which does the same by a second forward of the module, its hooks and all.

Of a pre-norm layer backward computes the attention half once more and keeps of it what autograd would. Operations,
their order, and so the bits are those of `rms_norm`, linear layers, the caller's attention and `feed_forward_block` one
after the other, with one node for autograd in place of two dozen. Attention is a function of the caller's, whose own
small graph is made and used inside backward: whatever it is made of, nobody has to know its derivative.

Not an op: it consists of ops and launches nothing itself, so traces see what it does.

Legend: D width, M rows, N features out of a linear.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from vblackwell.errors import StaleTensor
from vblackwell.kernels.pointwise.layer_graphs import Foreign, Passes, graphs_in_use, kind_of, lies_as_usual
from vblackwell.kernels.pointwise.linears import _feed_forward_block_backward, feed_forward_block
from vblackwell.kernels.pointwise.rows import _rms_norm, _rms_norm_backward


def layer_block(attend: Foreign, epsilons: tuple[float, float], x: Tensor, *weights: Tensor | None) -> Tensor:
    """``h + feed_forward(rms_norm(h))`` of ``h = x + o(attend(q(n), k(n), v(n)))`` with ``n = rms_norm(x)``, (..., D).

    Args:
        epsilons: of the two norms.
        weights: the norms' (D,); gate's, up's and down's; then weight and bias, or None, of q, k, v and o. All of the
            type of ``x``, and on CUDA, as for `feed_forward_block`, which raises what is raised here.
    """
    return _layer(attend, partial(_passes_of_block, epsilons), ("block", epsilons), x, *weights)


def own_layer(forward: Foreign, x: Tensor, *weights: Tensor | None) -> Tensor:
    """``forward(x, weights)``, (..., D): a layer that nobody has to know, as autograd derives it."""
    return _layer(forward, _passes_of_own, "own", x, *weights)


def _layer(foreign: Foreign, passes: Callable[..., Passes], numbers: Hashable, *tensors: Tensor | None) -> Tensor:
    if has_torch_function(tensors):
        return handle_torch_function(_layer, tensors, foreign, passes, numbers, *tensors)
    return _Layer.apply(foreign, passes, numbers, *tensors)


class _Sources(torch.autograd.Function):
    """Tensors as the beginning of a graph, which keeps none of them, as leaves would be kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _parts(x: Tensor, norm_D: Tensor, eps: float, linears: Sequence[Any]) -> list[Tensor]:
    """Queries, keys and values."""
    n, _, _ = _rms_norm(x, None, norm_D, eps)
    return [functional.linear(n, *linears[at : at + 2]) for at in (0, 2, 4)]


def _output(epsilons: tuple[float, float], attend: Foreign, x: Tensor, weights: Sequence[Any]) -> Tensor:
    (first_D, second_D, *feed_forward), linears = weights[:5], weights[5:]
    h = functional.linear(attend(x, _parts(x, first_D, epsilons[0], linears)), *linears[6:]).add_(x)
    return feed_forward_block(h, second_D, epsilons[1], *feed_forward, True)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, foreign: Foreign, passes: Callable[..., Passes], numbers: Hashable, x: Tensor, *weights: Tensor
    ) -> Tensor:
        graphs, autocast = graphs_in_use(), _autocast(x)
        ctx.foreign, ctx.graphs = foreign, graphs
        ctx.autocast, wanted = autocast, ctx.needs_input_grad[4:]
        ctx.passes, ctx.numbers = passes(wanted), (numbers, wanted, autocast)
        ctx.joint, ctx.versions = None if graphs is None else _joint(weights), _versions(foreign)
        ctx.save_for_backward(x, *(weights if ctx.joint is None else [ctx.joint.of(weights)]))
        ctx.kind = kind = None if graphs is None else kind_of(foreign, ctx.numbers, x, weights)
        if graphs is None or kind is None:
            return ctx.passes.output(foreign, x, weights)
        return graphs.output(kind, ctx.passes, foreign, x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors  # read once: a checkpoint unpacks them
        weights = weights if ctx.joint is None else ctx.joint.parts(*weights)
        if ctx.versions != _versions(ctx.foreign):
            raise StaleTensor(
                "what a checkpointed layer read beside its input (a mask, tables of positions) was written to in place "
                "since its forward, and backward needs it as it was: write into a copy of it"
            )
        dtype = ctx.autocast
        with nullcontext() if dtype == _autocast(x) else torch.autocast(x.device.type, dtype, dtype is not None):
            kind = ctx.graphs and kind_of(ctx.foreign, ctx.numbers, x, weights, ctx.kind)
            if kind is None or dy.dtype != x.dtype or not lies_as_usual(dy):
                gradients = ctx.passes.gradients(ctx.foreign, dy, x, weights)
            else:
                gradients = ctx.graphs.gradients(kind, ctx.passes, ctx.foreign, dy, x, weights, partial(_leaves, ctx))
        return None, None, None, *gradients


def _leaves(ctx: Any) -> list[Tensor | None]:
    """Parameters among the weights whose gradients are about to be added to theirs; none where somebody else gets
    them (`torch.autograd.grad`)."""
    nodes: list[Any] = [node for node, _ in ctx.next_functions[1:]]  # of tensors that are not None, the input first
    will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
    try:
        are_added = [type(node).__name__ == "AccumulateGrad" and will_run(node) for node in nodes]
    except RuntimeError:  # torch does not tell it of a leaf whose gradient was asked for
        return []
    return [node.variable if is_added else None for node, is_added in zip(nodes, are_added, strict=True)]


def _versions(foreign: Foreign) -> list[int]:
    return [0 if each.is_inference() else each._version for each in foreign.tensors()]


class _Joint(NamedTuple):
    """Where tensors of one type lie in one memory, in elements from the first: together they are kept by one reference,
    which whoever loads weights looks up once. For a stream's weights, whose changes it sees: autograd would see those
    of the first one."""

    start: int
    stop: int
    places: list[Any]  # (shape, strides, offset) of each, or None

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        first = next(each for each in tensors if each is not None)
        return first.detach().as_strided((self.stop - self.start,), (1,), self.start)

    def parts(self, joint: Tensor) -> list[Tensor | None]:
        start = joint.storage_offset()
        return [each and joint.as_strided(each[0], each[1], start + each[2]) for each in self.places]


def _joint(tensors: Sequence[Tensor | None]) -> _Joint | None:
    """None where they do not lie in one memory."""
    held, starts = [each for each in tensors if each is not None], list[int]()
    if not held:
        return None
    dtype, memory = held[0].dtype, held[0].untyped_storage().data_ptr()
    for each in held:
        starts.append(start := int(each.storage_offset()))
        if each.dtype != dtype or each.data_ptr() - start * each.itemsize != memory or not each.is_contiguous():
            return None
    first, left = min(starts), iter(starts)
    stop = max(start + each.numel() for start, each in zip(starts, held, strict=True))
    places = [None if each is None else (each.shape, each.stride(), next(left) - first) for each in tensors]
    return _Joint(first, stop, places)


def _passes_of_own(wanted: Sequence[bool]) -> Passes:
    return Passes(_own_output, partial(_own_gradients, wanted))


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Inside, autocast casts a weight each time: what it keeps would stay, and a graph would read it later."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _own_output(forward: Foreign, x: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    with _no_casts_kept():
        return forward(x, weights)


def _own_gradients(
    wanted: Sequence[bool], forward: Foreign, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of ``x`` and of each weight that is ``wanted``, or None."""
    with torch.enable_grad(), _no_casts_kept():
        x = x.detach().requires_grad_()
        pairs = zip(weights, wanted, strict=True)
        weights = [None if each is None else each.detach().requires_grad_(want) for each, want in pairs]
        y = forward(x, weights)
    asked = [x, *(each for each in weights if each is not None and each.requires_grad)]
    found = iter(torch.autograd.grad(y, asked, dy, allow_unused=True))
    return [next(found) if each is not None and each.requires_grad else None for each in (x, *weights)]


def _passes_of_block(epsilons: tuple[float, float], wanted: Sequence[bool]) -> Passes:
    return Passes(partial(_output, epsilons), partial(_gradients, epsilons, wanted))


def _gradients(
    epsilons: tuple[float, float],
    wanted: Sequence[bool],
    attend: Foreign,
    dy: Tensor,
    x: Tensor,
    weights: Sequence[Any],
) -> list[Tensor | None]:
    """Of ``x`` and of each weight that is ``wanted``, or None."""
    (first_D, second_D, *feed_forward), linears = weights[:5], weights[5:]
    parts = _parts(x, first_D, epsilons[0], linears)
    with torch.enable_grad():
        parts = list(_Sources.apply(x.new_empty(0).requires_grad_(), *parts))
        edges = [get_gradient_edge(part) for part in parts]
        out = attend(x, parts)
    out_MN = out.detach().reshape(-1, out.shape[-1])
    h = functional.linear(out.detach(), *linears[6:]).add_(x)
    dh, *dhalf = _feed_forward_block_backward(dy, h, second_D, epsilons[1], *feed_forward, [True, *wanted[1:5]])
    del h
    dlinears: list[Tensor | None] = [None] * 8
    dout_MN, *dlinears[6:] = _linear_backward(dh, out_MN, linears[6], wanted[11:])
    del out_MN
    dparts = list(torch.autograd.grad(out, edges, dout_MN.view(out.shape)))
    del out, dout_MN
    # Once more, as the caller holds dy all the while: with the one from above the peak would be here.
    n, _, scale_M = _rms_norm(x, None, first_D, epsilons[0])
    n_MD, dn = n.view(-1, n.shape[-1]), None
    for at in (4, 2, 0):  # values first, as autograd adds them up
        part_MD, *dlinears[at : at + 2] = _linear_backward(dparts.pop(), n_MD, linears[at], wanted[at + 5 :])
        dn = part_MD if dn is None else dn.add_(part_MD)
        del part_MD
    assert dn is not None
    dx, dfirst_D = _rms_norm_backward(dn.view(x.shape), None, x, first_D, scale_M, wanted[0])
    gradients = [each if want else None for each, want in zip((dfirst_D, *dhalf), wanted[:5], strict=True)]
    return [dx.add_(dh), *gradients, *dlinears]


def _linear_backward(
    dy: Tensor, x_MK: Tensor, weight_NK: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a linear's input, and of its weight and bias where they are ``wanted``."""
    dy_MN = dy.reshape(-1, dy.shape[-1])
    dweight_NK = torch.mm(dy_MN.t(), x_MK) if wanted[0] else None
    return torch.mm(dy_MN, weight_NK), dweight_NK, dy_MN.sum(0) if wanted[1] else None
