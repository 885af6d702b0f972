"""What is kept for attention calls alike: which calls are, that it computes what PyTorch's own way does, and whom it
obeys."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad as fwAD
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.pointwise.oracle import poisoned
from tests.nn.attention.inputs import masks, qkv, with_gradients
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.op import bounds
from vblackwell.kernels.attention.reference import visible_ST
from vblackwell.kernels.runtime import registry, tuning
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.attention import operators
from vblackwell.nn.attention.backends import BACKENDS, Variant, attention

BOTTOM_RIGHT = {"causal": True, "bottom_right": True}


@pytest.fixture(autouse=True)
def nothing_is_kept():
    dispatcher._forget()
    yield
    dispatcher._forget()


@pytest.fixture
def checks(monkeypatch):
    """A list that is as long as calls were checked."""
    found, checked = [], dispatcher._checked
    monkeypatch.setattr(dispatcher, "_checked", lambda *given: found.append(given) or checked(*given))
    return found


@pytest.mark.parametrize("keys", [7, 12, 16])
@pytest.mark.parametrize("options", [{"window": 3}, {"causal": True}, {"causal": True, "window": 2}], ids=str)
@pytest.mark.parametrize("bottom_right", [False, True])
def test_bounds_become_what_efficient_reads(keys, options, bottom_right):
    left, right = bounds(options.get("causal", False), options.get("window"))
    cpu = torch.device("cpu")
    got = operators._bounds_bias(9, keys, left, right, keys - 9 if bottom_right else 0, torch.float32, cpu)
    seen = visible_ST(9, keys, left, right, bottom_right, cpu)
    assert seen is not None and torch.equal(got, torch.zeros(9, keys).masked_fill(~seen, -torch.inf))
    assert got.stride(0) % 16 == 0


@pytest.mark.parametrize(
    ("kv_heads", "keys", "variant"),
    [(4, 9, Variant()), (4, 9, Variant(causal=True)), (1, 9, Variant(causal=True, scale=0.3)), (2, 7, Variant())],
    ids=str,
)
def test_the_operator_gives_the_bits_of_pytorchs_way_and_of_compiled_code(kv_heads, keys, variant):
    tensors = qkv(kv_heads=kv_heads, keys=keys)

    def dispatched(q, k, v):
        return attention(q, k, v, variant, "flash")[0]

    def pytorchs(q, k, v):
        grouped = kv_heads != 4
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=variant.causal, scale=variant.scale, enable_gqa=grouped
            )

    expected = with_gradients(pytorchs, tensors)
    compiled = torch.compile(dispatched, fullgraph=True, backend="aot_eager")
    for function in (dispatched, compiled, dispatched):
        for got, wanted in zip(with_gradients(function, tensors), expected, strict=True):
            assert torch.equal(got, wanted)
    assert len(dispatcher._prepared) == 1  # nothing of the compiled one


def test_masks_on_the_cpu_give_the_bits_of_pytorchs_way():
    q, k, v = qkv(keys=7)
    for mask in masks(9, 7).values():
        got, name = attention(q, k, v, Variant(mask))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            wanted = functional.scaled_dot_product_attention(q, k, v, mask.expand(*mask.shape[:-2], 9, 7))
        assert name == "flash" and torch.equal(got, wanted)


def bias_of(mask, q, keys, multiple, captured=False):
    return operators._bias_of(mask, q.dtype, keys, multiple, captured)(mask, q)


@pytest.mark.parametrize(
    "shape", [(7, 16), (7, 21), (2, 1, 7, 21), (2, 4, 1, 21), (2, 1, 7, 1), (21,), (7, 1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multiple", [16, 1])
@pytest.mark.parametrize("captured", [False, True])
def test_a_mask_becomes_what_efficient_and_cudnn_read(shape, dtype, multiple, captured):
    queries, keys = 7, 21 if shape[-1] == 1 else shape[-1]
    q = torch.empty(2, 4, queries, 8, dtype=torch.bfloat16)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    mask = mask > 0 if dtype == torch.bool else mask.to(dtype)
    whole = mask.expand(2, 4, queries, keys)
    wanted = torch.zeros_like(whole, dtype=q.dtype).masked_fill(~whole, -torch.inf) if dtype == torch.bool else whole
    with poisoned():
        bias = bias_of(mask, q, keys, multiple, captured)
    assert torch.equal(bias.expand(whole.shape), wanted.to(q.dtype)) and bias.dtype == q.dtype
    assert bias.stride(3) == 1 and not any(step % multiple for step in bias.stride()[:3])
    assert not torch.empty(0, dtype=bias.dtype).set_(bias.untyped_storage()).isnan().any()  # what pads a row is read


def test_a_default_device_makes_no_numbers_of_masks():
    operators._shown_and_hidden.cache_clear()
    with torch.device("meta"):
        kept = operators._shown_and_hidden(torch.bfloat16, torch.device("cpu"))
    assert [x.item() for x in kept] == [0.0, -torch.inf]


def test_a_mask_that_is_as_it_should_be_is_read_as_it_is():
    q, mask = torch.empty(2, 4, 7, 8), torch.randn(7, 32)
    assert bias_of(mask, q, 32, 16).data_ptr() == mask.data_ptr()
    flat = torch.randn(7 * 32 + 1)
    assert bias_of(flat[1:].view(7, 32), q, 32, 1).data_ptr() != flat[1:].data_ptr()  # not at 32 bytes
    odd = torch.randn(7, 33)
    assert bias_of(odd, q, 33, 1).data_ptr() == odd.data_ptr() != bias_of(odd, q, 33, 16).data_ptr()


def different_calls() -> list[dict]:
    """What calls are given that differ from those before in one thing that matters."""
    q, k, v = qkv()
    mask, slopes = torch.ones(9, 9, dtype=torch.bool), torch.ones(4)
    base = {"q": q, "k": k, "v": v}
    changes = [
        {},
        {"q": q[:, :, :8]},
        {"q": q[:1], "k": k[:1], "v": v[:1]},
        {"k": k[:, :2], "v": v[:, :2]},
        {"k": k[:, :, :8], "v": v[:, :, :8]},
        {"v": v[:, :, :8]},
        {"backend": "flash"},
        {"causal": True},
        {"bottom_right": True},
        {"window": 5},
        {"scale": 0.5},
        {"softcap": 2.0},
        {"dropout": 0.1},
        {"alibi_slopes_N": slopes},
        {"alibi_slopes_N": slopes[:3]},
        {"mask": mask},
        {"mask": mask, "causal": True},
        {"mask": mask, "alibi_slopes_N": slopes},
        {"mask": mask[:1]},
        {"mask": mask.float()},
        {"mask": mask.float().requires_grad_()},
        {"mask": mask.to("meta")},
        {"mask": torch.ones(9, 12, dtype=torch.bool)[:, :9]},
    ]
    for name, x in base.items():
        changes += [{name: other} for other in (x.contiguous(), x.double(), x.to("meta"), x.clone().requires_grad_())]
    return [{**base, **change} for change in changes]


def surroundings(monkeypatch) -> list:
    """Contexts that calls depend on; each may be entered once."""

    @contextmanager
    def captured():
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher, "is_captured", lambda q: True)
            yield

    @contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    kernels = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    orders = [[SDPBackend.FLASH_ATTENTION, *kernels], [SDPBackend.CUDNN_ATTENTION, *kernels]]
    return [
        *(sdpa_kernel([*dict.fromkeys(order)], set_priority=True) for order in orders),
        *(captured(), deterministic(), torch.no_grad(), use_backend("attention", "math")),
        *map(sdpa_kernel, kernels),
    ]


def test_every_field_that_matters_makes_another_key(monkeypatch):
    calls = different_calls()

    def key(q, k, v, backend="auto", **how):
        return dispatcher._key(q, k, v, Variant(**how), backend, dispatcher._surroundings(q))

    keys = [key(**call) for call in calls]
    for context in surroundings(monkeypatch):
        with context:
            keys.append(key(**calls[0]))
    assert len({*keys}) == len(keys)
    mask = torch.ones(9, 9, dtype=torch.bool)
    assert key(**calls[0], mask=mask) == key(**calls[0], mask=~mask)


class AnotherFunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class AnotherDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_no_call_runs_as_the_last_one_that_differs_in_anything(monkeypatch):
    """Where it does not run as the last one, `computes_at_once` is asked first."""
    asked = []
    at_once = dispatcher.computes_at_once
    monkeypatch.setattr(dispatcher, "computes_at_once", lambda *given: asked.append(given) or at_once(*given))
    monkeypatch.setattr(dispatcher, "_checked", lambda q, k, v, variant, backend: (variant, None, "none"))
    monkeypatch.setattr(dispatcher, "operator", lambda *given: lambda q, k, v, now: q)
    none = registry.Backend("none", registry.accept, lambda q, k, v, how: q)
    monkeypatch.setitem(dispatcher.BACKENDS, "none", none)

    def runs_as_the_last(q, k, v, backend="auto", **how):
        before = len(asked)
        assert attention(q, k, v, Variant(**how), backend)[0] is q
        return len(asked) == before

    calls = different_calls()
    first, others = calls[0], calls[1:]
    for other in others:
        assert not runs_as_the_last(**other)
        assert runs_as_the_last(**other)
        runs_as_the_last(**first)
        assert runs_as_the_last(**first)
        if {*other} == {*first}:  # of the same options
            assert not runs_as_the_last(**other)
            runs_as_the_last(**first)
    for context in surroundings(monkeypatch):
        with context:
            assert not runs_as_the_last(**first)
            assert runs_as_the_last(**first)
        runs_as_the_last(**first)
    half = {name: x.bfloat16() for name, x in first.items()}
    runs_as_the_last(**half)
    with torch.autocast("cpu", torch.bfloat16):
        assert not runs_as_the_last(**half)
        assert runs_as_the_last(**half)
        with torch.autocast("cpu", torch.float16):
            assert not runs_as_the_last(**half) and not runs_as_the_last(**half)
    runs_as_the_last(**first)
    with torch.device("cpu"):  # a function mode that changes nothing here
        assert runs_as_the_last(**first)
    with fwAD.dual_level():
        assert not runs_as_the_last(**first) and not runs_as_the_last(**first)
    with AnotherFunctionMode():
        assert not runs_as_the_last(**first) and not runs_as_the_last(**first)
    with AnotherDispatchMode():
        assert not runs_as_the_last(**first) and not runs_as_the_last(**first)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = {name: mode.from_tensor(x) for name, x in first.items()}
            assert not runs_as_the_last(**fake, window=fake["q"].shape[2])  # a symbol has no hash
    with torch.inference_mode():
        assert not runs_as_the_last(**first)
    runs_as_the_last(**first)
    negative = torch._neg_view(first["v"])
    assert negative.is_neg() and not runs_as_the_last(first["q"], first["k"], negative)

    def transformed(x):
        assert not runs_as_the_last(first["q"], first["k"], x)
        return x.sum()

    torch.func.grad(transformed)(first["v"])
    wrapped = torch.nn.Parameter(first["v"], requires_grad=False)
    assert not runs_as_the_last(first["q"], first["k"], wrapped)


def test_calls_that_take_turns_are_checked_once(checks, monkeypatch):
    """And compared by what was made then: to make a comparison takes longer than to look a key up."""
    made, make = [], registry.comparison_with
    monkeypatch.setattr(registry, "comparison_with", lambda given: made.append(1) or make(given))
    shapes = [qkv(keys=keys) for keys in (9, 12)]
    for _ in range(3):
        for q, k, v in shapes:
            attention(q, k, v)
            attention(q, k, k)  # one tensor twice
    assert len(checks) == len(made) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_compared():
    """PyTorch's comparison would end the process."""
    q, k, v = qkv()
    attention(q, k, v)
    with pytest.raises(RuntimeError, match="NestedTensorImpl"):
        attention(torch.nested.nested_tensor([q[0], q[1, :, :5]]), k, v)


def test_calls_alike_are_checked_once_and_others_each(checks):
    q, k, v = qkv()
    for _ in range(3):
        attention(q, k, v, Variant(causal=True))
        attention(q.clone(), k + 1, v)
    assert len(checks) == 2
    attention(q.contiguous(), k, v)
    assert len(checks) == 3


def test_what_is_refused_is_refused_again():
    q, k, v = qkv()
    attention(q, k, v)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="give .B, N, S, H"):
            attention(q, k, v[:, :, :5])
        with pytest.raises(ConfigurationError, match="a dropout of 1"):
            attention(q, k, v, Variant(dropout=1.0))
        with pytest.raises(Unsupported, match="a sliding window"):
            attention(q, k, v, Variant(window=2), "flash")
    assert len(dispatcher._prepared) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["boolean", "added", "alibi"])
def test_no_tensor_is_kept_alive(backend, kind, monkeypatch):
    monkeypatch.setattr(dispatcher, "choose_attention", lambda request, name: name)
    q, k, v = qkv()
    mask, slopes = masks(9, 9).get(kind), torch.ones(4) if kind == "alibi" else None
    how = Variant(mask, alibi_slopes_N=slopes)
    request = dispatcher.request_of(q, k, v, how)
    run = operators.operator(backend, request, how, q.device, True)
    if backend == "math" or (backend == "flash" and slopes is None):
        attention(q, k, v, how, backend)
    del how
    mask, slopes = (torch.empty(0) if x is None else x for x in (mask, slopes))
    dead = [weakref.ref(x) for x in (q, k, v, mask, slopes)]
    del q, k, v, mask, slopes
    gc.collect()
    assert not any(ref() is not None for ref in dead)
    del run


def test_the_users_switches_are_obeyed():
    q, k, v = qkv()
    assert attention(q, k, v)[1] == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention(q, k, v)[1] == "math"
        with pytest.raises(Unsupported, match="flash: PyTorch refuses it for these tensors: by sdpa_kernel"):
            attention(q, k, v, backend="flash")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert attention(q, k, v)[1] == "math"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    with use_backend("attention", "math"):
        assert attention(q, k, v)[1] == "math"
    assert attention(q, k, v)[1] == "flash"


def test_a_single_query_at_the_end_sees_everything_the_second_time_too():
    q, k, v = qkv(queries=1)
    how = Variant(causal=True, bottom_right=True)
    for backend in ("flash", "math"):
        wanted = attention(q, k, v, Variant(), backend)[0]
        for _ in range(2):
            assert torch.equal(attention(q, k, v, how, backend)[0], wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_a_window_as_long_as_the_sequence_hides_nothing(causal, queries, keys, bottom_right):
    q, k, v = qkv(queries=queries, keys=keys)
    for window in (max(queries, keys), max(queries, keys) - 1):
        how = Variant(causal=causal, bottom_right=bottom_right, window=window)
        wanted = BACKENDS["math"].run(q, k, v, how)
        for _ in range(2):
            got, name = attention(q, k, v, how)
            torch.testing.assert_close(got, wanted)
            assert name == "math" or window == max(queries, keys)
    assert attention(*qkv(), Variant(causal=True, window=9))[1] == "flash"


def test_no_more_is_kept_than_fits(monkeypatch):
    monkeypatch.setattr(dispatcher, "MAX_PREPARED", 3)
    for keys in range(1, 9):
        attention(*qkv(queries=1, keys=keys), Variant(scale=1.0 / keys))
        assert len(dispatcher._prepared) <= 3 and len(dispatcher._last) <= 3


def test_new_times_are_chosen_by(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "machine", lambda device: {"gpu": "none"})
    attention(*qkv())
    assert dispatcher._prepared
    assert dispatcher._last
    tuning.store(dispatcher.KIND, torch.device("cuda", 0), {})
    assert not dispatcher._prepared and not dispatcher._last


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_default_device_is_no_trace(backend):
    q, k, v = qkv()
    mask = torch.ones(9, 9, dtype=torch.bool).tril() if backend == "math" else None
    expected = BACKENDS[backend].run(q, k, v, Variant(mask))
    with torch.device("meta"):
        for _ in range(2):
            assert torch.equal(attention(q, k, v, Variant(mask), backend)[0], expected)
    assert len(dispatcher._prepared) == 1


def test_nothing_is_kept_of_traces():
    q, k, v = qkv()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert attention(*fake)[0].shape == q.shape
    torch.func.grad(lambda x: attention(x, k, v)[0].sum())(q)
    with torch.autocast("cpu", torch.bfloat16):  # casts what is not bf16 yet
        assert attention(q, k, v)[0].dtype == torch.bfloat16
    assert not dispatcher._prepared


def test_autocast_leaves_its_own_type_alone():
    tensors = qkv(dtype=torch.bfloat16)
    expected = attention(*tensors)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*tensors)[0], expected)


def test_threads_get_their_own_answers():
    """Calls alike and not alike, each by eight threads: what is kept is shared and never the tensors."""
    cases = [(qkv(keys=keys), Variant(causal=causal)) for keys in (9, 12) for causal in (False, keys == 9)]
    expected = [attention(*tensors, how, "math")[0] for tensors, how in cases]

    def work(number):
        tensors, how = cases[number % len(cases)]
        got, name = attention(*(x + 0 for x in tensors), how)
        torch.testing.assert_close(got, expected[number % len(cases)])
        return name

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(200))) == {"flash"}


def written_out(q, k, v, bias, learns, dropout, causal, *, scale=None):
    """What PyTorch's 'efficient' computes, and what it asks of a bias."""
    assert k.shape == v.shape == (*q.shape[:2], *k.shape[2:])
    assert not causal or bias is None
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
        assert bias.stride(3) == 1 and not any(step % 16 for step in bias.stride()[:3])
    return (BACKENDS["math"].run(q, k, v, Variant(bias, causal, scale=scale, dropout=dropout)),)


@pytest.mark.parametrize("kind", ["none", "boolean", "padding", "added", "transposed"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3}, BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_what_efficient_is_given(kind, options, kv_heads, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_dot_product_efficient_attention", written_out)
    tensors = qkv(4, kv_heads, 9, 12)
    how = Variant(masks(9, 12).get(kind), **options, scale=0.3)
    request = dispatcher.request_of(*tensors, how)
    run = operators.operator("efficient", request, how, tensors[0].device, False)
    assert run is not None
    torch.testing.assert_close(run(*tensors, how), BACKENDS["math"].run(*tensors, how))
    torch.testing.assert_close(run(*tensors, how), BACKENDS["math"].run(*tensors, how))  # what is kept is not written


def test_kept_bounds_may_be_saved_for_a_backward(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_dot_product_efficient_attention", written_out)
    tensors, how = qkv(keys=12), Variant(window=3)
    run = operators.operator("efficient", dispatcher.request_of(*tensors, how), how, tensors[0].device, False)
    assert run is not None
    operators._kept_bounds_bias.cache_clear()
    with torch.inference_mode():
        run(*tensors, how)
    kept = operators._bounds_of(dispatcher.request_of(*tensors, how), how, tensors[0].device)()
    assert operators._kept_bounds_bias.cache_info().hits == 1 and not kept.is_inference()
    exact = with_gradients(lambda q, k, v: BACKENDS["math"].run(q, k, v, how), tensors)
    got = with_gradients(lambda q, k, v: run(q, k, v, how), tensors)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other)


def scores_of(q, k, bias, scale):
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[3] ** -0.5) + bias


def cudnn_forward(q, k, v, bias, learns, dropout, causal, *, scale=None):
    assert learns and not dropout and not causal
    lse = scores_of(q, k, bias, scale).logsumexp(3, keepdim=True)
    out = BACKENDS["math"].run(q, k, v, Variant(bias, scale=scale))
    return out, lse, None, None, q.shape[2], k.shape[2], lse[:1], lse[1:], None


def cudnn_backward(calls):
    def backward(
        dout, q, k, v, out, lse, seed, offset, bias, q_starts, k_starts, queries, keys, dropout, causal, *, scale
    ):
        assert q_starts is k_starts is None and (queries, keys) == (q.shape[2], k.shape[2])
        assert keys % 128 != 64 and not dropout and not causal
        assert seed.shape == lse[:1].shape and offset.shape == lse[1:].shape
        calls.append(keys)
        group = q.shape[1] // k.shape[1]
        p = (scores_of(q, k, bias, scale) - lse).exp()
        ds = p * (dout @ v.repeat_interleave(group, 1).mT - (out * dout).sum(3, keepdim=True))
        ds = ds * (scale or q.shape[3] ** -0.5)
        shared = [(x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (p, dout))]
        return ds @ k.repeat_interleave(group, 1), *shared

    return backward


@pytest.mark.parametrize("keys", [64, 192])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_of_cudnn_s_two_calls_are_those_of_one(keys, scale, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", cudnn_forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", cudnn_backward(calls))
    tensors = qkv(4, 2, 9, keys)
    how = Variant(masks(9, keys)["boolean"], scale=scale)
    request = dispatcher.request_of(*tensors, how)._replace(gradient=True)
    run = operators.operator("cudnn", request, how, tensors[0].device, True)
    assert run is not None
    got = with_gradients(lambda q, k, v: run(q, k, v, how), tensors)
    wanted = with_gradients(lambda q, k, v: BACKENDS["math"].run(q, k, v, how), tensors)
    assert calls == [keys - 32, 32]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_where_pytorch_chooses_the_same_it_runs_itself(monkeypatch):
    """An operator's other results would become Python's objects, which backward's thread had to wait for."""
    called, real = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *given, **how: called.append(1) or real(*given, **how)
    )
    added = masks(9, 9)["added"]
    for kv_heads, how in (
        (4, Variant()),
        (2, Variant(causal=True, scale=0.3)),
        (4, Variant(added)),
        (4, Variant(torch.cat([torch.zeros(1), added.flatten()])[1:].view(9, 9))),  # not at a multiple of 32 bytes
        (4, Variant(added.expand(2, 4, 9, 9))),
    ):
        tensors = qkv(kv_heads=kv_heads)
        wanted = with_gradients(lambda q, k, v, how=how: BACKENDS["math"].run(q, k, v, how), tensors)
        for _ in range(2):
            called.clear()
            got, name = attention(*tensors, how)
            assert called and name == "flash"
            torch.testing.assert_close(got, wanted[0])
            got = with_gradients(lambda q, k, v, how=how: attention(q, k, v, how)[0], tensors)
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other)
            assert len(called) == 2
        called.clear()
        assert attention(*tensors, Variant(scale=0.3), "flash")[1] == "flash" and not called  # as it was asked for


def test_strides_that_the_cpu_s_operator_takes_for_granted_run_elsewhere():
    exact = qkv()
    for odd in range(3):
        given = [x.repeat_interleave(2, 3)[..., ::2] if place == odd else x for place, x in enumerate(exact)]
        out, name = attention(*given)
        assert name == "math"
        torch.testing.assert_close(out, attention(*exact)[0])
