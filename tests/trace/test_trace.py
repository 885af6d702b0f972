"""What a traced step allocates, against counts by hand and against a real run on the CPU."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.rates import PRODUCT_SHARE, assumed_rates
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.trace.causal_lm import language_batch
from vblackwell.trace.cuda_on_meta import cuda_on_meta
from vblackwell.trace.trace import (
    Trace,
    Untraceable,
    trace_forward,
    trace_training,
)
from vblackwell.trace.work import KERNEL, TORCH_MODULE, Work, phase_seconds
from vblackwell.trace.workspace import CUBLAS_BYTES, CUBLASLT_BYTES, reduction_bytes

F32 = 4


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def rows(width: int = 32, count: int = 16):
    return lambda: torch.zeros(count, width, device="cuda")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def peak(trace: Trace, without_cublas: bool = True) -> int:
    """Most bytes alive at once, cuBLAS's workspaces left out."""
    live = most = 0
    for event in trace.events:
        size = trace.sizes[event if event >= 0 else ~event]
        if without_cublas and size in (CUBLAS_BYTES[False], CUBLASLT_BYTES):
            continue
        live += size if event >= 0 else -size
        most = max(most, live)
    return most


class RealBytes(TorchDispatchMode):
    """Bytes of storages that a run on the CPU holds, now and at most."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.most = 0
        for tensor in held:
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.known:
            return
        pointer, size = storage.data_ptr(), storage.nbytes()
        self.known.add(pointer)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.forget, pointer, size)

    def forget(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        return out


def test_peak_is_that_of_a_real_run():
    """Operators that are the same on every device: the peak must be the same byte for byte."""
    trace = trace_training(mlp(), rows(), square, sgd)
    model = mlp()
    optimizer = sgd(model.parameters())
    real = RealBytes(list(model.parameters()))
    with real:
        for _ in range(2):
            loss = square(model, torch.zeros(16, 32))
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    assert peak(trace) == real.most


def test_categories_by_hand():
    trace = trace_training(mlp(), rows(), square, lambda p: torch.optim.AdamW(p, foreach=False, fused=False))
    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    assert trace.num_parameters == trace.trainable == parameters
    assert trace.total("weights") == F32 * parameters
    assert trace.total("gradients") == 2 * F32 * parameters  # made anew in each of two steps
    assert trace.total("optimizer") == 2 * F32 * parameters  # the step counters are on the CPU
    # Kept by autograd until backward: the input, relu's and tanh's results.
    assert trace.total("activations") == 2 * F32 * 16 * (32 + 64 + 64)


def test_events_are_balanced():
    trace = trace_training(mlp(), rows(), square, sgd)
    born, dead = [e for e in trace.events if e >= 0], [~e for e in trace.events if e < 0]
    assert born == list(range(len(trace.sizes))) and len(set(dead)) == len(dead) <= len(born)
    left = set(born) - set(dead)
    assert {trace.categories[i] for i in left} == {"weights", "workspace"}
    kept = {trace.sizes[i] for i in left if trace.categories[i] == "workspace"}
    assert kept == {CUBLAS_BYTES[False], CUBLASLT_BYTES}


def test_fused_optimizer_keeps_its_counter_on_the_gpu_and_foreach_takes_temporaries():
    fused = trace_training(mlp(), rows(), square, lambda p: torch.optim.AdamW(p, fused=True))
    each = trace_training(mlp(), rows(), square, lambda p: torch.optim.AdamW(p))
    assert fused.total("optimizer") == each.total("optimizer") + 6 * F32
    assert peak(each) > peak(fused)


class Attention(nn.Module):
    """Just attention; with torch's own formula it would keep S x S probabilities."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 512, 3, 4, 16).permute(2, 0, 3, 1, 4)
        assert x.is_cuda and x.device.type == "cuda"
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_keeps_no_square(dtype):
    trace = trace_training(
        Attention(dtype), lambda: torch.zeros(2, 512, 64, dtype=dtype, device="cuda"), square, None, steps=1
    )
    square_bytes = 2 * 4 * 512 * 512 * dtype.itemsize
    assert max(s for s, of in zip(trace.sizes, trace.categories, strict=True) if of != "workspace") < square_bytes / 4


@pytest.mark.parametrize("recompute", [False, True])
def test_our_decoder_takes_its_fused_kernels(recompute):
    """As on a GPU of that capability, also where torch has no CUDA:
    norms keep a scale a row, loss and head a chunk of logits.
    """
    config = DecoderConfig(512, 64, 192, 2, 4, max_position=64)
    model = Decoder(config, device="meta", dtype=torch.bfloat16).train()
    model.gradient_checkpointing = recompute
    loss = lambda model, batch: model(batch["input_ids"], batch["labels"])  # noqa: E731
    make = language_batch(512, 4, 64)
    trace, older = (
        trace_training(model, make, loss, None, steps=1, capability=each) for each in ((9, 0), (7, 5))
    )  # Triton's kernels need 8.0
    rows, bf16 = 4 * 64, 2
    # Four norms and the last keep fp32 scales; unfused they keep fp32 copies of the rows.
    assert trace.total("activations") + trace.total("logits_and_loss") < older.total("activations")
    temporary = {trace.sizes[i] for i, of in enumerate(trace.categories) if of == "workspace"}
    assert rows * 512 * bf16 + 4 * rows in temporary  # logits and a loss a row
    # Under a checkpoint backward makes the normed input, gate, up and the product anew; else forward makes the product.
    inner = rows * ((64 + 3 * 192) * bf16 + 4) if recompute else rows * 192 * bf16
    assert inner in temporary


def test_autocast_reaches_attention_from_any_caller():
    """By torch's own name in another module, as transformers does:
    fp32 queries are cast, and so is what attention keeps.
    """

    class Calls(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).float().view(2, 512, 3, 4, 16).permute(2, 0, 3, 1, 4)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert out.dtype == torch.bfloat16
            return out

    make = lambda: torch.zeros(2, 512, 64, device="cuda")  # noqa: E731
    trace = trace_training(Calls(torch.float32), make, square, None, steps=1, autocast=torch.bfloat16)
    assert trace.total("activations") > 0


@pytest.mark.parametrize(
    ("reduced", "kept", "num_bytes"),
    [
        (4096, 4096, 134_217_728), (16384, 4096, 138_412_032), (16384, 2048, 138_412_032), (16384, 1000, 131_072_000),
        (4096, 1000, 32_768_000), (2048, 1024, 16_777_216), (512, 4096, 0),
    ],
)  # fmt: skip
def test_a_biases_gradient_takes_what_an_h200_was_seen_to_allocate(reduced, kept, num_bytes):
    assert reduction_bytes(reduced, kept, 132) == num_bytes


def test_wide_softmax_keeps_no_wide_copy_of_its_input():
    """bf16 scores, asked for in fp32 or under autocast: the result is wide, the gradient narrow."""
    scores = nn.Linear(64, 4096, bias=False, dtype=torch.bfloat16)
    wide, narrow = 4 * 512 * 4096, 2 * 512 * 4096
    make = lambda: torch.zeros(512, 64, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    trace = trace_training(
        scores, make, lambda m, b: functional.softmax(m(b), -1, dtype=torch.float32)[0, 0], None, steps=1
    )
    assert trace.sizes.count(narrow) == 2  # the scores and their gradient
    trained = nn.Linear(64, 4096, bias=False)
    target = lambda: torch.zeros(512, dtype=torch.int64, device="cuda")  # noqa: E731
    loss = lambda m, b: functional.cross_entropy(m(b.float()), target())  # noqa: E731
    trace = trace_training(trained, make, loss, None, steps=1, autocast=torch.bfloat16)
    # Logits, log-probabilities and the gradients of both are narrow; what the loss reads of the latter is wide, as is
    # its gradient.
    assert trace.sizes.count(narrow) == 4 and trace.sizes.count(wide) == 2


def test_a_mask_without_dense_rows_takes_the_unfused_attention():
    class Biased(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).view(2, 512, 3, 4, 16).permute(2, 0, 3, 1, 4)
            bias = torch.zeros(512, 512, 4, device="cuda").permute(2, 0, 1)[None]
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias if self.strided else bias.contiguous()
            )

    make = lambda: torch.zeros(2, 512, 64, device="cuda")  # noqa: E731
    peaks = []
    for strided in (False, True):
        model = Biased(torch.float32)
        model.strided = strided
        peaks.append(peak(trace_training(model, make, square, None, steps=1)))
    assert peaks[1] - peaks[0] > 2 * 2 * 4 * 512 * 512 * F32


def test_the_work_of_a_linear_by_hand():
    model = nn.Linear(64, 128, bias=False)
    trace = trace_training(model, rows(64, 32), lambda m, b: m(b).sum(), sgd)
    product = 2 * 32 * 64 * 128
    assert (
        sum(each.flops for each in trace.work) == 2 * product
    )  # output and the weight's gradient; the input needs none
    forward = next(each for each in trace.work if each.flops)
    assert forward.num_bytes == F32 * (32 * 64 + 64 * 128 + 32 * 128) and forward.width == 4
    update = sum(each.num_bytes for each in trace.work if each.phase == "optimizer")
    assert update >= 4 * F32 * 64 * 128  # momentum read and written, gradient read, weight written, at least
    rates = assumed_rates(find_gpu("H200"))
    slow = replace(rates, matmul_fp32=1.0)
    assert phase_seconds(trace.work, slow)["loss"] == pytest.approx(product / PRODUCT_SHARE, rel=0.01)
    issued = replace(rates, issue_seconds=1.0)
    # A call of a torch module; forward and backward: views of the weight and products; and what the step's loss and
    # update take.
    calls = [each for each in trace.work if each.kind == "host" and each.issues == TORCH_MODULE]
    assert len(calls) == 1 and calls[0].phase == "forward"
    total = sum(each.issues for each in trace.work)
    assert sum(phase_seconds(trace.work, issued).values()) == pytest.approx(total)
    assert 5 * KERNEL < total < 30


def test_a_step_takes_the_longer_of_the_gpu_s_time_and_the_host_s():
    rates = replace(assumed_rates(find_gpu("H200")), issue_seconds=1e-5, matmul_half=1e12, matmul_fp32=1e12)
    work = (
        Work("forward", 1e9, 0, 2, issues=1.0),  # 1.2 ms on the GPU, 10 us on the host
        Work("backward", 0.0, 0, 2, issues=50.0),  # the other way round
    )
    assert sum(phase_seconds(work, rates).values()) == pytest.approx(1e-3 / PRODUCT_SHARE, rel=0.01)
    assert phase_seconds(work, replace(rates, issue_seconds=1e-3)) == pytest.approx({"forward": 1e-3, "backward": 0.05})
    both = phase_seconds(work, rates, waits=True)  # on a CPU, which is the host
    assert both == pytest.approx({"forward": 1e-3 / PRODUCT_SHARE + 1e-5, "backward": 5e-4}, rel=0.01)


def test_convolutions_of_fp32_are_computed_in_tf32_where_there_is_one():
    model = nn.Conv2d(16, 16, 3, bias=False)
    make = lambda: torch.zeros(1, 16, 16, 16, device="cuda")  # noqa: E731
    kinds = [
        {
            each.kind
            for each in trace_training(model, make, lambda m, b: m(b).sum(), None, capability=of, steps=1).work
            if each.flops
        }
        for of in ((7, 0), (9, 0))
    ]
    assert kinds == [{""}, {"tf32"}]


def test_dropout_keeps_a_byte_an_element():
    model = nn.Sequential(nn.Linear(32, 1024), nn.Dropout(0.1))
    trace = trace_training(model, rows(), square, None, steps=1)
    assert 16 * 1024 in trace.sizes


class Blocks(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(6))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_checkpointing_keeps_inputs_alone(autocast):
    plain = trace_training(Blocks(False), rows(), square, None, steps=1, autocast=autocast)
    again = trace_training(Blocks(True), rows(), square, None, steps=1, autocast=autocast)
    wide = 16 * 256 * (2 if autocast else 4)
    assert sum(size == wide for size in again.sizes) > sum(size == wide for size in plain.sizes)
    assert again.total("activations") < plain.total("activations") / 4


class Doubled(torch.autograd.Function):
    """Saves its result, as BLOOM's GELU does: from Python, where tensors say that they are on CUDA."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        out = 2 * x
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.is_cuda and ctx.saved_tensors[0].is_cuda, "a kernel's backward would take another path"
        return 2 * gradient


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_repeats_is_what_the_forward_did(reentrant):
    """Functions that a checkpointed function calls itself, outside of any module, as OPT's layers do:
    again the CUDA path.
    """

    class Direct(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return functional.dropout(Doubled.apply(super().forward(input)), 0.1)

    class Model(nn.Module):
        def __init__(self, through_module: bool) -> None:
            super().__init__()
            self.first, self.layer, self.through_module = nn.Linear(32, 32), Direct(32, 1024), through_module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                self.layer if self.through_module else self.layer.forward, self.first(x), use_reentrant=reentrant
            )

    direct, called = (trace_training(Model(each), rows(), square, None, steps=1) for each in (False, True))
    assert (direct.sizes, direct.events) == (called.sizes, called.events)
    masks = [size for size in direct.sizes if size == 16 * 1024]
    assert len(masks) == 2, "a byte an element, in forward and again"


def test_autocast_casts_each_weight_once_a_step():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(self.linear(x))
            assert y.dtype == torch.bfloat16 and functional.softmax(y, -1).dtype == torch.float32
            return y

    trace = trace_training(Twice(), rows(64, 48), square, None, steps=1, autocast=torch.bfloat16)
    forward_ends = next(index for index, _, phase in trace.marks if phase == "loss_backward")
    casts = [e for e in trace.events[:forward_ends] if e >= 0 and trace.sizes[e] == 2 * 64 * 64]
    assert len(casts) == 1


def test_a_model_with_nothing_to_train_says_so():
    with pytest.raises(
        ConfigurationError, match=r"all of its 6 parameters are frozen .*requires_grad_\(True\).*--lora 16"
    ):
        trace_training(mlp().requires_grad_(False), lambda: torch.ones(2, 32), square, None)


def test_tied_weights_count_once_and_frozen_ones_have_no_gradient():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 16)
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 100, bias=False)
            self.head.weight = self.embedding.weight
            self.body.requires_grad_(False)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(
                self.head(self.body(self.embedding(input_ids))).flatten(0, 1), labels.flatten()
            )

    trace = trace_training(Tied(), language_batch(100, 2, 8), lambda m, b: m(**b), sgd)
    assert trace.num_parameters == 1600 + 272 and trace.trainable == 1600
    assert trace.total("gradients") == 2 * F32 * 1600
    assert trace.total("logits_and_loss") >= 2 * 2 * F32 * 16 * 100  # logits and their gradient, twice


def test_what_reads_values_is_refused():
    class Branches(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    with pytest.raises(Untraceable, match=r"Branches cannot be traced .* phase 'forward'.*Tensor\.item"):
        trace_training(Branches(32, 32), rows(), square, sgd)


def test_the_model_is_left_alone():
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace_training(model, rows(), square, sgd)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model[0]._forward_pre_hooks


def test_nothing_of_the_disguise_remains():
    names = (
        functional.scaled_dot_product_attention,
        torch.cuda.get_device_capability,
        torch.is_autocast_enabled,
        nn.Module.__call__,
        torch.autograd._engine_run_backward,
    )
    with cuda_on_meta():
        assert torch.zeros(2, device="cuda:0").to("cuda").is_cuda
    assert names == (
        functional.scaled_dot_product_attention,
        torch.cuda.get_device_capability,
        torch.is_autocast_enabled,
        nn.Module.__call__,
        torch.autograd._engine_run_backward,
    )
    assert torch.zeros(2, device="meta").is_meta


def test_flex_attention_is_refused():
    """Uncompiled, which is all that runs without bytes, it keeps squares of the sequence that a run never has."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention").train()
    with pytest.raises(Unsupported, match="attn_implementation='sdpa'"):
        trace_training(model, language_batch(64, 2, 256), lambda m, b: m(**b).loss, None, steps=1)


def test_a_packed_linear_multiplies_as_a_plain_one_does():
    """Operations, the packed bytes that are read,
    and the weight that is written out for a gradient or for many rows.
    """
    from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear

    plain = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    stored = StoredFP4Linear(plain, tiled=True)

    def make(count: int) -> torch.Tensor:
        return torch.zeros(count, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    plain.requires_grad_(False)
    written_out = 2 * 256 * 512
    for count, outs in ((16, 1), (1024, 2)):
        found, truth = (
            trace_training(m, lambda count=count: make(count), lambda m, b: m(b).sum(), None, steps=1)
            for m in (stored, plain)
        )
        assert sum(each.flops for each in found.work) == sum(each.flops for each in truth.work) == 4 * count * 256 * 512
        assert found.sizes.count(written_out) == outs
    packed = sum(p.numel() for p in stored.parameters())
    work = trace_forward(stored, lambda: make(1), lambda m, b: m(b), (8, 0))
    made, product = work  # the batch is made in the trace
    assert made.num_bytes == 2 * 256 and product.flops == 2 * 256 * 512
    assert product.num_bytes == packed + 2 * (256 + 512) and packed < written_out * 0.3


@pytest.mark.parametrize("used", [1, 2, 3])
def test_gradients_of_a_value_that_is_used_again_are_added_where_the_first_one_lies(used):
    """As on a GPU: apart from the value's own gradient no sum takes memory."""

    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 1024, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return sum(((number + 2) * y).sum() for number in range(used))

    trace = trace_training(Used(), lambda: torch.zeros(512, 64, device="cuda"), lambda m, b: m(b), None, steps=1)
    born = trace.sizes.count(4 * 512 * 1024)
    assert born == 1 + 2 * used  # the value, its multiples, and their gradients: the sums are in place


def test_a_model_s_head_costs_no_forward():
    """Steps alone are run, and every model of the same modules has the same phases."""
    calls = []

    class Counted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, width), nn.Linear(width, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return self.head(torch.relu(self.first(x)))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    phases = []
    for width in (8, 24):
        trace = trace_training(Counted(width), rows(16, 4), loss, sgd)
        phases.append([(step, phase) for _, step, phase in trace.marks])
    assert len(calls) == 2 + 2 and phases[0] == phases[1] and (0, "loss") in phases[0]
