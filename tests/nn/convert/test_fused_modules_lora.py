"""Adapters over packed linears in few passes:
peft's values and gradients, and one product less where a layer is computed again.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.kernels.fp4 import w4a8
from vblackwell.nn.convert import fused_modules as module
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, restore_causal_lm
from vblackwell.nn.convert.lora import Lora
from vblackwell.nn.linear import stored_fp4

pytestmark = pytest.mark.filterwarnings(
    "ignore:.(is_gradient_checkpointing|gradient_checkpointing_enable). is deprecated:FutureWarning"
)
IDS = torch.arange(3, 35).view(2, 16)
LAYERS = 2


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.num_hidden_layers = LAYERS
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def gradients(model) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize(("fp4", "fp8"), [("nvfp4", False), ("mxfp4", True)])
def test_losses_and_gradients_are_those_of_peft(fp4, fp8, folder, make_stack, monkeypatch):  # noqa: F811
    monkeypatch.setattr(w4a8, "MIN_ROWS", IDS.numel())
    packed = {"fp4": fp4, "w4a8": fp8, "placement": "resident"}
    model = load_causal_lm(folder, make_stack(8 << 20), lora=Lora(4, alpha=24), **packed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    products = []
    counted = staticmethod(lambda *args: products.append(1) or PRODUCT(*args))
    monkeypatch.setattr(stored_fp4._Product, "forward", counted)
    loss, expected = gradients(model)
    report = accelerate_causal_lm(model, loss=False)
    assert len(report.replaced["adapter"]) == 7 * LAYERS
    assert gradients(model)[0] == loss and not products  # on the CPU it is peft's
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    got_loss, got = gradients(model)
    # Computed again, a layer ends before its last product: of each 7 linears, and 6 once more.
    assert len(products) == (7 + 6) * LAYERS
    assert abs(got_loss - loss) < 1e-5 * loss
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name  # fp32 sums in another order
    restore_causal_lm(model)
    products.clear()
    assert gradients(model)[0] == loss and not products


PRODUCT = stored_fp4._Product.forward


def test_what_is_left_to_peft(folder, make_stack, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    model = load_causal_lm(folder, make_stack(8 << 20), lora=Lora(4, dropout=0.5), fp4="nvfp4", placement="resident")
    adapter, x = model.model.layers[0].mlp.down_proj, torch.randn(3, model.config.intermediate_size)
    assert module._only_adapter(adapter, x) is None  # dropout
    model = load_causal_lm(folder, make_stack(8 << 20), lora=Lora(4), fp4="nvfp4", placement="resident")
    adapter = model.model.layers[0].mlp.down_proj
    assert module._only_adapter(adapter, x) == "default" and module._only_adapter(adapter, x.half()) is None
    handle = adapter.lora_A["default"].register_forward_hook(lambda *args: None)
    assert module._only_adapter(adapter, x) is None
    handle.remove()
    adapter.enable_adapters(False)
    assert module._only_adapter(adapter, x) is None
    model = load_causal_lm(folder, make_stack(60 << 10), lora=Lora(4), fp4="nvfp4", placement="streamed")
    assert module._only_adapter(model.model.layers[0].mlp.down_proj, x) is None


def test_a_compiler_sees_pefts_expression(folder, make_stack, monkeypatch):  # noqa: F811
    model = load_causal_lm(folder, make_stack(8 << 20), lora=Lora(4), fp4="nvfp4", placement="resident")
    adapter, x = model.model.layers[0].mlp.down_proj, torch.randn(3, model.config.intermediate_size)
    expected = adapter(x)
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(module, "adapted_linear", None)
    accelerate_causal_lm(model, loss=False)
    assert torch.equal(torch.compile(adapter, backend="eager", fullgraph=True)(x), expected)


def test_what_backward_reads_again_passes_the_hooks_of_saved_tensors(folder, make_stack, monkeypatch):  # noqa: F811
    """A stack replaces what autograd saves of its weights; what does not pass would be kept on the GPU."""
    model = load_causal_lm(folder, make_stack(8 << 20), lora=Lora(4), fp4="nvfp4", placement="resident")
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    accelerate_causal_lm(model, loss=False)
    adapter, saved = model.model.layers[0].mlp.down_proj, list[int]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.data_ptr()) or tensor, lambda x: x
    ):
        adapter(torch.randn(3, model.config.intermediate_size, requires_grad=True))
    assert {part.data_ptr() for part in adapter.base_layer.placed().tensors()} <= set(saved)
