"""Keys and values in levels: the tokens of a cache that lives on level 0, bit for bit, and how level 0 is divided."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.generate.generate import columns
from vblackwell.generate.sampling import Sampling
from vblackwell.generate.stacked_cache import StackedCache
from vblackwell.generate.steps import level0_for
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.layout.generation import (
    CacheShape,
    GenerationBudget,
    cache_shape,
    divide_level0,
    layers_on_level0,
)

NUMBERS = [list(range(3, 13)), list(range(30, 40)), [5, 6, 7]]
COUNT = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.vocab_size, config.initializer_range, config.num_hidden_layers = 259, 0.3, 5
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def shape_of(model, rows: int) -> CacheShape:
    found = cache_shape(model.config, rows, max(map(len, NUMBERS[-rows:])) + COUNT, torch.float32)
    assert found is not None
    return found


def write(model, rows: int, cache, chunk=None):
    """Tokens, and the logits after the last of them."""
    logits = []
    handle = model.register_forward_hook(lambda module, args, output: logits.append(output.logits[:, -1]))
    tokens = list(columns(model, NUMBERS[-rows:], COUNT, Sampling(temperature=0), 0, chunk, cache))
    handle.remove()
    return tokens, logits


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_levels_change_no_bit(rows, chunk, model, make_stack):  # noqa: F811
    stack, shape = make_stack(1 << 20), shape_of(model, rows)
    expected = write(model, rows, None, chunk)
    found = []
    for on_level0 in (5, 3, 2, 0):
        cache = StackedCache(stack, shape, on_level0)
        assert stack.get_stats()["levels"][1]["used_bytes"] >= (5 - on_level0) * shape.layer_bytes
        found.append(write(model, rows, cache, chunk))
        assert cache.get_seq_length() == shape.positions - 1  # the last token was drawn, not read
        cache.close()
        cache.close()
    assert stack.get_stats()["levels"][0]["used_bytes"] == stack.get_stats()["levels"][1]["used_bytes"] == 0
    for tokens, logits in found:
        assert tokens == expected[0]
        assert all(torch.equal(one, other) for one, other in zip(logits, found[0][1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 4])
def test_levels_change_no_bit_on_a_gpu(chunk, model):
    moved = copy.deepcopy(model).to("cuda", torch.bfloat16)
    shape = shape_of(model, 3)._replace(dtype=torch.bfloat16)
    with VGPUStack({"levels": [{"device": "cuda:0", "capacity_mb": 8}, {"device": "cpu", "capacity_mb": 64}]}) as stack:
        found = []
        for on_level0 in (5, 3, 0, 0):
            cache = StackedCache(stack, shape, on_level0)
            found.append(write(moved, 3, cache, chunk))
            cache.close()
    for tokens, logits in found[1:]:
        assert tokens == found[0][0]
        assert all(torch.equal(one, other) for one, other in zip(logits, found[0][1], strict=True))


def test_a_pass_without_room_is_read_in_halves(model, make_stack):  # noqa: F811
    stack, shape = make_stack(1 << 20), shape_of(model, 1)
    numbers, passes = [list(range(3, 13))], []
    shape = shape._replace(positions=10 + COUNT)
    expected = list(columns(model, numbers, COUNT, Sampling(temperature=0), 0, 3))
    for on_level0 in (5, 2):
        cache = StackedCache(stack, shape, on_level0)

        def refuse(module, args, options):
            passes.append(options["hidden_states"].shape[1] if "hidden_states" in options else args[0].shape[1])
            if passes[-1] > 3:  # the layers before have read it already
                raise torch.OutOfMemoryError("as a GPU would")

        handle = model.model.layers[3].register_forward_pre_hook(refuse, with_kwargs=True)
        try:
            found = list(columns(model, numbers, COUNT, Sampling(temperature=0), 0, None, cache))
        finally:
            handle.remove()
            cache.close()
        assert found == expected and passes[:6] == [10, 5, 3, 3, 3, 1]
        passes.clear()
    handle = model.model.layers[3].register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):  # a cache that cannot go back
        list(columns(model, numbers, COUNT, Sampling(temperature=0), 0, None))
    handle.remove()


def test_only_what_was_read_crosses_the_link(model, make_stack):  # noqa: F811
    stack, shape = make_stack(1 << 20), shape_of(model, 1)
    write(model, 1, StackedCache(stack, shape, 0))
    links = {(link["source"], link["destination"]): link["bytes"] for link in stack.get_stats()["links"]}
    read = range(3, 3 + COUNT - 1)
    assert links["arena", "cpu"] == 5 * (3 + COUNT - 1) * shape.position_bytes
    # One layer's cache is brought ahead at the end.
    assert links["cpu", "arena"] == (5 * sum(read) + 3 + COUNT - 1) * shape.position_bytes


def test_a_cache_is_as_long_as_it_was_made(model, make_stack):  # noqa: F811
    cache = StackedCache(make_stack(1 << 20), shape_of(model, 1)._replace(positions=7), 5)
    with pytest.raises(ConfigurationError, match="position 8 is beyond the cache's 7"):
        write(model, 1, cache)
    cache.close()


def test_levels_without_room_are_named(model, make_stack):  # noqa: F811
    shape = shape_of(model, 1)
    stack = make_stack(1 << 20, 4 * shape.layer_bytes)
    with pytest.raises(InsufficientMemory):
        StackedCache(stack, shape, 0)
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])


def test_only_plain_attention_has_such_a_cache():
    shape = cache_shape(CONFIGS["qwen3"](), 3, 10, torch.bfloat16)
    assert shape == CacheShape(4, 3, 2, 10, 8, torch.bfloat16) and shape.num_bytes == 2 * 4 * 2 * 8 * 2 * 3 * 10
    assert cache_shape(CONFIGS["gpt2"](), 1, 1, torch.float32) is not None
    window = transformers.MistralConfig(sliding_window=4, num_hidden_layers=2)
    assert cache_shape(window, 1, 1, torch.float32) is None
    assert cache_shape(transformers.Gemma2Config(num_hidden_layers=2), 1, 1, torch.float32) is None


def test_how_level0_is_divided():
    weights, shape = [10] * 8, CacheShape(8, 1, 1, 1, 1, torch.uint8)  # two bytes a layer
    assert divide_level0(100, weights, shape, 1, 400) == GenerationBudget(84, 8, 300)  # everything fits
    assert divide_level0(50, weights, shape, 7, 400) == GenerationBudget(
        34, 8, 42
    )  # weights pass, keys and values stay
    wide = shape._replace(positions=6)
    assert divide_level0(100, weights, wide, 1, 400) == GenerationBudget(
        76, 0, 300
    )  # both pass; more rows, fewer weights
    assert divide_level0(64, [2] * 8, wide, 1, 400) == GenerationBudget(
        16, 2, 300
    )  # weights stay, and some layers' keys and values
    assert divide_level0(60, weights, wide._replace(rows=2), 200, 400).chunk == 1
    with pytest.raises(InsufficientMemory, match="fewer rows"):
        divide_level0(30, weights, wide, 1, 400)
    assert layers_on_level0(wide, 96) == 8


def test_a_model_that_is_in_no_stack_writes_with_its_own(model):
    with level0_for(model, 1, 10) as found:
        assert found == (None, None)
