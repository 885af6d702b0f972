"""Layers of a streamed model as CUDA graphs, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, GPT2LMHeadModel

from tests.nn.convert.test_causal_lm import GPT2
from tests.nn.convert.test_fused_modules_lean import checkpointed, family
from vblackwell.kernels.pointwise import layer_graphs
from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs
from vblackwell.kernels.runtime.capture import Captured, capturing
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.movement import spare
from vblackwell.offload.optimizer import VGPUAdamW

pytestmark = pytest.mark.gpu


def test_a_capture_that_a_wait_ends_leaves_the_allocator_as_it_was():
    """Memory that another stream has used comes back when that is done, which it never does while torch captures."""
    device, other = torch.device("cuda"), torch.cuda.Stream()
    x = torch.ones(8, device=device)

    def kept() -> int:
        for _ in range(20):
            memory = torch.empty(1 << 20, device=device)
            with torch.cuda.stream(other):
                memory.add_(1)
            memory.record_stream(other)
            del memory
        torch.cuda.synchronize()
        torch.empty(1 << 20, device=device)  # which looks for memory
        return torch.cuda.memory_allocated(device)

    before = kept()
    with pytest.raises(RuntimeError), capturing(device):
        Captured(lambda: x.sum().item(), torch.cuda.graph_pool_handle())
    assert not torch.cuda.is_current_stream_capturing()
    assert [kept(), kept()] == [before, before]
    with capturing(device):
        (x * 3).sum()
        three = Captured(lambda: x * 3, torch.cuda.graph_pool_handle())
    assert three().tolist() == [3.0] * 8


@pytest.mark.parametrize(("name", "weight_bytes"), [("Llama", None), ("GPT2", None), ("Llama", "4MiB")])
def test_streamed_layers_in_graphs_train_to_the_same_bits(name, weight_bytes, monkeypatch):
    """With weights of a stated size too, as plans state it. Whether they would save time, and steps are steady, is not
    asked: other processes use the GPU meanwhile."""
    monkeypatch.setattr(spare, "STEADY", 1)
    monkeypatch.setattr(spare, "LINK_BUSY", 1e9)
    monkeypatch.setattr(layer_graphs._Launched, "waits_for_host", True)
    monkeypatch.setattr(layer_graphs._Graphs, "seconds", lambda *given: 0.0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 512}
    gpt2 = {**GPT2, "n_embd": 256, "n_layer": 6, "vocab_size": 512, "n_positions": 256}
    torch.use_deterministic_algorithms(True)
    runs = []
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for allowed in (True, False):
                with monkeypatch.context() as patch:
                    if not allowed:
                        patch.setattr(LayerGraphs, "allow", lambda self, num_bytes: None)
                    torch.manual_seed(0)
                    model = GPT2LMHeadModel(GPT2Config(**gpt2)) if name == "GPT2" else family(name, **sizes)
                    runs.append(trained(model, 14, weight_bytes))
    finally:
        torch.use_deterministic_algorithms(False)
    (graphs, losses, weights), (none, right_losses, right_weights) = runs
    assert len(graphs) == 1 and not none
    assert losses == right_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, right_weights, strict=True))


def trained(
    model: nn.Module, steps: int, weight_bytes: str | None
) -> tuple[list[Any], list[float], list[torch.Tensor]]:
    """Graphs, losses and weights of a model that streams under 1 GiB."""
    device = torch.device("cuda")
    with create_vgpu_stack("1GiB", "2GiB", device=device, cap_process=False) as stack:
        how: Any = {"placement": "streamed", "compute_dtype": torch.bfloat16, "weight_bytes": weight_bytes}
        model = enable_vgpu_stack_optimization(checkpointed(model), stack, **how)
        optimizer, losses = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True, max_grad_norm=1.0), []
        for seed in range(steps):
            ids = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(seed)).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        engine = offload_of(model)
        graphs = engine.step_control.graphs
        found = list(graphs._graphs)
        assert bool(found) == (graphs.num_bytes > 0)
        graphs.drop()
        assert graphs.num_bytes == 0
        return found, losses, [param.detach().cpu() for param in model.parameters()]
