"""Initial weights, loss and checkpointing of the decoder."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.nn.decoder.test_decoder_equality import config, tokens
from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.nn.decoder.config import PRESETS, DecoderConfig, find_preset
from vblackwell.nn.decoder.decoder import Decoder

# parameters with 4,096, 32,000 and 50,257 tokens: what presets.py states
PARAMETERS = {
    "tiny": (2_967_936, 10_111_360, 14_785_152),
    "small": (45_101_568, 73_675_264, 92_370_432),
    "medium": (91_245_312, 134_105_856, 162_148_608),
    "large": (312_001_536, 369_148_928, 406_539_264),
    "xl": (1_147_234_304, 1_261_529_088, 1_336_309_760),
    "7b": (6_509_826_048, 6_738_415_616, 6_887_976_960),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_parameters_they_state(name):
    for vocab_size, stated in zip((4096, 32000, 50257), PARAMETERS[name], strict=True):
        shape = replace(find_preset(name), vocab_size=vocab_size)
        model = Decoder(shape, device="meta")
        assert shape.num_parameters == stated == sum(p.numel() for p in model.parameters())


def test_tiny_streams_through_a_third_of_its_training_state():
    """Three weight and two gradient buffers of the largest group, fp32, in a third of 16 bytes a parameter."""
    shape = replace(find_preset("tiny"), vocab_size=4096)
    layer = shape.num_parameters - replace(shape, num_layers=shape.num_layers - 1).num_parameters
    largest = max(4096 * shape.hidden_size, layer)
    assert 5 * largest * 4 < 0.75 * shape.num_parameters * 16 / 3


def test_unknown_preset_names_the_nearest():
    assert set(PARAMETERS) == set(PRESETS)
    with pytest.raises(ConfigurationError, match="did you mean 'medium'"):
        find_preset("mediun")


def test_initial_weights_are_a_function_of_the_seed():
    state, rng = Decoder(config(), seed=5).state_dict(), torch.get_rng_state()
    again, other = Decoder(config(), seed=5).state_dict(), Decoder(config(), seed=6).state_dict()
    assert torch.equal(rng, torch.get_rng_state())  # the caller's generator is left alone
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert not torch.equal(state["lm_head.weight"], other["lm_head.weight"])
    spread = {name: state[name].std().item() for name in state if state[name].dim() == 2}
    for name, value in spread.items():
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert value == pytest.approx(0.02 / (6**0.5 if into_residual else 1), rel=0.05), (
            name
        )  # 5 %: > 5 sigma of 4,096 draws


def test_no_buffers_and_default_device():
    with torch.device("meta"):
        model = Decoder(config())
    assert not list(model.buffers()) and model.lm_head.weight.is_meta
    assert Decoder(config(), dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_a_decoder_can_be_traced_on_fake_tensors():
    with FakeTensorMode():
        shape = replace(find_preset("7b"), vocab_size=32000, num_layers=4)
        model = Decoder(shape, dtype=torch.bfloat16)
        model.gradient_checkpointing = True
        input_ids = torch.zeros(2, 128, dtype=torch.long)
        model(input_ids, input_ids).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_loss_is_the_mean_over_counted_targets():
    model, targets = Decoder(config(), seed=3), tokens(seed=2)
    targets[0, :20] = -100
    logits = model(tokens())
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(
        model(tokens(), targets), expected, rtol=1e-6, atol=0
    )  # one fp32 division placed elsewhere


@pytest.mark.parametrize("chunk", [2048, 7])
def test_checkpointing_changes_no_gradient(chunk):
    plain, saving = Decoder(config(num_kv_heads=2), seed=3), Decoder(config(num_kv_heads=2), seed=3)
    saving.gradient_checkpointing, saving.loss_chunk_tokens = True, chunk
    losses = []
    for model in (plain, saving):
        losses.append(model(tokens(), tokens(seed=2)))
        losses[-1].backward()
    if chunk == 2048:  # one chunk: the same operations in the same order
        assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), saving.parameters(), strict=True))
    else:  # sums of 66 terms of order 1 in another grouping
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_checkpointing_keeps_only_block_inputs():
    def saved_bytes(checkpointing: bool) -> int:
        model, seen = Decoder(config(), seed=3), {}
        model.gradient_checkpointing = checkpointing
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens(), tokens(seed=2))
        return sum(size for size, _ in seen.values())

    assert saved_bytes(True) < saved_bytes(False) / 5


class Noisy(nn.Module):
    """A module with everything that a second pass could disturb: running statistics, a count, randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.norm(self.linear(x))).tanh() * float(self.calls)  # the output depends on the buffer


def test_checkpoint_leaves_no_trace():
    runs = []
    for run in (lambda module, x: module(x), checkpoint):
        torch.manual_seed(0)
        module = Noisy()
        buffers = {name: id(buffer) for name, buffer in module.named_buffers()}
        x = torch.randn(8, 6, requires_grad=True)
        outputs = [run(module, x), run(module, x * 2)]  # two passes before a backward, as with accumulation
        (outputs[0].square().sum() + outputs[1].sum()).backward()
        assert buffers == {name: id(buffer) for name, buffer in module.named_buffers()}
        draw = torch.rand(3)
        runs.append([*outputs, x.grad, draw, *(p.grad for p in module.parameters()), *module.buffers()])
    assert [buffer for buffer in runs[0][8:] if buffer.dim() == 0] == [2, 2]  # calls and num_batches_tracked
    for plain, recomputed in zip(*runs, strict=True):
        assert torch.equal(plain, recomputed)


def test_checkpoint_keeps_shared_buffers_shared():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Module(), nn.Module()
            shared = torch.zeros(())
            self.left.register_buffer("count", shared)
            self.right.register_buffer("count", shared)

        def forward(self, x):
            self.left.count.add_(1)
            return x.sin() * self.right.count

    pair, x = Pair(), torch.ones(2, requires_grad=True)
    checkpoint(pair, x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos()) and pair.left.count == 1


@pytest.mark.parametrize(
    "change, word",
    [
        ({"num_heads": 5}, "head_dim"), ({"num_kv_heads": 3}, "divisor"), ({"head_dim": 15}, "even"),
        ({"num_layers": 0}, "least 1"), ({"norm_eps": 0.0}, "positive"),
        ({"vocab_size": -1}, "vocab_size"), ({"num_kv_heads": 0}, "divisor"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(change, word):
    with pytest.raises(ConfigurationError, match=word):
        config(**change)


def test_config_survives_the_way_through_hugging_face():
    shape = config(num_kv_heads=2, head_dim=24, rope_theta=12345.0, norm_eps=3e-6, bos_token_id=7, eos_token_id=8)
    assert DecoderConfig.from_hf(shape.to_hf()) == shape
    with pytest.raises(ConfigurationError, match="hidden_size"):
        DecoderConfig.from_hf({key: value for key, value in shape.to_hf().items() if key != "hidden_size"})
