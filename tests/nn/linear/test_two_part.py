"""Models whose linears have weights in two parts: replacement, training, packing, caches, files."""

import copy
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import vblackwell as vb
from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, CorruptData, UnknownKey
from vblackwell.kernels.fp4 import two_part_round
from vblackwell.kernels.pointwise.rows import swiglu
from vblackwell.kernels.runtime import nvrtc
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.linear import two_part as optimized_linear
from vblackwell.nn.linear.one_input import linears_of_one_input
from vblackwell.nn.linear.rounded import Rounded, rounded_linears, rounded_swiglu_linear
from vblackwell.nn.linear.two_part import Settings, VBOptimizedLinear
from vblackwell.numerics.separation import round_to_parts, training_scales
from vblackwell.trace.trace import trace_training


def model_of(layers: int = 2, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())), nn.Linear(width, 5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = (
            nn.Embedding(40, 16),
            nn.Linear(16, 16).bfloat16(),
            nn.Linear(16, 40, False),
        )
        self.out.weight, self.again = self.embedding.weight, self.inner


def test_replacement_keeps_parameters_ties_dtypes_and_names(capsys):
    model = model_of()
    names, parameters = list(model.state_dict()), list(model.parameters())
    assert vb.enable_vb_optimization(model, mode="training", verbose=True) is model
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert "3 linears" in capsys.readouterr().err
    tied = vb.enable_vb_optimization(Tied())
    assert type(tied.out) is nn.Linear and tied.out.weight is tied.embedding.weight
    assert (
        isinstance(tied.inner, VBOptimizedLinear)
        and tied.again is tied.inner
        and tied.inner.weight.dtype == torch.bfloat16
    )


def test_large_layers_are_named(capsys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(4096, 4096))
    vb.enable_vb_optimization(model, verbose=True)
    assert capsys.readouterr().err.splitlines()[1:] == ["  2 of 2: 1 4096x4096, 64.0 MiB"]


def test_a_layer_of_packed_parts_is_for_inference():
    packed = VBOptimizedLinear(32, 8).quantize().packed
    assert VBOptimizedLinear.from_packed(packed).settings.mode == "inference"
    assert VBOptimizedLinear.from_packed(packed, None, "auto").settings.mode == "auto"


def test_start_costs_no_work():
    """62 layers and 36 M parameters take no tensor work at all:
    nothing is copied, cached or rounded before the first forward.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(760, 760) for _ in range(62)))
    wrapper = vb.VBModelWrapper(model, mode="training")
    assert len(wrapper.replaced_modules) == 62 and sum(p.numel() for p in wrapper.parameters()) > 35e6
    assert all(row["cached_bytes"] == 0 for row in wrapper.get_all_stats().values())


@pytest.mark.parametrize(
    "arguments",
    [
        {"drift_threshold": 0.0},
        {"drift_threshold": 1.5},
        {"drift_threshold": float("nan")},
        {"drift_threshold": "0.1"},
        {"refresh_every": 0},
        {"refresh_every": True},
        {"mode": "fast"},
        {"replace_pattern": "("},
        {"replace_pattern": "nothing"},
        {"enable_fp4": False, "enable_quantization": False},
    ],
    ids=str,
)
def test_what_is_refused_leaves_the_model_as_it_was(arguments):
    model = model_of()
    before = list(model.modules())
    with pytest.raises(ConfigurationError):
        vb.enable_vb_optimization(model, **arguments)
    assert list(model.modules()) == before


def test_numbers_of_numpy_are_numbers():
    assert Settings(drift_threshold=np.float64(0.25)).drift_threshold == 0.25


def test_gradients_are_exact_and_near_those_of_plain_weights():
    plain, ours = model_of(), vb.enable_vb_optimization(model_of(), mode="training")
    x, dy = torch.randn(64, 32), torch.randn(64, 5)
    plain(x).backward(dy)
    ours(x).backward(dy)
    a, b = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (plain, ours))
    assert float(functional.cosine_similarity(a, b, 0)) > 0.999
    rounded = model_of()  # the same network with the rounded weights put in: straight-through gradients are its own
    for module in rounded:
        if isinstance(module, nn.Linear):
            module.weight.data = round_to_parts(module.weight, training_scales(module.weight), torch.float32)
    rounded(x).backward(dy)
    for mine, other in zip(ours.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def train(model: nn.Module, steps: int) -> float:
    """Mean loss of the last ten steps, of a fixed function of noise."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    truth, losses = torch.randn(32, 5), []
    for _ in range(steps):
        x = torch.randn(32, 32)
        loss = functional.mse_loss(model(x), torch.tanh(x @ truth / 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_of_one_input_are_one_node(recomputed):
    """Outputs and gradients are those of the layers one by one; who got no gradient counts no step."""
    torch.manual_seed(0)
    layers = [VBOptimizedLinear(48, width, bias=False, mode="training") for width in (32, 16, 64)]
    x = torch.randn(2, 5, 48)
    found = []
    for together in (True, False):
        twins, y = copy.deepcopy(layers), x.clone().requires_grad_()

        def outputs(x, twins=twins, together=together):
            return linears_of_one_input(x, *twins) if together else [twin(x) for twin in twins]

        out = checkpoint(outputs, y, use_reentrant=False) if recomputed else outputs(y)
        (out[0].square().sum() + out[2].sin().sum()).backward()
        assert [twin.stats()["steps"] for twin in twins] == [1, 0, 1] and twins[1].weight.grad is None
        found.append([*out, y.grad, twins[0].weight.grad, twins[2].weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # fp32 sums of 48 and of 96 products
    node = found[0][0].grad_fn
    assert node is not None and node is found[0][2].grad_fn or recomputed


@pytest.mark.parametrize("wanted", [True, False])
def test_gating_and_the_product_after_it_are_one_node(wanted):
    """The bits of two nodes; with ``wanted`` off, their gradients."""
    gate, up, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 16), (2, 3, 16), (8, 16)))
    reached = []
    rounded = Rounded(weight, weight.detach() * 1.5, lambda: reached.append(1))
    with use_backend("swiglu", "triton"):
        two = rounded_linears(swiglu(gate, up), [rounded])[0]
    one = rounded_swiglu_linear(gate, up, rounded, wanted)
    assert one.shape == two.shape and (not wanted or torch.equal(one, two))
    dy = torch.randn_like(two)
    for mine, theirs in zip(*(torch.autograd.grad(y, (gate, up, weight), dy) for y in (one, two)), strict=True):
        assert torch.equal(mine, theirs)
    assert len(reached) == 2


def test_second_gradients_are_refused():
    layer, x = VBOptimizedLinear(16, 16, mode="training"), torch.randn(2, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_training_follows_plain_training_in_constant_memory():
    wrapper = vb.VBModelWrapper(model_of(), mode="training", refresh_every=20, drift_threshold=0.2)
    plain = train(model_of(), 60)
    counts, loss = [], 0.0
    for _ in range(3):
        wrapper.model.load_state_dict(model_of().state_dict())
        loss = train(wrapper, 60)
        gc.collect()
        counts.append((sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), cached(wrapper)))
    assert counts[1] == counts[2]
    assert loss == pytest.approx(plain, rel=0.02)  # 60 noisy steps of a tiny model
    for row in wrapper.get_all_stats().values():
        assert row["steps"] == 60 and row["renewals"] >= 3  # at least every 20; drift adds to it while weights grow
        assert row["cached_bytes"] <= row["shape"][0] * row["shape"][1] / 16 + 4


def cached(wrapper) -> int:
    return sum(row["cached_bytes"] for row in wrapper.get_all_stats().values())


def test_inference_packs_once_and_lets_the_weight_go():
    model, x = model_of(), torch.randn(3, 32)
    with torch.no_grad():
        exact = model(x)
        wrapper = vb.VBModelWrapper(copy.deepcopy(model), mode="inference")
        y = wrapper(x)
    assert sqnr(exact, y) > 38  # three layers of 43 dB each
    assert sum(p.numel() for p in wrapper.parameters()) == 32 + 32 + 5  # the biases
    layer = wrapper.replaced_modules["0"]
    assert layer.is_quantized and layer.has_fine and layer.stats()["weight_bytes"] == 32 * 32 * 8.5 / 8 + 4
    loaded = vb.enable_vb_optimization(model_of(), mode="inference")
    loaded.load_state_dict(wrapper.model.state_dict())
    assert torch.equal(loaded(x), y)
    unpacked = vb.enable_vb_optimization(model_of())
    loaded.load_state_dict(unpacked.state_dict())  # and back: a plain file into packed layers
    assert loaded[0].weight is not None and torch.equal(loaded[0].weight, unpacked[0].weight)
    twin = copy.deepcopy(wrapper)
    assert torch.equal(twin(x), y)


@pytest.mark.parametrize("placement", [None, "resident", "streamed"])
def test_what_an_optimizer_changed_is_packed_again(placement):
    """Neither torch's fused AdamW nor a stack's updates leave a mark on the tensor."""
    model, x = vb.enable_vb_optimization(model_of(), mode="auto"), torch.randn(3, 32)
    if placement is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    else:
        levels = [{"device": "arena", "capacity_mb": 4}, {"device": "cpu", "capacity_mb": 8}]
        vb.enable_vgpu_stack_optimization(model, vb.VGPUStack({"levels": levels}), placement=placement)
        optimizer = vb.VGPUAdamW(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    with torch.no_grad():
        model(x)
        optimizer.step()
        changed = model(x)
        for layer in model[::2]:
            layer._forget()
        assert torch.equal(model(x), changed)


def test_threads_that_meet_an_unpacked_layer(monkeypatch):
    """Each packs, and none sees a layer without its weight and without what stands for it."""

    class Watched(VBOptimizedLinear):
        def __setattr__(self, name, value):
            if name == "weight" and value is None:
                assert self.layout and all(part is not None for part in (self.weight_codes, self.weight_fine))
            super().__setattr__(name, value)

    layer, x = Watched(64, 48, mode="inference"), torch.randn(2, 64)
    both, packing = threading.Barrier(2), optimized_linear.pack

    def slowly(weight, precision, name):
        both.wait()
        return packing(weight, precision, name)

    monkeypatch.setattr(optimized_linear, "pack", slowly)
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: layer(x), range(2))
    assert torch.equal(first, second) and layer.is_quantized


def test_the_fine_part_comes_and_goes():
    layer = VBOptimizedLinear(64, 48, mode="inference").quantize()
    x = torch.randn(4, 64)
    both, packed = layer(x), layer.packed
    fine = layer.drop_fine()
    coarse = layer(x)
    assert torch.allclose(coarse, functional.linear(x, packed.coarse.dequantize(), layer.bias), atol=1e-6)
    assert sqnr(both, coarse) < 25
    with pytest.raises(ConfigurationError, match="no fine part"):
        layer.drop_fine()
    with pytest.raises(ConfigurationError, match="expected torch.uint8"):
        layer.attach_fine(fine[:8])
    layer.attach_fine(fine)
    assert torch.equal(layer(x), both)
    with pytest.raises(ConfigurationError, match="coarse part"):
        VBOptimizedLinear(64, 48).attach_fine(fine)


def test_files_that_do_not_fit_are_refused():
    layer = VBOptimizedLinear(32, 16).quantize()
    state = layer.state_dict()
    with pytest.raises(ConfigurationError, match="another model"):
        VBOptimizedLinear(16, 32).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="precision"):
        VBOptimizedLinear(32, 16, precision="nvfp4").load_state_dict(state)
    with pytest.raises(CorruptData, match=r"weight_.*fine is"):
        VBOptimizedLinear(32, 16).load_state_dict(state | {"weight_fine": state["weight_fine"][:4]})


@pytest.mark.parametrize("switches", [(True, True), (False, True), (True, False)], ids=["two-part", "nvfp4", "int8"])
def test_adapter(switches):
    adapter = vb.create_virtual_blackwell("auto", *switches, max_weights=2)
    weight, x = torch.randn(24, 32, requires_grad=True), torch.randn(5, 32)
    adapter.register_weight("w", weight)
    trained = adapter.compress(weight, x, "w")
    trained.sum().backward()
    assert torch.equal(weight.grad, x.sum(0).expand(24, 32))
    with torch.no_grad():
        frozen = adapter.compress(weight, x, "w")
        assert torch.equal(adapter.compress(weight, x, "w"), frozen) and adapter.stats()["w"]["packings"] == 1
        weight.mul_(2)
        assert (
            sqnr(2 * frozen, adapter.compress(weight, x, "w")) > 100
        )  # never stale, and scales are powers of two apart
        assert adapter.stats()["w"]["packings"] == 2
        floor = 15 if switches == (False, True) else 35
        assert min(sqnr(x @ weight.t() / 2, trained), sqnr(x @ weight.t() / 2, frozen)) > floor
    with pytest.raises(ConfigurationError, match="registered with shape"):
        adapter.compress(weight[:8], x, "w")
    for name in "abc":
        adapter.compress(weight, x, name)
    assert set(adapter.stats()) == {"b", "c"}  # bounded: the least recently used went
    with pytest.raises(UnknownKey):
        adapter.forget("w")


def test_an_adapter_is_copied_without_what_belongs_to_its_weights():
    adapter, weight, x = vb.create_virtual_blackwell(), torch.randn(16, 32, requires_grad=True), torch.randn(3, 32)
    trained = adapter.compress(weight, x, "w")
    for other in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(copy.copy(adapter)))):
        assert torch.equal(other.compress(weight, x, "w"), trained)


def test_autocast():
    layer = VBOptimizedLinear(32, 32, mode="training")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 32)).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_on_the_gpu(rows):
    """Parts move between layouts without loss, both paths compute with them, and training rounds as on the CPU,
    bit for bit.
    """
    layer = VBOptimizedLinear(200, 72, mode="training", dtype=torch.bfloat16).cuda()
    x = torch.randn(rows, 200, device="cuda", dtype=torch.bfloat16)
    assert layer.weight is not None
    scales = training_scales(layer.weight.cpu())
    rounded = round_to_parts(layer.weight.detach().cpu(), scales, torch.bfloat16)
    y = layer(x)
    assert torch.equal(y, functional.linear(x, rounded.cuda(), layer.bias))
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (72, 200)
    packed = layer.quantize().packed
    weight = packed.dequantize(torch.float32)
    exact = x.double() @ weight.double().t() + layer.bias.double()
    assert (layer(x) - exact).norm() <= 2**-7 * exact.norm()  # weights and sum rounded to bf16 once each
    fine = layer.drop_fine()
    coarse = layer(x)
    layer.attach_fine(fine)
    assert sqnr(exact, layer(x)) > sqnr(exact, coarse) + 10
    on_cpu = copy.deepcopy(layer).cpu()
    assert torch.equal(on_cpu.packed.dequantize(torch.float32), weight.cpu())
    assert all(
        torch.equal(a, b.cpu()) for a, b in zip(on_cpu.state_dict().values(), layer.state_dict().values(), strict=True)
    )


def test_a_trace_launches_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("a kernel was given a weight without an address")

    monkeypatch.setattr(nvrtc, "why_not", lambda: [])
    monkeypatch.setattr(two_part_round, "_launcher", refuse)
    layer = VBOptimizedLinear(16, 8, mode="training")
    trace_training(layer, lambda: torch.zeros(4, 16, device="cuda"), lambda model, x: model(x).sum(), None)


def test_torch_func_transforms_a_layer_in_training():
    layer, x = VBOptimizedLinear(16, 8), torch.randn(3, 16)
    expected = x.clone().requires_grad_()
    layer(expected).sum().backward()
    got = torch.func.grad(lambda rows: layer(rows).sum())(x)
    torch.testing.assert_close(got, expected.grad, rtol=1e-6, atol=1e-6)  # the same products
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), rtol=1e-6, atol=1e-6)


def test_parts_are_moved_loaded_and_assigned_as_those_of_any_packed_linear():
    layer, x = VBOptimizedLinear(48, 32, bias=False).quantize(), torch.randn(3, 48)
    y, state = layer(x), layer.state_dict()
    twin = copy.deepcopy(layer).half().to("cpu").float()
    assert torch.equal(twin(x), y) and twin.weight_codes.data_ptr() != layer.weight_codes.data_ptr()
    fresh = VBOptimizedLinear(48, 32, bias=False, device="meta")
    fresh.load_state_dict(state, assign=True)
    assert torch.equal(fresh(x), y) and fresh.has_fine
    loaded = VBOptimizedLinear(48, 32, bias=False)
    loaded.load_state_dict({name: tensor for name, tensor in state.items() if name != "weight_fine"})
    assert loaded.is_quantized and not loaded.has_fine  # its coarse part alone
    for name in ("weight_scales", "weight_meta"):
        with pytest.raises(CorruptData, match=name):
            VBOptimizedLinear(48, 32, bias=False).load_state_dict(
                {key: each for key, each in state.items() if key != name}
            )
