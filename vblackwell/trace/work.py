"""What operators ask of a GPU and of the host that issues them, and from these the seconds of a step.

On the GPU an operator takes the longer of its operations over the rate of the matrix units and its bytes over that of
the memory, and no less than a small kernel; on the host, time in Python, in torch's dispatcher and to launch, as do
views and calls of modules. Neither waits for the other in training, so a step takes the longer of the two sums, unless
the host reads numbers that the GPU makes, as Adafactor does (`reading_seconds`). Operations by
`torch.utils.flop_counter`'s formulas, those of attention (causal: half) and of our operators, by name, by our own.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from vblackwell.machine.gpus import NUM_SMS
from vblackwell.machine.rates import Rates

SMALL_KERNEL_SECONDS = 3e-6
# Of the rates of a matrix product of 8192 cubed and of a large copy: what convolutions and a model's own sizes reach.
CONVOLUTION_SHARE, MEMORY_SHARE = 0.5, 0.85
# The host's time, in what `vb doctor` calls the issue of an operator: a sixth of a small linear layer with its ReLU,
# forward and backward. From transformers' models with 2 and 8 layers of width 64 on one CPU core.
KERNEL, VIEW, OWN_KERNEL = 0.6, 0.3, 5.0  # our own go through torch.library and Triton's launcher, in Python
# On a CPU ours run as torch's operators, which read and write in turn: so often the bytes of one kernel.
OWN_PASSES = 3
MANY, ONE_OF_MANY = 1.0, 0.06  # a foreach or fused operator, and each of its tensors
ON_HOST = 0.3  # an operator on a tensor in host memory: a counter of an optimizer
LOOP = 9 * KERNEL + ON_HOST  # of AdamW's loop, a parameter
# Of what the offload runtime does for a group: loads alone; gradients and updates come with the backward.
STREAMED_FORWARD = 0.25
# A call of a module of torch.nn, of anyone's, of a whole model of transformers.
TORCH_MODULE, MODULE, MODEL = 0.4, 3.0, 40.0


@dataclass(frozen=True)
class Work:
    """One operator, or what else the host does.

    Attributes:
        num_bytes: read and written. width: bytes an element of what it multiplies. issues: the host's time for it, in
            operators as `vb doctor` measures them. share: of the rate of a large product; 0: the usual one.
        own: an operator of ours.
        kind: '', 'attention', 'tf32' (a convolution of fp32, which cuDNN computes so), 'host', which the GPU does not
            see, or 'read', for which the host waits for the GPU.
    """

    phase: str
    flops: float = 0.0
    num_bytes: int = 0
    width: int = 0
    kind: str = ""
    issues: float = KERNEL
    share: float = 0.0
    own: bool = False


def streaming_work(issues: float) -> tuple[Work, ...]:
    """What the host does for layer groups that come and go (`Rates.streaming_issues`), next to a resident step."""
    parts = ("forward", STREAMED_FORWARD), ("backward", 1 - STREAMED_FORWARD)
    return tuple(Work(phase, kind="host", issues=share * issues) for phase, share in parts)


@functools.cache
def module_issues(kind: type) -> float:
    """The host's time for a call of a module of ``kind``, next to its operators and the modules it calls."""
    if kind.__module__.startswith("torch.nn."):
        return TORCH_MODULE
    return MODEL if any(each.__name__ == "PreTrainedModel" for each in kind.__mro__) else MODULE


def work_of(
    phase: str, func: Any, args: Any, kwargs: Any, out: Any, has_tf32: bool = True, num_sms: int = NUM_SMS
) -> Work:
    """The work of a call that is no view. ``has_tf32``, ``num_sms``: of the GPU."""
    read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_meta]
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.is_meta]
    name = func.__name__.partition(".")[0]
    if not read and not made:
        return Work(phase, kind="host", issues=ON_HOST)
    if name in ("embedding", "index_select", "gather", "index"):  # a few rows of a table
        return Work(phase, num_bytes=2 * sum(map(_size, made)))
    written = [each for index in _written(func) if index < len(args) for each in tree_leaves(args[index])]
    inside = {id(each) for each in written}
    num_bytes = sum(map(_size, read)) + sum(_size(each) for each in made if id(each) not in inside)
    num_bytes -= _experts_not_met(name, args)
    num_bytes += sum(_size(each) for each in written if isinstance(each, Tensor))
    # The first operand's: attention's backward reads sums in fp32 next to what it multiplies.
    width = next((each.element_size() for each in read if each.is_floating_point()), 4)
    is_tf32 = name.startswith("convolution") and width == 4 and has_tf32
    kind = "attention" if name.startswith("_scaled_dot_product") else "tf32" if is_tf32 else ""
    share, place = 0.0, _PRODUCTS.get(name)
    # Of fp32, for a product; narrow ones, below the smallest tile, have other kernels.
    if width == 4 and place is not None and out.numel() and min(out.shape[-2:]) >= 64:
        inner, count = max(1, args[place].shape[-1]), out.shape[0] if out.dim() == 3 else 1
        share = tiled_share(out.shape[-2], out.shape[-1], inner, count, num_sms)
    issues = OWN_KERNEL if name in _OWN else KERNEL
    if name.startswith(("_foreach", "_fused")) and isinstance(args[0], (list, tuple)):  # some fused ones take a tensor
        issues = MANY + ONE_OF_MANY * len(args[0])
    own = getattr(func, "namespace", "") == "vblackwell"
    if name == "linear_cross_entropy":  # logits, a chunk at a time
        num_bytes += 2 * rows_of(args[0]) * args[1].shape[0] * width
    return Work(phase, _flops(func, name, args, kwargs, out), num_bytes, width, kind, issues, share, own)


def of_longer_lists(one: Work, other: Work, more: int) -> Work | None:
    """An operator on lists that are ``more`` times longer than in ``one`` by what they are in ``other``; None of any
    other operator."""

    def longer(times: int) -> Work:
        lengths = [round((each.issues - MANY) / ONE_OF_MANY) for each in (one, other)]
        num_bytes = one.num_bytes + times * (other.num_bytes - one.num_bytes)
        issues = MANY + ONE_OF_MANY * (lengths[0] + times * (lengths[1] - lengths[0]))
        return replace(one, num_bytes=num_bytes, issues=issues)

    return longer(more) if longer(1) == other else None


# (rows, columns, of the full rate): a smaller tile reads its operands more often.
TILES = ((128, 128, 1.0), (128, 64, 0.95), (64, 64, 0.85))
MIN_INNER = 256  # of a part, where a product with fewer tiles than multiprocessors is cut along its inner dimension


@functools.lru_cache(maxsize=4096)
def tiled_share(rows: int, columns: int, inner: int, count: int = 1, num_sms: int = NUM_SMS) -> float:
    """Of full rate, for ``count`` products (rows, inner) x (inner, columns) in fp32 on CUDA cores, by the best tile:
    lost are the part of the last tiles that lies outside, and the multiprocessors that idle in the last round.
    """
    best = 0.0
    for high, wide, of_full in TILES:
        down, across = -(-rows // high), -(-columns // wide)
        inside = rows * columns / (down * high * across * wide)
        tiles = count * down * across
        most = max(1, inner // MIN_INNER) if tiles < num_sms else 1
        rounds = max(tiles * parts / (-(-tiles * parts // num_sms) * num_sms) for parts in range(1, min(most, 16) + 1))
        best = max(best, of_full * inside * rounds)
    return best


_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # by the place of their first factor


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _experts_not_met(name: str, args: Any) -> int:
    """Bytes of stacked experts (E, K, N) that a grouped product of fewer rows (M, K) than E does not read: a row is of
    one expert, and those of a token are of different ones."""
    if name != "_grouped_mm" or args[0].dim() != 2 or args[1].dim() != 3:
        return 0
    rows, experts = args[0].shape[0], args[1].shape[0]
    return _size(args[1]) * max(0, experts - rows) // experts


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name in _OWN:
        return float(_OWN[name](*args))
    if name.startswith("_scaled_dot_product"):
        return _attention(name, args)
    if name == "_grouped_mm":
        left, right = args[:2]
        made = out.numel() if 3 in (left.dim(), right.dim()) else left.shape[0] * right.shape[-1]
        return 2.0 * (made * left.shape[-1])
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return 0.0 if formula is None else float(formula(*args, **(kwargs or {}), out_val=out))


def _attention(name: str, args: Any) -> float:
    """Two products forward, five backward, which computes scores again; torch's formulas refuse grouped heads."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    scores = 2.0 * query.numel() // query.shape[-1] * key.shape[-2]
    found = scores * ((3 if backward else 1) * query.shape[-1] + (2 if backward else 1) * value.shape[-1])
    causal = 11 if backward else 4 if "flash" in name else 6  # its place among the arguments
    return found / 2 if causal < len(args) and args[causal] is True else found


def rows_of(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _products(x: Tensor, weights: Iterable[Tensor]) -> float:
    return 2.0 * rows_of(x) * sum(each.numel() for each in weights)


_OWN: dict[str, Callable[..., float]] = {
    "fp4_linear": lambda x, codes, scales, tensor_scale, bias, layout, activation, n, k: 2.0 * rows_of(x) * n * k,
    "fp4_linear_w4a8": lambda x, *rest: 2.0 * rows_of(x) * rest[-2] * rest[-1],
    "fp4_linear_w4a4": lambda x, *rest: 2.0 * rows_of(x) * rest[-2] * rest[-1],
    "fp4_linear_dx": lambda dy, codes, scales, tensor_scale, layout, n, k: 2.0 * rows_of(dy) * n * k,
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


def phase_seconds(work: Iterable[Work], rates: Rates, waits: bool = False, updates: float = 0.0) -> dict[str, float]:
    """Seconds of each phase: the GPU's, or the host's where all of these together are longer.

    Args:
        waits: the host computes itself, so that both add up, and no product is cut into a GPU's tiles.
        updates: seconds in which the CPU updates meanwhile (`slowed_by_updates`); of no account where ``waits``.
    """
    work = list(work)
    on_gpu = dict.fromkeys((each.phase for each in work), 0.0)
    on_host = dict(on_gpu)
    for each in work:
        on_gpu[each.phase] += _cpu_seconds(each, rates) if waits else _gpu_seconds(each, rates)
        on_host[each.phase] += host_seconds(each, rates)
    if waits:
        return {phase: seconds + on_host[phase] for phase, seconds in on_gpu.items()}
    slower = slowed_by_updates(sum(on_host.values()), updates, rates.busy_issues)
    on_host = {phase: seconds * slower for phase, seconds in on_host.items()}
    found = on_gpu if sum(on_gpu.values()) >= sum(on_host.values()) else on_host
    reading = [each.phase for each in work if each.kind == "read"]
    if reading:
        found[reading[-1]] += reading_seconds(work, rates, slower)
    return found


def reading_seconds(work: Sequence[Work], rates: Rates, slower: float = 1.0) -> float:
    """How much longer a step takes than GPU and host alone, because the host, ``slower`` times as slow, reads what the
    GPU makes. Both begin with nothing to do, as after a read; an operator runs when it has been issued and those before
    it are done; a read ends when all of these are.
    """
    if not any(each.kind == "read" for each in work):
        return 0.0
    host = gpu = on_host = on_gpu = 0.0
    for each in work:
        issued, runs = slower * host_seconds(each, rates), _gpu_seconds(each, rates)
        on_host, on_gpu = on_host + issued, on_gpu + runs
        host += issued
        if each.kind == "read":
            host = max(host, gpu + issued)  # the number's own way begins when it is made
        elif runs:
            gpu = max(gpu, host) + runs
    return max(0.0, max(host, gpu) - max(on_host, on_gpu))


def host_seconds(each: Work, rates: Rates) -> float:
    """What the host takes for ``each``; an optimizer's loop has neither autograd nor modules around its operators."""
    if each.kind == "read":
        return each.issues * rates.read_issues * rates.issue_seconds
    in_loop = each.phase == "optimizer" and each.issues <= KERNEL
    return each.issues * rates.issue_seconds * (rates.loop_issues if in_loop else 1.0)


def slowed_by_updates(host: float, updates: float, slower: float) -> float:
    """How many times as long the host takes in a step of ``host`` seconds, if the CPU updates for ``updates`` of them
    and the host gets on at ``1 / slower`` of its speed meanwhile: a step T has T - updates + updates / slower = host.
    """
    if host <= 0 or slower <= 1:
        return 1.0
    return min(slower, 1 + updates * (1 - 1 / slower) / host)


def _cpu_seconds(each: Work, rates: Rates) -> float:
    found = _gpu_seconds(each, rates, tiled=False)
    return found + OWN_PASSES * each.num_bytes / (MEMORY_SHARE * rates.memory) if each.own else found


def _gpu_seconds(each: Work, rates: Rates, tiled: bool = True) -> float:
    if each.kind in ("host", "read"):
        return 0.0
    if each.kind == "tf32":
        matmul = each.flops / (CONVOLUTION_SHARE * max(rates.matmul_half / 2, rates.matmul_fp32))
    else:
        is_half = each.width <= 2
        share = (tiled and each.share) or rates.product_share
        if each.kind == "attention":
            share = rates.attention_half_share if is_half else rates.attention_fp32_share
        matmul = each.flops / (share * (rates.matmul_half if is_half else rates.matmul_fp32))
    return max(matmul, each.num_bytes / (MEMORY_SHARE * rates.memory), SMALL_KERNEL_SECONDS)
