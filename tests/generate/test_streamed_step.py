"""The steps of a streamed model over the stack's own bytes:
the logits of the model that is called, places that are taken in turn.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.generate.test_streamed_generate import saved_model
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.generate import streamed_step as module
from vblackwell.generate.generate import columns, draws, stepper
from vblackwell.generate.load import open_streamed
from vblackwell.generate.sampling import Sampling
from vblackwell.generate.stacked_cache import StackedCache
from vblackwell.generate.streamed_step import StreamedStep, reasons_against, streamed_step
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.assignment import Assignment
from vblackwell.offload.api import offload_of
from vblackwell.offload.layout.generation import cache_shape
from vblackwell.tools.quantize import quantize_folder

PROMPT, COUNT = 9, 5


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")

    def make(kind: str):
        folder = parent / kind
        if not folder.exists():
            saved_model(folder, kind)
        return folder

    return make


def opened(folder, stack, rows, **options):
    model = open_streamed(folder, stack, **options)
    shape = cache_shape(model.config, rows, PROMPT + COUNT, model.dtype)
    assert shape is not None
    cache = StackedCache(stack, shape, shape.layers)
    ids = torch.randint(3, 96, (rows, PROMPT + COUNT), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :PROMPT], past_key_values=cache, use_cache=True)
    return model, cache, ids, whole


@pytest.mark.parametrize(
    ("places", "fp4"),  # 9 and more: nothing passes
    [(4, None), pytest.param(5, "nvfp4", marks=pytest.mark.slow), (9, "nvfp4")],
)
def test_steps_are_those_of_the_model(places, fp4, folder_of, make_stack):  # noqa: F811
    stack = make_stack(1 << 20)
    model, cache, ids, whole = opened(folder_of("llama"), stack, 2, fp4=fp4)
    engine = offload_of(model)
    largest = max(group.num_bytes for group in engine.groups)
    engine.weights.rebudget(places * largest)
    used = stack.levels[0].used_bytes - engine.weights.loaded_bytes
    assert reasons_against(model, cache) == []
    step = StreamedStep(model, cache, 2)
    passing = [group for group in engine.groups if group.index not in engine.weights.staying]
    assert bool(passing) == (places < 9)
    assert stack.levels[0].used_bytes - used <= places * largest

    def moved() -> int:
        return sum(link["bytes"] for link in stack.get_stats()["links"] if link["destination"] == stack.levels[0].name)

    for place in range(PROMPT, PROMPT + COUNT):
        before = moved()
        logits = step.step(ids[:, place : place + 1])
        assert moved() - before == sum(group.num_bytes for group in passing)  # once a token, and nothing that stays
        difference = (logits - whole[:, place]).norm()
        assert difference < 1e-5 * whole[:, place].norm()  # fp32, attention's sums in another order
    with pytest.raises(ConfigurationError, match="14 positions are taken"):
        step.step(ids[:, :1])
    cache.close()
    assert stack.levels[0].used_bytes - engine.weights.loaded_bytes <= used
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, whole)  # and its passes go on as before


@pytest.mark.parametrize("fails", ["load", "take", "_bring"])
def test_without_room_nothing_is_kept(fails, folder_of, make_stack, monkeypatch):  # noqa: F811
    stack = make_stack(1 << 20)
    model, cache, ids, whole = opened(folder_of("llama"), stack, 1)
    engine = offload_of(model)
    engine.weights.rebudget(4 * max(group.num_bytes for group in engine.groups))
    engine.weights.drop_all()
    used, calls = stack.levels[0].used_bytes, []
    owner = {"take": engine.storage, "load": engine.weights, "_bring": StreamedStep}[fails]
    plain = getattr(owner, fails)

    def full(*args):
        calls.append(args)
        if fails == "_bring":
            plain(*args)  # copies are under way
        elif "place 1" not in args[0] if fails == "take" else len(calls) < 3:
            return plain(*args)
        raise InsufficientMemory("full", needed_bytes=1, available_bytes=0)

    with monkeypatch.context() as patched:
        patched.setattr(owner, fails, full)
        with pytest.raises(InsufficientMemory):
            StreamedStep(model, cache, 1)
    assert calls
    assert not any(engine.weights.is_pinned(group) for group in engine.groups)
    engine.weights.drop_all()
    assert stack.levels[0].used_bytes == used
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, whole)
    cache.close()


# fp32, and bf16: six layers round some ten times each, as below.
@pytest.mark.parametrize(("form", "off"), [("int8", 1e-5), ("two parts", 2**-3.3)])
def test_steps_over_a_packed_folder(form, off, folder_of, make_stack, tmp_path):  # noqa: F811
    if form == "two parts":
        shapes = {"model.layers.2.mlp.up_proj": (48, 32)}
        assignment = Assignment(dict.fromkeys(shapes, "two-part"), shapes)
        quantize_folder(folder_of("llama"), tmp_path / "packed", assignment=assignment)
    else:
        quantize_folder(folder_of("llama"), tmp_path / "packed", form)
    model, cache, ids, whole = opened(tmp_path / "packed", make_stack(1 << 20), 2)
    step = StreamedStep(model, cache, 2)
    for place in range(PROMPT, PROMPT + COUNT):
        difference = (step.step(ids[:, place : place + 1]) - whole[:, place]).norm()
        assert difference < off * whole[:, place].norm()


def test_what_is_not_taken(folder_of, make_stack):  # noqa: F811
    model, cache, _, _ = opened(folder_of("qwen3"), make_stack(1 << 20), 1)
    assert "model_type is 'qwen3'" in reasons_against(model, cache)[0]
    model, cache, _, _ = opened(folder_of("llama"), make_stack(1 << 20), 1)
    assert reasons_against(model, None) == ["keys and values are not on level 0"]
    assert reasons_against(torch.nn.Linear(2, 2), cache) == ["the model's weights do not stream frozen"]
    assert streamed_step(model, cache, 1, 100) is None  # a CPU gains nothing by it


@torch.no_grad()
def test_texts_are_written_by_steps(folder_of, make_stack, monkeypatch):  # noqa: F811
    model = open_streamed(folder_of("llama"), make_stack(1 << 20))
    ids, made = torch.arange(3, 3 + PROMPT), []
    expected = list(columns(model, [ids.tolist()], 12, Sampling(temperature=0), 0, None))

    def step_of(model, cache, rows, steps):
        made.append(StreamedStep(model, cache, rows))
        return made[-1].step

    monkeypatch.setattr(module, "streamed_step", step_of)
    shape = cache_shape(model.config, 1, PROMPT + 12, torch.float32)
    assert shape is not None
    for read in (4, None):
        cache = StackedCache(offload_of(model).stack, shape, shape.layers)
        assert list(columns(model, [ids.tolist()], 12, Sampling(temperature=0), 0, read, cache)) == expected
        cache.close()
        cache = StackedCache(offload_of(model).stack, shape, shape.layers)
        step = stepper(model, PROMPT + 12, read, cache)
        written = list(draws(step, ids[None], 12, Sampling(temperature=0), 0, ahead=0))
        cache.close()
        assert written == expected
    assert len(made) == 4


def test_neighbours_have_different_places():
    class Numbered:
        def __init__(self, index):
            self.index = index

    for count in range(4, 12):
        slots = module._places([Numbered(index) for index in range(count)])
        assert all(slots[index] != slots[(index + 1) % count] for index in range(count))
        assert set(slots.values()) == {0, 1, 2}


@pytest.mark.gpu
@pytest.mark.parametrize("fp4", [None, "nvfp4"])
@torch.no_grad()
def test_replayed_steps_are_those_of_the_model(fp4, tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, vocab_size=320
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    levels = [{"device": "cuda:0", "capacity_mb": 2048}, {"device": "cpu", "capacity_mb": 256}]
    found = {}
    with VGPUStack({"levels": levels}) as stack:
        model = open_streamed(tmp_path, stack, fp4=fp4)
        engine = offload_of(model)
        largest = max(group.num_bytes for group in engine.groups)
        ids = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(2)).cuda()
        expected = model(ids, use_cache=False).logits[:, 20:].float()
        for places in (5, 100):
            engine.weights.rebudget(places * largest)
            shape = cache_shape(model.config, 2, 60, torch.bfloat16)
            assert shape is not None
            cache = StackedCache(stack, shape, shape.layers)
            model(ids[:, :20], past_key_values=cache, use_cache=True)
            step = streamed_step(model, cache, 2, 40)
            assert step is not None
            logits = [step(ids[:, place : place + 1]).float().clone() for place in range(20, 60)]
            cache.close()
            found[places] = torch.stack(logits, 1)
    assert torch.equal(found[5], found[100])  # the same kernels over the same bytes, wherever those are
    # As in test_steps.py: six layers round some ten times each. No position is off by more than twice what all
    # are.
    off_BS = (found[100] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off_BS.square().mean().sqrt()) < 2**-4.3
    assert float(off_BS.max()) < 2**-3.3
