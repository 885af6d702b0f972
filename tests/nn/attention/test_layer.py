"""The FlashAttention module, and the choice among backends."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention import plan as attention_plan
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.attention.backends import AttentionRequest, Variant, attention, attention_backends, choose_attention
from vblackwell.nn.attention.layer import FlashAttention, from_multihead_attention


def pair(dtype=torch.float64, bias=True, **options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(48, 4, bias=bias, batch_first=True, dtype=dtype)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    return theirs, from_multihead_attention(theirs, **options)


def compare(theirs, ours, call_theirs, mask=None):
    """Outputs and gradients of the input and every weight."""
    x = torch.randn(2, 9, 48, dtype=ours.out_proj.weight.dtype)
    results = []
    for call, module in ((call_theirs, theirs), (lambda x: ours(x, mask), ours)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        gradients = torch.autograd.grad(out.sin().sum(), [leaf, *module.parameters()])
        by_name = dict(zip([name for name, _ in module.named_parameters()], gradients[1:], strict=True))
        if module is theirs:
            by_name = {name.replace("in_proj_", "qkv_proj."): value for name, value in by_name.items()}
        results.append({"out": out, "x": gradients[0], **by_name})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        # float64, sums of some hundred terms in another order
        torch.testing.assert_close(
            results[1][name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("bias", [True, False])
def test_a_converted_module_gives_equal_outputs_and_gradients(bias):
    theirs, ours = pair(bias=bias)
    compare(theirs, ours, lambda x: theirs(x, x, x, need_weights=False)[0])


def test_a_converted_module_with_masks():
    theirs, ours = pair()
    attends = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    attends.fill_diagonal_(True)
    compare(theirs, ours, lambda x: theirs(x, x, x, attn_mask=~attends, need_weights=False)[0], attends)
    added = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    compare(theirs, ours, lambda x: theirs(x, x, x, attn_mask=added, need_weights=False)[0], added)
    padding = torch.arange(9)[None] < torch.tensor([[9], [5]])
    compare(
        theirs, ours, lambda x: theirs(x, x, x, key_padding_mask=~padding, need_weights=False)[0], padding[:, None, :]
    )


def test_a_converted_causal_module():
    theirs, ours = pair(causal=True)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    compare(theirs, ours, lambda x: theirs(x, x, x, attn_mask=later, need_weights=False)[0])


@pytest.mark.parametrize("options", [{"kdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_what_cannot_be_converted(options):
    with pytest.raises(Unsupported, match="MultiheadAttention with"):
        from_multihead_attention(nn.MultiheadAttention(16, 2, batch_first=True, **options))


def test_a_module_that_takes_the_sequence_first_is_refused_and_converted_as_the_error_says():
    """A copy would take (S, B, D) without a word, and attend along the batch."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(48, 4, dtype=torch.float64)
    x_SBD = torch.randn(9, 2, 48, dtype=torch.float64)
    expected = theirs(x_SBD, x_SBD, x_SBD, need_weights=False)[0]
    with pytest.raises(Unsupported, match="batch_first=False.*transpose its inputs and outputs, set module.batch_fir"):
        from_multihead_attention(theirs)
    theirs.batch_first = True
    found = from_multihead_attention(theirs)(x_SBD.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)  # float64, sums in another order


def test_dropout_only_while_training():
    torch.manual_seed(0)
    layer, x = FlashAttention(32, 2, dropout=0.5), torch.randn(1, 6, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_backend_tells_which_ran():
    layer, x = FlashAttention(32, 2), torch.randn(1, 6, 32)
    assert layer.backend is None
    layer(x)
    assert layer.backend == ("flash" if x.device.type == "cpu" else layer.backend)
    layer = FlashAttention(32, 2, window=3)
    layer(x)
    assert layer.backend == "math"


def test_the_page_calls_the_dispatcher():
    page = Path(__file__).parents[3] / "docs" / "attention.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(code, page, "exec"), names)
    q, k, v = names["q"], names["k"], names["v"]
    assert names["backend"] in dispatcher.BACKENDS
    expected = attention_reference(q, k, v, left=15, right=0)
    torch.testing.assert_close(names["output"], expected)  # fp32: sums of at most 32 terms in another order
    for path in re.findall(r"`(vblackwell\.[\w.]+)`", page.read_text(encoding="utf-8")):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_state_moves_between_modules():
    torch.manual_seed(0)
    a, b = FlashAttention(32, 4, n_kv_heads=2), FlashAttention(32, 4, n_kv_heads=2)
    b.load_state_dict(a.state_dict())
    x = torch.randn(1, 5, 32)
    assert torch.equal(a(x), b(x))
    assert a.qkv_proj.weight.shape == (64, 32)


@pytest.mark.parametrize(
    "values",
    [(30, 4, {}), (32, 4, {"n_kv_heads": 3}), (32, 2, {"dropout": 1.0}), (6, 2, {"rotary_theta": 1e4})],
    ids=str,
)
def test_refused_modules(values):
    with pytest.raises(ConfigurationError):
        FlashAttention(values[0], values[1], **values[2])


def test_refused_inputs():
    layer = FlashAttention(32, 2)
    with pytest.raises(ConfigurationError, match="give .B, S, 32"):
        layer(torch.randn(2, 5, 16))
    with pytest.raises(ConfigurationError, match="mask of torch.int64"):
        layer(torch.randn(2, 5, 32), torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="does not broadcast"):
        layer(torch.randn(2, 5, 32), torch.ones(5, 4, dtype=torch.bool))


SHORT = {"queries": 63, "keys": 257, "refused": ()}
H200 = AttentionRequest("cuda", (9, 0), torch.bfloat16, 16, 16, 4096, 4096, 128)


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "cudnn"),
        ({"causal": True}, "cudnn"),
        ({"mask": "boolean"}, "triton"),
        ({"mask": "additive"}, "triton"),
        ({"mask": "additive", "mask_gradient": True}, "efficient"),
        ({"causal": True, "window": 100}, "triton"),
        ({"gradient": True, "deterministic": True}, "triton"),
        ({"deterministic": True}, "triton"),
        ({"capability": (8, 6)}, "flash"),
        ({"dtype": torch.float32}, "efficient"),
        ({"head": 512}, "efficient"),
        ({**SHORT, "mask": "boolean"}, "cudnn"),
        ({**SHORT, "mask": "boolean", "gradient": True}, "cudnn"),
        ({**SHORT, "mask": "boolean", "gradient": True, "head": 136}, "cudnn"),
        ({**SHORT, "mask": "boolean", "gradient": True, "head": 136, "keys": 192, "captured": True}, "cudnn"),
        ({**SHORT, "mask": "boolean", "gradient": True, "head": 128, "keys": 320}, "efficient"),
        ({**SHORT, "mask": "boolean", "gradient": True, "keys": 192}, "efficient"),
        ({**SHORT, "mask": "boolean", "keys": 192}, "efficient"),
        ({**SHORT, "mask": "boolean", "keys": 1024}, "cudnn"),
        ({**SHORT, "mask": "boolean", "keys": 192, "kv_heads": 4}, "cudnn"),
        ({**SHORT, "mask": "boolean", "keys": 192, "kv_heads": 1}, "efficient"),
        ({**SHORT, "mask": "additive", "chosen": "flash"}, "cudnn"),  # which refuses masks
        ({**SHORT, "mask": "additive", "chosen": "efficient"}, "efficient"),
        ({**SHORT, "mask": "additive", "keys": 192, "gradient": True}, "efficient"),  # cuDNN's backward would be two
        ({**SHORT, "mask": "additive", "keys": 3, "captured": True}, "efficient"),
        ({**SHORT, "mask": "additive", "keys": 3, "captured": True, "kv_heads": 4}, "cudnn"),
        ({**SHORT, "mask": "additive", "keys": 3, "captured": True, "gradient": True}, "cudnn"),
        ({**SHORT, "mask": "additive", "keys": 3, "captured": True, "gradient": True, "head": 64}, "efficient"),
        ({**SHORT, "mask": "additive", "dropout": True}, "efficient"),
        ({**SHORT, "mask": "additive", "deterministic": True}, "efficient"),
        ({**SHORT, "mask": "boolean", "refused": ("cudnn",)}, "efficient"),
        ({**SHORT, "mask": "boolean", "capability": (8, 0)}, "efficient"),
        ({**SHORT, "mask": "boolean", "refused": None}, "triton"),  # a trace
        ({**SHORT, "mask": "boolean", "captured": True}, "cudnn"),
        ({**SHORT, "mask": "boolean", "kv_heads": 4}, "cudnn"),
        ({**SHORT, "mask": "boolean", "kv_heads": 4, "refused": ("cudnn",)}, "efficient"),
        ({**SHORT, "mask": "boolean", "kv_heads": 4, "captured": True}, "cudnn"),
        ({**SHORT, "mask": "boolean", "kv_heads": 4, "captured": True, "refused": ("cudnn",)}, "triton"),
        ({**SHORT, "mask": "boolean", "causal": True}, "efficient"),
        ({**SHORT, "window": 5}, "efficient"),
        ({**SHORT, "window": 5, "captured": True}, "triton"),
        ({**SHORT, "causal": True, "bottom_right": True}, "efficient"),
        ({**SHORT, "window": 5, "gradient": True, "deterministic": True}, "triton"),
        ({"mask": "additive", "queries": 512, "keys": 512, "refused": ()}, "cudnn"),
        ({"mask": "additive", "gradient": True, "refused": ()}, "triton"),
        ({"mask": "additive", "gradient": True, "head": 64, "refused": ()}, "cudnn"),
        ({"mask": "additive", "head": 64, "refused": ()}, "cudnn"),
        (
            {"mask": "boolean", "gradient": True, "queries": 512, "keys": 1024, "refused": (), "captured": True},
            "triton",
        ),
        (
            {"mask": "boolean", "gradient": True, "heads": 8, "kv_heads": 8, "queries": 512, "keys": 512, "head": 184}
            | {"refused": (), "captured": True},
            "cudnn",
        ),
        ({"mask": "additive", "gradient": True, "head": 64, "refused": (), "captured": True}, "cudnn"),
        ({"mask": "additive", "gradient": True, "head": 64}, "triton"),  # a trace
        ({"mask": "additive", "queries": 512, "keys": 512, "refused": (), "captured": True}, "triton"),
        ({"heads": 1, "kv_heads": 1, "window": 5, "refused": ()}, "triton"),  # a mask of 4096 x 4096
        ({"head": 256}, "triton"),  # PyTorch was not asked
        ({"head": 256, "refused": ()}, "cudnn"),
        ({"head": 256, "refused": ("cudnn",)}, "triton"),
        ({"head": 256, "refused": (), "gradient": True}, "cudnn"),
        ({"queries": 64, "keys": 64, "refused": ()}, "efficient"),
        ({"queries": 64, "keys": 64, "refused": (), "chosen": "flash", "gradient": True}, "flash"),
        ({"queries": 64, "keys": 64, "refused": ("cudnn",), "kv_heads": 4}, "flash"),
        ({"queries": 64, "keys": 64, "refused": (), "captured": True}, "flash"),
        ({"queries": 64, "keys": 64, "refused": (), "captured": True, "head": 32}, "efficient"),
        ({"queries": 64, "keys": 64, "refused": (), "captured": True, "head": 32, "window": 5}, "triton"),
        ({"queries": 64, "keys": 64, "refused": (), "captured": True, "gradient": True}, "cudnn"),
        ({"queries": 64, "keys": 65, "refused": (), "captured": True}, "cudnn"),
        ({"queries": 512, "keys": 512, "refused": (), "chosen": "flash"}, "flash"),
        ({"queries": 64, "keys": 64, "refused": (), "deterministic": True}, "triton"),
        ({"queries": 64, "keys": 64, "refused": (), "softcap": True}, "triton"),
        ({"refused": ("cudnn", "flash")}, "triton"),
        ({"queries": 1}, "flash"),
        ({"dtype": torch.float64}, "math"),
        ({"device": "cpu", "capability": (0, 0)}, "flash"),
    ],
    ids=str,
)
def test_the_stated_order(change, chosen, monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: dispatcher.CUDNN_MASKS)
    assert choose_attention(H200._replace(**change)) == chosen


def test_masks_of_a_cudnn_that_was_not_compared_run_elsewhere(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: dispatcher.CUDNN_MASKS - 1)
    request = H200._replace(**SHORT, mask="boolean")
    assert choose_attention(request) == "efficient"
    with pytest.raises(Unsupported, match="cudnn: a mask: only on compute capability 9.0, from cuDNN 91900 on"):
        choose_attention(request, "cudnn")


def test_the_own_kernel_runs_where_all_others_refuse(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    refused = {name: replace(backend, reasons=lambda request: ["no"]) for name, backend in dispatcher.BACKENDS.items()}
    monkeypatch.setattr(dispatcher, "BACKENDS", {**refused, "triton": dispatcher.BACKENDS["triton"]})
    assert choose_attention(H200) == "triton"


@pytest.mark.parametrize("shape", [(5,), (5, 1), (2, 5, 5), (1, 5), (3, 1, 5, 1)], ids=str)
def test_masks_of_any_shape_reach_pytorch(shape):
    torch.manual_seed(0)
    q = torch.randn(3, 2, 5, 16)
    for mask in (torch.rand(shape) > 0.3, torch.randn(shape)):
        got, name = attention(q, q, q, Variant(mask), "flash")
        expected, _ = attention(q, q, q, Variant(mask), "math")
        torch.testing.assert_close(got, expected)


def test_measured_times_decide_among_those_that_accept(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {"flash": 10, "triton": 20, "cudnn": 30})
    assert choose_attention(H200) == "flash"
    assert choose_attention(H200._replace(mask="boolean")) == "triton"


def test_the_times_of_the_gpu_that_holds_the_tensors_count(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatcher.tuning, "entries", lambda kind, device: asked.append(device) or {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    choose_attention(H200._replace(gpu=1))
    assert asked == [torch.device("cuda", 1)]


def test_times_of_a_shape_stand_for_its_neighbours_too(monkeypatch):
    measured = H200._replace(mask="boolean", mask_planes=1, batch=2, queries=4000, keys=4000)
    entries = {
        dispatcher.shape_key(measured): {"efficient": 1, "triton": 2},
        dispatcher.neighbours_key(measured): {"efficient": 2, "triton": 1},
    }
    monkeypatch.setattr(dispatcher.tuning, "entries", lambda kind, device: entries)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_attention(measured) == "efficient"
    for change in ({"batch": 3}, {"queries": 3999}, {"keys": 3000}, {"mask_planes": 2}):
        assert choose_attention(measured._replace(**change)) == "triton"
    assert dispatcher.neighbours_key(measured._replace(queries=5000)) not in entries


def test_times_of_long_neighbours_say_nothing_of_a_call_that_launches_bind(monkeypatch):
    entries = {dispatcher.neighbours_key(H200): {"triton": 1, "cudnn": 2}}
    monkeypatch.setattr(dispatcher.tuning, "entries", lambda kind, device: entries)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    small = H200._replace(heads=1, kv_heads=1, refused=())
    assert choose_attention(H200) == "triton" == choose_attention(small._replace(captured=True))
    assert choose_attention(small) == "cudnn"
    entries[dispatcher.shape_key(small)] = {"triton": 1, "cudnn": 2}
    assert choose_attention(small) == "triton"


def test_what_a_grid_cannot_count_is_refused(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    assert choose_attention(H200._replace(batch=70_000, window=5)) == "math"
    for words, change in (("70000 sequences", {"batch": 70_000}), ("planes of a mask", {"mask_planes": 1 << 16})):
        with pytest.raises(Unsupported, match=f"{words}.*it takes 65535"):
            choose_attention(H200._replace(**change), "triton")
    q = torch.randn(3, 2, 5, 16)
    request = dispatcher.request_of(q, q, q, Variant(mask=torch.ones(3, 1, 5, 5, dtype=torch.bool)))
    assert (request.batch, request.mask_planes) == (3, 3)


def test_every_reason_is_told(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    request = H200._replace(mask="boolean", window=5, head=300)
    reasons = attention_backends(request)
    assert set(reasons) == set(dispatcher.BACKENDS) and not reasons["math"]
    with pytest.raises(Unsupported) as caught:
        choose_attention(request, "flash")
    message = str(caught.value)
    assert all(f"{name}: " in message for name in dispatcher.BACKENDS)
    for words in ("a sliding window", "a head of 300: it takes 256", "a mask", "math: accepts"):
        assert words in message


def test_names_and_mixtures():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ConfigurationError, match="did you mean 'flash'"):
        attention(q, q, q, backend="flahs")
    with pytest.raises(Unsupported, match="a sliding window"):
        attention(q, q, q, Variant(window=2), "flash")
    out, name = attention(q, q, q, Variant(window=2))
    assert name == "math" and out.shape == q.shape


@pytest.mark.parametrize("name", ["flash", "math"])
def test_rows_that_see_nothing_are_zero(name):
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    out, _ = attention(q, q, q, Variant(mask), name)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert not out[:, :, 2].any() and gradient.isfinite().all()


def test_a_request_may_be_compiled():
    layer = FlashAttention(32, 2, causal=True)
    x = torch.randn(1, 6, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_sizes_may_be_symbols():
    q = torch.randn(1, 2, 6, 16)
    compiled = torch.compile(
        lambda x: attention(x, x, x, Variant(causal=True))[0], fullgraph=True, dynamic=True, backend="eager"
    )
    torch.testing.assert_close(compiled(q), attention(q, q, q, Variant(causal=True))[0])


@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_hoppers_own_forward_runs_on_hopper_alone(kind):
    for head, width in ((32, 32), (33, 64), (64, 64), (80, 128), (128, 128)):
        wanted = (kind, width) in attention_plan.SPECIALIZED_BY_DEFAULT
        expected = attention_plan.SPECIALIZED[width] if wanted else None
        assert attention_plan.specialized_plan(head, 2, (9, 0), kind) == expected
        for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
            assert attention_plan.specialized_plan(head, 2, capability, kind) is None
    assert attention_plan.specialized_plan(128, 4, (9, 0), kind) is None
    assert attention_plan.specialized_plan(256, 2, (9, 0), kind) is None  # not timed
    assert attention_plan.specialized_plan(128, 2, (9, 0), "scored") is None


def test_a_backend_may_be_asked_for_as_of_any_op(monkeypatch):
    monkeypatch.setattr(dispatcher, "_measured", lambda request: {})
    with use_backend("attention", "math"):
        assert choose_attention(H200) == "math" and choose_attention(H200, "triton") == "triton"
    with use_backend("attention", "flash"), pytest.raises(Unsupported, match="a sliding window.*math: accepts"):
        choose_attention(H200._replace(window=5))


# torch warns of itself where it first decomposes an operator for forward mode.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_forward_mode_derivative_is_the_unfused_one():
    q, tangent = torch.randn(2, 1, 2, 5, 16).unbind()
    got = torch.func.jvp(lambda x: attention(x, x, x, Variant(causal=True))[0], (q,), (tangent,))
    expected = torch.func.jvp(lambda x: attention(x, x, x, Variant(causal=True), "math")[0], (q,), (tangent,))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
