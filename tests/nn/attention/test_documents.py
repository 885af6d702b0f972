"""Documents that share rows attend as each would alone, and no mask of (S, S) is made for them.

Where there is no GPU `runs_packed` is told that the kernel runs, which is then Triton's interpreter.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from tests.kernels.attention.oracle import DEVICE, gradients, normal, relative
from tests.nn.convert.tiny_models import tiny_model
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.attention import documents as module
from vblackwell.nn.attention.backends import use_dispatcher
from vblackwell.nn.attention.documents import Documents, document_starts, mask_or_documents, within_documents
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import enable_vgpu_stack_optimization, release

ROWS = [[20, 13, 7], [39, 1]]  # tokens of the documents of a row
WIDTH = 40
CONFIG = DecoderConfig(
    vocab_size=20, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=2, num_kv_heads=1, max_position=1024
)


@pytest.fixture
def packed_kernel(monkeypatch) -> list[dict[str, Any]]:
    """`flash_attention_varlen` takes documents on any device; the options of its calls."""
    calls: list[dict[str, Any]] = []
    original = module.op.flash_attention_varlen

    def spied(*tensors, **options):
        calls.append(options)
        return original(*tensors, **options)

    monkeypatch.setattr(module, "runs_packed", lambda device, dtype, head: head <= 256)
    monkeypatch.setattr(module.op, "flash_attention_varlen", spied)
    return calls


def positions_of(rows: list[list[int]] = ROWS) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def random_ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def test_starts_are_of_all_rows_and_launches_repeat():
    starts = document_starts(positions_of() == 0)
    assert starts.dtype == torch.int32 and starts.tolist() == [0, 20, 33, 40, 79] + 12 * [80]
    counts = {count: document_starts(positions_of([count * [2]]) == 0).shape[0] - 1 for count in (1, 2, 16, 17)}
    assert counts == {1: 1, 2: 16, 16: 16, 17: 32}
    one_a_row = torch.arange(5, 45).expand(3, -1)  # which need not begin at 0
    assert document_starts(one_a_row == 0).tolist() == [0, 40, 80, 120]


@pytest.mark.parametrize("window", [None, 5])
def test_documents_against_float64(window, packed_kernel):
    """Output and gradients of grouped heads."""
    positions = positions_of().to(DEVICE)
    documents = Documents(document_starts(positions == 0), lambda: within_documents(positions)[:, None], window)
    tensors = [normal(2, WIDTH, heads, 16, seed=heads).transpose(1, 2) for heads in (4, 2, 2)]

    def packed(q, k, v):
        out = documents.attention(q, k, v, softcap=3.0, scale=0.3)
        assert out is not None
        return out

    def masked(q, k, v):
        left = None if window is None else window - 1
        return attention_reference(q, k, v, mask=documents.mask, left=left, right=0, softcap=3.0, scale=0.3)

    # fp32: sums of some hundred terms, each product and exponential of 2^-23 (tests/kernels/attention/test_op.py)
    for got, exact in zip(gradients(packed, tensors), gradients(masked, tensors, torch.float64), strict=True):
        assert relative(got, exact) <= 2e-6
    assert len(packed_kernel) == 1


def test_what_the_kernel_does_not_take_has_the_mask(packed_kernel):
    positions = positions_of()
    documents = Documents(document_starts(positions == 0), lambda: within_documents(positions))
    q = torch.zeros(2, 1, WIDTH, 264)
    assert documents.attention(q, q, q) is None  # wider heads than any kernel has
    q = torch.zeros(2, 1, WIDTH, 16)
    assert documents.attention(q, q, q[..., :8]) is None
    with use_backend("attention", "math"):
        assert documents.attention(q, q, q) is None
    assert not packed_kernel and documents.mask is documents.mask


class Largest(TorchDispatchMode):
    """The most elements that any operator gave at once."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def decoder_step(model: Decoder, rows: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss and gradients of a batch, and the largest tensor on the way."""
    positions = positions_of(rows).to(DEVICE)
    ids = random_ids(20, *positions.shape).to(DEVICE)
    model.zero_grad()
    with Largest() as largest:
        loss = model(ids, ids.roll(-1, 1), positions, document_starts(positions == 0))
        loss.backward()
    return loss.detach(), [param.grad.cpu() for param in model.parameters()], largest.elements


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_decoder_makes_nothing_of_s_times_s(checkpointing, packed_kernel, monkeypatch):
    """And its loss and gradients are those with the mask."""
    model = Decoder(replace(CONFIG, num_layers=1), seed=3).to(DEVICE)
    model.gradient_checkpointing = checkpointing
    rows, length = [[70, 14, 36]], 120
    loss, gradients, elements = decoder_step(model, rows)
    assert elements < length**2
    assert len(packed_kernel) == 1 + checkpointing
    monkeypatch.setattr(module, "runs_packed", lambda *of: False)
    expected, expected_gradients, elements = decoder_step(model, rows)
    assert elements >= length**2  # the mask is seen
    assert len(packed_kernel) == 1 + checkpointing
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for got, right in zip(gradients, expected_gradients, strict=True):
        assert relative(got, right) <= 1e-5  # fp32, sums in other orders


@pytest.mark.skipif(DEVICE == "cuda", reason="the stack is in RAM; test_level_0_changes_no_bit_on_a_gpu is the same")
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streamed_and_resident_models_have_equal_gradients(checkpointing, packed_kernel, make_stack):  # noqa: F811
    initial = Decoder(replace(CONFIG, num_heads=1), seed=3)
    initial.gradient_checkpointing = checkpointing
    rows = [[12, 7, 1]]
    loss, gradients, _ = decoder_step(copy.deepcopy(initial), rows)
    model = enable_vgpu_stack_optimization(initial, make_stack(1 << 18), placement="streamed")
    streamed_loss, streamed, _ = decoder_step(model, rows)
    assert len(packed_kernel) == 2 * CONFIG.num_layers * (1 + checkpointing)
    release(model)
    assert torch.equal(loss, streamed_loss)
    assert all(torch.equal(got, right) for got, right in zip(streamed, gradients, strict=True))


def model_step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of rows of documents, and gradients."""
    device = model.device
    ids, positions = random_ids(96, 2, WIDTH).to(device), positions_of().to(device)
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (logits * normal(*logits.shape, seed=9).to(logits)).sum().backward()
    return logits.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
@pytest.mark.parametrize(
    ("kind", "layers", "checkpointing"),
    [
        ("gemma2", 2, True),
        *(pytest.param(kind, 2, False, marks=pytest.mark.slow) for kind in ("gpt2", "qwen3", "phimoe")),
    ],
)
def test_models_of_transformers(kind, layers, checkpointing, packed_kernel, monkeypatch):
    """Whole and sliding layers, soft caps, a model that does not tell its attention of its window."""
    sizes = {} if kind in ("gpt2", "phimoe") else {"num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = tiny_model(kind, num_hidden_layers=layers, **sizes).to(DEVICE)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    monkeypatch.setattr(module, "runs_packed", lambda *of: False)
    expected = model_step(model)
    undo = use_dispatcher(model)
    monkeypatch.setattr(module, "runs_packed", lambda *of: True)
    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "sdpa_mask", lambda **asked: pytest.fail("a mask is made"))
        logits, gradients = model_step(model)
    undo()
    # fp32 on both sides, sums in other orders: some 1e-6
    assert relative(logits, expected[0]) <= 1e-5
    assert all(relative(got, right) <= 1e-5 for got, right in zip(gradients, expected[1], strict=True))
    windows = {"gemma2": {8, None}, "phimoe": {8}}.get(kind, {None})
    assert {options["window"] for options in packed_kernel} == windows
    assert len(packed_kernel) == layers * (1 + checkpointing)


def asked(function, **changes: Any) -> dict[str, Any]:
    """What transformers asks for of a batch of `ROWS`."""
    sizes = {"batch_size": 2, "q_length": WIDTH, "kv_length": WIDTH, "q_offset": 0, "kv_offset": 0}
    options = {"attention_mask": None, "allow_is_causal_skip": False, "use_vmap": False, "dtype": torch.float32}
    return {**sizes, "mask_function": function, **options, "device": torch.device("cpu"), **changes}


def packed_function(function):
    positions = positions_of()
    numbers = masking_utils.find_packed_sequence_indices(positions)
    return masking_utils.packed_sequence_compatibility_function(function, positions, numbers)


def test_documents_and_chunks_are_found_by_asking_neighbours(packed_kernel):
    causal, chunks = masking_utils.causal_mask_function, masking_utils.chunked_causal_mask_function
    made = mask_or_documents(**asked(packed_function(causal)))
    assert isinstance(made, Documents) and made.window is None
    assert torch.equal(made.starts, document_starts(positions_of() == 0))
    assert torch.equal(made.mask[:, 0], within_documents(positions_of()))
    made = mask_or_documents(**asked(packed_function(chunks(8, torch.zeros(2, dtype=torch.int64))), local_size=8))
    assert isinstance(made, Documents)
    begins = made.starts[made.starts < 2 * WIDTH].tolist()
    assert begins == [0, 8, 16, 20, 28, 33, 40, 48, 56, 64, 72, 79]


@pytest.mark.parametrize("what", ["padding", "longer keys", "own function", "plain", "blocks", "both ways", "traced"])
def test_other_masks_are_those_of_transformers(what, packed_kernel, monkeypatch):
    function = packed_function(masking_utils.causal_mask_function)
    changes: dict[str, Any] = {}
    if what == "padding":
        changes["attention_mask"] = torch.ones(2, WIDTH, dtype=torch.bool)
    elif what == "longer keys":
        function, changes["kv_length"] = masking_utils.causal_mask_function, WIDTH + 8
    elif what == "own function":
        changes["use_vmap"] = True
    elif what == "plain":
        function, changes["allow_is_causal_skip"] = masking_utils.causal_mask_function, True
    elif what == "blocks":
        blocks = torch.full((2, WIDTH), -1)
        blocks[0, 3:6] = 0
        function = masking_utils.or_masks(function, masking_utils.blockwise_overlay(blocks))
    elif what == "both ways":
        function = masking_utils.bidirectional_mask_function
    elif what == "traced":
        monkeypatch.setattr(module.registry, "computes_at_once", lambda: False)
    made, right = (make(**asked(function, **changes)) for make in (mask_or_documents, masking_utils.sdpa_mask))
    assert (made is right is None) if what == "plain" else torch.equal(made, right)


GPU_ROWS = [[700, 1, 300, 23], [512, 512]]


@pytest.fixture
def deterministic(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, about what it does not trace
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_and_meta_tensors_take_the_mask():
    """Neither can say how many documents there are."""
    model, positions = Decoder(replace(CONFIG, num_layers=1), seed=3), positions_of()
    ids = random_ids(CONFIG.vocab_size, *positions.shape)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, ids, positions), model(ids, ids, positions))
    assert model.to("meta")(ids.to("meta"), ids.to("meta"), positions.to("meta")).shape == ()


def gpu_decoder(**changes: Any) -> Decoder:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 4} | changes
    config = DecoderConfig(vocab_size=20, num_layers=2, max_position=16384, **sizes)
    return Decoder(config, seed=3).to("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_decoder_on_a_gpu(checkpointing, deterministic, monkeypatch):
    """The same as with the mask, from step to step the same bits."""
    model = gpu_decoder()
    model.gradient_checkpointing = checkpointing
    loss, gradients, _ = decoder_step(model, GPU_ROWS)
    again, gradients_again, _ = decoder_step(model, GPU_ROWS)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    monkeypatch.setattr(module, "runs_packed", lambda *of: False)
    expected, expected_gradients, _ = decoder_step(model, GPU_ROWS)
    # bf16 keeps 8 bits, and the kernels add in other orders: a few roundings a layer.
    assert (loss - expected).abs() <= 1e-2 * expected
    assert all(relative(a, b) <= 4e-2 for a, b in zip(gradients, expected_gradients, strict=True))


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_where_starts_are_given():
    model, positions = gpu_decoder(), positions_of(GPU_ROWS)
    starts, ids = document_starts(positions == 0).cuda(), random_ids(20, *positions.shape).cuda()
    positions = positions.cuda()
    expected = model.hidden(ids, None, positions, starts)  # kernels are compiled and loaded
    expected.sum().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        hidden = model.hidden(ids, None, positions, starts)
        hidden.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(hidden, expected) and torch.equal(model.hidden(ids, None, positions), expected)


@pytest.mark.gpu
def test_one_document_a_row_is_plain_causal_attention():
    model, ids = gpu_decoder(), random_ids(20, 2, 300).cuda()
    positions = torch.arange(300, device="cuda").expand(2, -1)
    with torch.no_grad():
        assert torch.equal(model(ids, positions_BS=positions), model(ids))


@pytest.mark.gpu
def test_memory_of_long_rows_holds_no_mask():
    """16k positions: a mask is 256 MiB."""
    model = gpu_decoder(hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1)
    positions = positions_of([32 * [512]])
    starts, ids = document_starts(positions == 0).cuda(), random_ids(20, *positions.shape).cuda()
    positions = positions.cuda()
    model(ids, ids, positions, starts).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(ids, ids, positions, starts).backward()
    # Activations of 16k tokens: 2 MiB in bf16 at a width of 64, some dozens of them; tables of 4 MiB, logits of 1.
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


@pytest.mark.gpu
def test_level_0_changes_no_bit_on_a_gpu(deterministic):
    initial, runs = gpu_decoder().float().cpu(), []
    initial.gradient_checkpointing = True
    for megabytes in (40, 4000):
        stack = VGPUStack(
            {"levels": [{"capacity_mb": megabytes, "device": "cuda:0"}, {"capacity_mb": 512, "device": "cpu"}]}
        )
        with stack:
            model = enable_vgpu_stack_optimization(
                copy.deepcopy(initial), stack, placement="streamed", compute_dtype=torch.bfloat16
            )
            loss, gradients, _ = decoder_step(model, GPU_ROWS)
            runs.append([loss.cpu(), *(each.cpu() for each in gradients)])
            release(model)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "qwen3"])
def test_models_of_transformers_on_a_gpu(kind, monkeypatch):
    """By the rule that ships, against transformers' own attention in float64."""
    model: Any = tiny_model(kind).to("cuda")
    expected = model_step(copy.deepcopy(model).double())
    undo = use_dispatcher(model)
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **asked: pytest.fail("a mask is made"))
    logits, gradients = model_step(model)
    undo()
    # fp32: transformers' own attention is 1e-6 from float64
    assert relative(logits, expected[0]) <= 1e-5
    assert all(relative(got, right) <= 1e-5 for got, right in zip(gradients, expected[1], strict=True))
