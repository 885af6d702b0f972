"""Embeddings and heads that are larger than level 0: computed in slices of rows, never whole.

The weight (rows, columns) stays in storage in one range, so norms, updates and checkpoints do not know of slices.
Forward and backward load the next rows while these are used, and the gradient of each slice leaves as soon as it
exists. An embedding gives the same bits as the whole; a linear layer's input gradient becomes a sum over slices, with
other last bits: so a leaf is sliced only if it must be. The module's class is switched to one whose forward is sliced.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import copy_pool, start_copy
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.movement.state import Mover, Shared, defer_sigint
from vblackwell.offload.movement.weights import changed_since_forward
from vblackwell.offload.step import StepControl


class SlicedLeaf(Mover):
    """One weight that is computed with in slices of ``num_rows``."""

    def __init__(self, shared: Shared, group: Group, num_rows: int, control: StepControl) -> None:
        super().__init__(shared)
        self.group = group
        self.slot = group.slots[0]
        self.num_rows = num_rows
        self._control = control
        self._pool = copy_pool(f"slices-{group.name}")

    def __reduce__(self) -> Any:
        return type(None), ()  # a module that was copied, or pickled, computes whole, with its own weight

    def slices(self) -> Generator[tuple[int, int, Tensor], None, None]:
        """``(first row, row after the last, weight rows on level 0)``; the tensor is valid until the next iteration."""
        weights, lock = self._control.weights, self._budget.lock
        with lock:
            self._control.wait_for_updates(self.group)
        self._stack.count_found(self._storage.range(self.group, "weight").level)
        starts = range(0, self.slot.shape[0], self.num_rows)
        loaded: list[tuple[Reservation, Tensor, Transfer]] = []
        try:
            self._load(starts[0], loaded)
            for index, start in enumerate(starts):
                if index + 1 < len(starts):
                    self._load(starts[index + 1], loaded)
                _, rows, transfer = loaded[0]
                with lock:  # not while the caller computes
                    weights.wait_for(transfer)
                    weights.has_arrived(transfer)
                yield start, start + len(rows), rows
                del rows
                self._storage.give(loaded.pop(0)[0])
        finally:
            with ExitStack() as ends:  # all of them, whichever fails
                for reservation, _, transfer in loaded:
                    ends.callback(self._storage.give, reservation)
                    ends.callback(weights.has_arrived, transfer)
                    ends.callback(weights.wait_for, transfer)

    @defer_sigint()
    def _load(self, start: int, loaded: list[tuple[Reservation, Tensor, Transfer]]) -> None:
        stored = self._storage.range(self.group, "weight")
        rows = self.slot.view(stored.bytes)[start : start + self.num_rows]
        with torch.inference_mode(False):
            reservation = self._reserve("slice", rows.nbytes)
            try:
                buffer = reservation.bytes
                transfer = start_copy(buffer, rows.reshape(-1).view(torch.uint8), self._pool)
            except Exception:
                self._storage.give(reservation)
                raise
        self._control.weights.remember_load(self.group, transfer)
        self._stack.count_link(stored.level, 0, rows.nbytes)
        loaded.append((reservation, buffer.view(self.slot.dtype).view(-1, self.slot.shape[1]), transfer))

    def _reserve(self, what: str, num_bytes: int) -> Reservation:
        name = f"{self.group.name}/{what}"
        return self._budget.reserve(name, num_bytes, self._control.weights.drop_one, self._budget.free_any)

    def version(self) -> int:
        return self._states[self.group].version

    def check_version(self, seen: int) -> None:
        with self._budget.lock:
            self._control.wait_for_updates(self.group)
        if seen != self.version():
            raise changed_since_forward(self.group)

    def give_gradients(self, parts: Iterator[tuple[int, Tensor]]) -> None:
        """Send ``(first row, gradient rows)`` to host memory, all of them, in order."""
        lock, gradients = self._budget.lock, self._control.gradients
        with lock:
            self._control.before_gradient(self.group)
            gradients.begin_slices(self.slot)
        for start, rows in parts:
            num_bytes = rows.numel() * self.slot.dtype.itemsize  # under autocast the rows are narrower than the weight
            with lock:
                reservation = self._reserve("slice-gradient", num_bytes)
                gradients.send_slice(self.slot, start, rows, reservation)
        with lock:
            gradients.finish_slices(self.slot)
            self._control.gradient_sent(self.group)


class SlicedLinear(nn.Linear):
    """Never constructed."""

    _vb_leaf: SlicedLeaf | None

    def forward(self, input: Tensor) -> Tensor:
        if self._vb_leaf is None:
            return super().forward(input)
        return _Linear.apply(input, _anchor(self.weight, input), self._vb_leaf)  # type: ignore[return-value]


class SlicedEmbedding(nn.Embedding):
    """Never constructed."""

    _vb_leaf: SlicedLeaf | None

    def forward(self, input: Tensor) -> Tensor:
        if self._vb_leaf is None:
            return super().forward(input)
        padding = -1 if self.padding_idx is None else self.padding_idx
        anchor = _anchor(self.weight, input)
        return _Embedding.apply(input, anchor, self._vb_leaf, padding)  # type: ignore[return-value]


def swap_class(module: nn.Module, leaf: SlicedLeaf | None) -> None:
    """Make ``module`` sliced by ``leaf``, or plain again with None."""
    if leaf is not None:
        object.__setattr__(module, "__class__", SlicedLinear if isinstance(module, nn.Linear) else SlicedEmbedding)
        object.__setattr__(module, "_vb_leaf", leaf)
    elif isinstance(module, (SlicedLinear, SlicedEmbedding)):
        del module._vb_leaf
        object.__setattr__(module, "__class__", nn.Linear if isinstance(module, nn.Linear) else nn.Embedding)


def _anchor(weight: Tensor, input: Tensor) -> Tensor:
    """A scalar that makes the function part of the graph where the weight, which autograd does not see, is trained."""
    return torch.zeros((), device=input.device, requires_grad=weight.requires_grad)


class _Linear(torch.autograd.Function):
    """y_MN = x_MK W_NK^T, rows of W at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, leaf: SlicedLeaf) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
        y_MN = x_MK.new_empty(x_MK.shape[0], leaf.slot.shape[0])
        with closing(leaf.slices()) as slices:  # a traceback would keep an abandoned generator, and its bytes, alive
            for start, stop, w_nK in slices:
                y_MN[:, start:stop] = x_MK @ w_nK.to(dtype).t()
        ctx.save_for_backward(x_MK)
        ctx.leaf, ctx.version, ctx.shape, ctx.dtype = leaf, leaf.version(), x.shape, x.dtype
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (x_MK,) = ctx.saved_tensors
        leaf: SlicedLeaf = ctx.leaf
        leaf.check_version(ctx.version)
        dy_MN = gradients[0].reshape(-1, leaf.slot.shape[0])
        dx_MK: Tensor | None = None

        def parts() -> Generator[tuple[int, Tensor], None, None]:
            nonlocal dx_MK
            with closing(leaf.slices()) as slices:
                for start, stop, w_nK in slices:
                    dy_Mn = dy_MN[:, start:stop]
                    if ctx.needs_input_grad[0]:
                        share = dy_Mn @ w_nK.to(dy_Mn.dtype)
                        dx_MK = share if dx_MK is None else dx_MK.add_(share)
                    yield start, (dy_Mn.t() @ x_MK if ctx.needs_input_grad[1] else w_nK)

        with closing(parts()) as found:
            if ctx.needs_input_grad[1]:
                leaf.give_gradients(found)
            else:
                for _ in found:
                    pass
        return (None if dx_MK is None else dx_MK.view(ctx.shape).to(ctx.dtype)), None, None


def _check_rows(indices: Tensor, num_rows: int, name: str) -> None:
    """IndexError where one is no row; on a GPU, as with torch's embedding, a failed assertion of the device."""
    inside = ((indices >= 0) & (indices < num_rows)).all()
    said = f"an index of the embedding {name!r} is not from 0 to {num_rows - 1}"
    if indices.is_cuda:
        torch.ops.aten._assert_async.msg(inside, said)
    elif not inside:
        raise IndexError(said)


class _Embedding(torch.autograd.Function):
    """Rows of W by index, slice by slice: every token finds its row in exactly one."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, anchor: Tensor, leaf: SlicedLeaf, padding: int) -> Tensor:
        out: Tensor | None = None
        _check_rows(indices, leaf.slot.shape[0], leaf.group.name)
        with closing(leaf.slices()) as slices:
            for start, stop, rows in slices:
                local = indices - start
                found = rows[local.clamp(0, stop - start - 1)]
                inside = ((local >= 0) & (local < stop - start))[..., None]
                out = found if out is None else torch.where(inside, found, out)
        assert out is not None
        ctx.save_for_backward(indices)
        ctx.leaf, ctx.padding = leaf, padding
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        leaf: SlicedLeaf = ctx.leaf
        total = leaf.slot.shape[0]
        dense: Callable[..., Tensor] = torch.ops.aten.embedding_dense_backward

        def parts() -> Iterator[tuple[int, Tensor]]:
            for start in range(0, total, leaf.num_rows):
                count = min(leaf.num_rows, total - start)
                local = indices - start
                # Tokens of other slices, and padding, go to an extra row, which is named as padding and skipped.
                elsewhere = (local < 0) | (local >= count) | (indices == ctx.padding)
                yield start, dense(gradients[0], local.masked_fill(elsewhere, count), count + 1, count, False)[:count]

        leaf.give_gradients(parts())
        return None, None, None, None
