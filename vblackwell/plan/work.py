"""What operators ask of a GPU: floating-point operations of matrix products and bytes of its memory, and from these the seconds of a step.

An operator takes the longer of its operations over the rate of the matrix units and its bytes over that of the memory, and no less than a
small kernel; a phase takes the sum, or what the host needs to issue its operators one by one, if that is longer. Operations by
`torch.utils.flop_counter`'s formulas, attention's by our own; causal attention counts half. Our own operators are known by name, as in
`workspace`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from vblackwell.plan.rates import Rates

SMALL_KERNEL_SECONDS = 3e-6
# Of the rates of a matrix product of 8192 cubed and of a large copy: what a model's own sizes reach.
MATMUL_SHARE, ATTENTION_SHARE, MEMORY_SHARE = 0.82, 0.5, 0.85


@dataclass(frozen=True)
class Work:
    """One operator: its phase, operations of matrix products, bytes read and written, and bytes an element of what it multiplies."""

    phase: str
    flops: float
    num_bytes: int
    width: int
    is_attention: bool = False


def work_of(phase: str, func: Any, args: Any, kwargs: Any, out: Any, is_view: bool) -> Work | None:
    """The work of a call; None where it only looks at its input differently."""
    if is_view:
        return None
    read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_meta]
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.is_meta]
    name = func.__name__.partition(".")[0]
    if name in _LOOK_UP:
        return Work(phase, 0.0, 2 * sum(map(_size, made)), 0)
    written = [each for index in _written(func) if index < len(args) for each in tree_leaves(args[index])]
    inside = {id(each) for each in written}
    num_bytes = sum(map(_size, read)) + sum(_size(each) for each in made if id(each) not in inside)
    num_bytes += sum(_size(each) for each in written if isinstance(each, Tensor))
    # The first operand's: attention's backward reads sums in fp32 beside what it multiplies.
    width = next((each.element_size() for each in read if each.is_floating_point()), 4)
    attention = name.startswith("_scaled_dot_product")
    return Work(phase, _flops(func, name, args, kwargs, out), num_bytes, width, attention)


_LOOK_UP = {"embedding", "index_select", "gather", "index"}  # a few rows of a table


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name in _OWN:
        return float(_OWN[name](*args))
    if name == "_grouped_mm":
        return _grouped(args[0], args[1], out)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, args)
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is None:
        return 0.0
    return float(formula(*args, **(kwargs or {}), out_val=out))


def _attention(name: str, args: Any) -> float:
    """Two products forward; five backward, which computes the scores again. Keys may have fewer heads (torch's formulas refuse those)."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    scores = 2.0 * query.numel() // query.shape[-1] * key.shape[-2]
    found = scores * ((3 if backward else 1) * query.shape[-1] + (2 if backward else 1) * value.shape[-1])
    causal = _CAUSAL.get(name)
    return found / 2 if causal is not None and causal < len(args) and args[causal] is True else found


_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_efficient_attention_backward": 11,
}  # fmt: skip


def _grouped(left: Tensor, right: Tensor, out: Tensor) -> float:
    inner = left.shape[-1]
    return (
        2.0 * out.numel() * inner
        if right.dim() == 3 or left.dim() == 3
        else 2.0 * left.shape[0] * inner * right.shape[-1]
    )


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _products(x: Tensor, weights: Iterable[Tensor]) -> float:
    return 2.0 * _rows(x) * sum(each.numel() for each in weights)


_OWN: dict[str, Callable[..., float]] = {
    "fp4_linear": lambda x, codes, scales, tensor_scale, bias, layout, activation, n, k: 2.0 * _rows(x) * n * k,
    "fp4_linear_dx": lambda dy, codes, scales, tensor_scale, layout, n, k: 2.0 * _rows(dy) * n * k,
    "shared_input_linears": lambda x, weights: _products(x, weights),
    "shared_input_linears_dx": lambda dys, weights: _products(dys[0], weights),
    "swiglu_linear": lambda gate, up, weight, wanted: _products(gate, [weight]) if wanted else 0.0,
    "normed_linears": lambda x, norm, eps, weights: _products(x, weights),
    "normed_linears_backward": lambda dys, x, norm, eps, weights, needed: 2 * _products(x, weights),
    "feed_forward_block": lambda x, norm, eps, gate, up, down, wanted: (
        _products(x, [gate, up, down]) if wanted else 0.0
    ),
    "feed_forward_block_backward": lambda dy, x, norm, eps, gate, *rest: 8 * _products(x, [gate]),
    "linear_cross_entropy": lambda hidden, weight, *rest: (1 + rest[-3] + rest[-2]) * _products(hidden, [weight]),
}


def phase_seconds(work: Iterable[Work], rates: Rates) -> dict[str, float]:
    """Seconds of each phase."""
    on_gpu: dict[str, float] = {}
    issued: dict[str, int] = {}
    for each in work:
        share = ATTENTION_SHARE if each.is_attention else MATMUL_SHARE
        matmul = each.flops / (share * (rates.matmul_half if each.width <= 2 else rates.matmul_fp32))
        moved = each.num_bytes / (MEMORY_SHARE * rates.memory)
        on_gpu[each.phase] = on_gpu.get(each.phase, 0.0) + max(matmul, moved, SMALL_KERNEL_SECONDS)
        issued[each.phase] = issued.get(each.phase, 0) + 1
    return {phase: max(seconds, issued[phase] * rates.issue_seconds) for phase, seconds in on_gpu.items()}
