"""Fine parts in a stack: outputs are those of both parts or of the coarse one, never of anything else; layers get theirs back."""

import pytest
import torch
from torch import nn

import vblackwell as vb
from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory
from vblackwell.nn.fine_stream import FineStream

WIDTH, LAYERS = 64, 6
FINE_BYTES = WIDTH * WIDTH // 2


def packed_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    vb.enable_vb_optimization(model, "inference")
    for layer in model:
        layer.quantize()
    return model.requires_grad_(False)


def stack_of(fast_parts: float, slow_parts: float = 100) -> vb.VGPUStack:
    sizes = [int(parts * FINE_BYTES) for parts in (fast_parts, slow_parts)]
    return vb.VGPUStack({"levels": [{"capacity_mb": size / 2**20, "device": "cpu"} for size in sizes]})


def outputs(model, x, with_fine):
    """What the layers compute one after the other, ``with_fine`` saying which have their fine part."""
    for layer, fine in zip(model, with_fine, strict=True):
        weight = layer.packed.dequantize() if fine else layer.packed.coarse.dequantize()
        x = nn.functional.linear(x, weight, layer.bias)
    return x


def test_everything_resident_gives_both_parts_and_close_gives_them_back():
    model, x = packed_model(), torch.randn(3, WIDTH)
    both = model(x)
    with stack_of(LAYERS + 1) as stack:
        stream = FineStream(model, stack)
        assert not any(layer.has_fine for layer in model) and len(stack) == LAYERS
        assert stream.wait() == LAYERS
        assert torch.equal(model(x), both) and stream.served.share == 1
        assert not any(layer.has_fine for layer in model)  # between calls the stack has them
        stream.close()
        stream.close()
        assert len(stack) == 0 and torch.equal(model(x), both)


def test_what_does_not_fit_computes_coarse_and_nothing_waits(monkeypatch):
    model, x = packed_model(), torch.randn(3, WIDTH)
    reference = packed_model()
    with stack_of(4) as stack:
        stream = FineStream(model, stack, ahead=1)
        assert stream.wait() == 2  # two stay, two places are for the others to pass through
        seen = []
        for layer in model:
            layer.register_forward_pre_hook(lambda m, _: seen.append(m.has_fine))
        for number in range(5):
            seen.clear()
            with monkeypatch.context() as patch:
                if number == 0:  # a link that has not moved anything yet
                    patch.setattr(stack, "prefetch", lambda keys: None)
                y = model(x)
            assert seen[:2] == [True, True] and (number > 0 or not any(seen[2:]))
            torch.testing.assert_close(y, outputs(reference, x, seen), rtol=1e-5, atol=1e-5)
        assert 0 < stream.served.share < 1 and stream.served.both + stream.served.coarse == 5 * LAYERS
        stream.close()
        assert torch.equal(model(x), reference(x))


def test_a_link_that_is_late_is_asked_once_a_pass(monkeypatch):
    model, x = packed_model(), torch.randn(3, WIDTH)
    with stack_of(5) as stack:
        stream, asked = FineStream(model, stack, ahead=3), []
        stream.wait()
        keys = stream.keys()
        monkeypatch.setattr(stack, "prefetch", asked.extend)  # and nothing comes
        for number in range(1, 4):
            model(x)
            assert all(asked.count(key) in (number, number + 1) for key in keys if stack.level_of(key))
        assert asked


def test_closing_may_be_tried_again(monkeypatch):
    model = packed_model()
    with stack_of(2) as stack:
        stream = FineStream(model, stack)
        key, access = stream.keys()[2], stack.access

        def broken(wanted):
            if wanted == key:
                raise DiskError("gone")
            return access(wanted)

        monkeypatch.setattr(stack, "access", broken)
        with pytest.raises(DiskError):
            stream.close()
        monkeypatch.undo()
        stream.close()
        assert all(layer.has_fine for layer in model) and len(stack) == 0


def test_what_is_refused_leaves_the_model_as_it_was():
    model, x = packed_model(), torch.randn(3, WIDTH)
    both = model(x)
    with stack_of(2, 2) as stack, pytest.raises(InsufficientMemory):
        FineStream(model, stack)
    assert torch.equal(model(x), both)
    with stack_of(2) as stack:
        with pytest.raises(ConfigurationError, match="at least 1"):
            FineStream(model, stack, ahead=0)
        with pytest.raises(ConfigurationError, match="no layer in two parts"):
            FineStream(nn.Linear(4, 4), stack)
        assert len(stack) == 0
