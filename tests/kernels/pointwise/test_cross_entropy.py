"""Linear layer and cross entropy in one."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, normal, poisoned, relative, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import cross_entropy
from vblackwell.kernels.pointwise.cross_entropy import chunk_tokens_for, linear_cross_entropy, word_parts
from vblackwell.kernels.runtime.registry import use_backend

BACKENDS = ["triton", "torch"]
# tokens, width, vocabulary, tokens of a chunk; 4099 words are more than a program reads at once, and start rows
# unaligned
SHAPES = [(1, 8, 3, 4), (11, 16, 51, 4), (12, 16, 51, 4), (5, 8, 4099, 5)]


def case(tokens: int, width: int, words: int, dtype: torch.dtype, bias: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(words, (tokens,), generator=generator).to(DEVICE)
    if tokens > 3:
        targets[2] = -100
    inputs = [normal(tokens, width, dtype=dtype), normal(words, width, dtype=dtype, seed=1) / width**0.5 * 3, targets]
    return inputs + ([normal(words, dtype=dtype, seed=2)] if bias else [])


def plain(hidden, weight, targets, bias=None, *, reduction="mean", ignore_index=-100):
    """What PyTorch makes of it, with logits whole."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss / (targets != ignore_index).sum() if reduction == "mean" else loss


@pytest.mark.each_pair
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("bias", "reduction"), [(False, "mean"), (True, "sum")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, bias, reduction, dtype, backend):
    inputs = case(*shape[:3], dtype, bias)
    options = {"reduction": reduction}
    fused = lambda *args: linear_cross_entropy(*args, chunk_tokens=shape[3], **options)  # noqa: E731
    with use_backend("cross_entropy", backend), poisoned():
        got, again = results(fused, inputs), results(fused, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    exact = results(lambda *args: plain(*args, **options), inputs, torch.float64)
    theirs = results(lambda *args: plain(*args, **options), inputs)
    for a, b, right in zip(got, theirs, exact, strict=True):
        # Logits are rounded to the compute type here and there, which decides; then gradients once more, where PyTorch
        # keeps fp32 logits.
        assert relative(a, right) <= 1.5 * relative(b, right) + 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
def test_the_last_words_apart(monkeypatch, bias, dtype):
    """As on a GPU, whose products have no wide loads where a vocabulary is no multiple of 8."""
    assert word_parts(64 * 3 + 5, on_gpu=True) == [slice(0, 192), slice(192, 197)]
    for words, on_gpu in ((64 * 3 + 8, True), (63, True), (64 * 3 + 5, False)):
        assert word_parts(words, on_gpu=on_gpu) == [slice(0, words)]
    monkeypatch.setattr(cross_entropy, "word_parts", lambda words, on_gpu: word_parts(words, on_gpu=True))
    test_against_float64((37, 24, 64 * 3 + 5, 16), bias, "mean", dtype, "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("words", [32000, 50257])
def test_full_size(words, dtype):
    test_against_float64((2048, 512, words, 768), True, "mean", dtype, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_counts(backend):
    hidden, weight, targets = case(4, 8, 13, torch.float32)
    inputs = [hidden, weight, torch.full_like(targets, -100)]
    with use_backend("cross_entropy", backend), poisoned():
        loss, *gradients = results(lambda *args: linear_cross_entropy(*args, chunk_tokens=3), inputs)
        empty, *nothing = results(linear_cross_entropy, [hidden[:0], weight, targets[:0]])
    assert loss == 0 and empty == 0
    assert all(gradient.count_nonzero() == 0 for gradient in (*gradients, *nothing))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", [13, -1, 1 << 40])
def test_a_target_that_is_no_word_is_no_number(target, backend):
    inputs = case(4, 8, 13, torch.float32)
    inputs[2][1] = target
    with use_backend("cross_entropy", backend):
        assert linear_cross_entropy(*inputs).isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignore_index_and_leading_shape(backend):
    hidden, weight, targets = case(12, 8, 13, torch.float32)
    targets[2] = 7
    with use_backend("cross_entropy", backend):
        got = linear_cross_entropy(hidden.view(2, 6, 8), weight, targets.view(2, 6), ignore_index=7, chunk_tokens=5)
    # a dozen terms of order 1, added in another order
    torch.testing.assert_close(got, plain(hidden, weight, targets, ignore_index=7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_logits(backend):
    """Logits of thousands: the loss is finite, and the gradient is that of an arg max."""
    weight = torch.tensor([[3e4], [-3e4], [2.9e4]], device=DEVICE)
    inputs = [torch.ones(2, 1, device=DEVICE), weight, torch.tensor([0, 1], device=DEVICE)]
    with use_backend("cross_entropy", backend):
        loss, dhidden, dweight = results(lambda *args: linear_cross_entropy(*args, reduction="sum"), inputs)
    assert loss == 6e4 and torch.equal(dweight[:, 0].cpu(), torch.tensor([1.0, -1.0, 0.0]))
    assert torch.equal(dhidden[:, 0].cpu(), torch.tensor([0.0, 6e4]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_fp16_beyond_its_range_have_a_finite_mean(backend):
    """The gradients' sums are some 80,000, more than fp16 has; their means are PyTorch's."""
    hidden, weight = torch.full((600, 2), 200.0, device=DEVICE), torch.zeros(3, 2, device=DEVICE)
    inputs = [hidden.half(), weight.half(), torch.zeros(600, dtype=torch.long, device=DEVICE), weight[:, 0].half()]
    with use_backend("cross_entropy", backend):
        got = results(lambda *args: linear_cross_entropy(*args, chunk_tokens=256), inputs)
    exact = results(plain, inputs, torch.float64)
    for a, b in zip(got, exact, strict=True):
        assert relative(a, b) <= 2 * TOLERANCE[torch.float16] and a.dtype in (torch.float16, torch.float32)


def test_small_gradients_of_fp16_survive_under_a_loss_scale():
    """512 tokens of 4099 words: a probability by the number of tokens is some 5e-7, of which fp16 has only the first
    bits.
    """
    inputs, scale = case(512, 8, 4099, torch.float16), 2.0**12
    with use_backend("cross_entropy", "torch"):
        got = results(lambda *args: linear_cross_entropy(*args, chunk_tokens=256) * scale, inputs)
    exact = results(lambda *args: plain(*args) * scale, inputs, torch.float64)
    for a, b in zip(got, exact, strict=True):
        assert relative(a, b) <= 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("scale", [1.0, 2.0**11, 2.0**16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 29.85, 200.0])
@pytest.mark.parametrize("tokens", [7, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fp16_gradients_are_finite_wherever_those_of_pytorch_are(reduction, tokens, magnitude, scale):
    """The mean, and as transformers' losses have it the sum by a number of tokens that the caller gives.

    4096 hidden states of 29.85 are the known case: dW sums to more than fp16 has, and its mean is 20.
    """
    hidden, weight, targets, bias = case(tokens, 8, 3, torch.float16, bias=True)
    inputs = [(magnitude * (1 + hidden / 16)).half(), weight / 5000, targets.zero_(), bias * 0]
    count = tokens if reduction == "sum" else 1
    with use_backend("cross_entropy", "torch"):
        got = results(
            lambda *args: linear_cross_entropy(*args, chunk_tokens=512, reduction=reduction) / count * scale, inputs
        )
    theirs = results(lambda *args: plain(*args) * scale, inputs)
    exact = results(lambda *args: plain(*args) * scale, inputs, torch.float64)
    for a, b, right in zip(got, theirs, exact, strict=True):
        assert a[b.isfinite()].isfinite().all()
        if b.isfinite().all():
            assert relative(a, right) <= 1.5 * relative(b, right) + 2 * TOLERANCE[torch.float16]
    if (tokens, magnitude, scale) == (4096, 29.85, 1.0):
        assert (exact[2] * tokens).abs().max() > torch.finfo(torch.float16).max


def test_pytorchs_grad_scaler_takes_the_steps_that_it_takes_without_us():
    """fp32 parameters under autocast; at a scale of 65,536 dW is infinite for PyTorch, too: 19.9 * 2048 is the first
    that fits.
    """
    hidden, weight, targets = case(4096, 8, 3, torch.float32)
    hidden, targets = 29.85 * (1 + hidden / 64), targets.zero_()

    def train(loss_of):
        parameter = torch.nn.Parameter(torch.zeros_like(weight))
        optimizer, scaler = torch.optim.SGD([parameter], 1e-3), torch.amp.GradScaler(DEVICE, init_scale=2.0**16)
        scales, losses = [], []
        for _ in range(9):
            with torch.autocast(DEVICE, torch.float16):
                loss = loss_of(hidden, parameter, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        return scales, losses, parameter.detach()

    with use_backend("cross_entropy", "torch"):
        scales, losses, found = train(linear_cross_entropy)
    their_scales, their_losses, expected = train(plain)
    assert scales == their_scales == [2.0**15, 2.0**14, 2.0**13, 2.0**12, *[2.0**11] * 5]
    assert losses == pytest.approx(their_losses, rel=1e-3) and losses[-1] < losses[0] / 2
    assert relative(found, expected) <= 4 * TOLERANCE[torch.float16]


def test_the_incoming_gradient_is_not_rounded():
    """A factor that bf16 does not have: the gradient is scaled by it and rounded once."""
    hidden, weight, targets = case(9, 8, 13, torch.bfloat16)
    inputs = [hidden, weight, targets]
    one = results(lambda *args: linear_cross_entropy(*args, reduction="sum"), inputs)
    third = results(lambda *args: linear_cross_entropy(*args, reduction="sum") * (1 / 3), inputs)
    for a, b in zip(one[1:], third[1:], strict=True):
        assert torch.equal((a.float() * torch.tensor(1 / 3)).bfloat16(), b)


def test_backward_twice_and_gradients_in_the_saved_memory():
    hidden, weight, targets = case(9, 8, 13, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets) * 3
    kept = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    last = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(kept, last, strict=True))
    addresses: list[int] = []

    def pack(tensor):
        addresses.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert weight.grad.data_ptr() in addresses  # neither copied for the scaling nor by the accumulation


@pytest.mark.parametrize("frozen", ["hidden", "weight", "all"])
def test_gradients_that_nobody_wants(frozen):
    hidden, weight, targets = case(5, 8, 13, torch.float32)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_cross_entropy(hidden, weight, targets)
    expected = plain(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert loss.requires_grad == (frozen != "all")
    if frozen != "all":
        loss.backward()
        got = hidden.grad if frozen == "weight" else weight.grad
        hidden.grad = weight.grad = None
        expected.backward()
        # sums of a few terms in another order
        torch.testing.assert_close(got, hidden.grad if frozen == "weight" else weight.grad, rtol=1e-5, atol=1e-7)


def test_under_autocast_it_computes_as_a_linear_does():
    hidden, weight, targets = case(9, 8, 13, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    narrow = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    assert loss.dtype == torch.float32 and torch.equal(loss, narrow)
    assert weight.grad.dtype == torch.float32 and hidden.grad.dtype == torch.float32


def test_nothing_like_the_logits_is_kept_or_made():
    hidden, weight, targets = case(64, 8, 400, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    kept: list[int] = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    assert sorted(kept)[-2:] == [hidden.numel(), weight.numel()]
    assert chunk_tokens_for(128_000, 2) == 1024 and chunk_tokens_for(10**9, 2) == 256
    whole_bytes = 64 * 400 * 4
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
        # all that there was at once: the gradients of hidden states and weight, a chunk of logits, and blocks of 512
        # bytes for the rest
        assert 0 < torch.cuda.max_memory_allocated() - before < whole_bytes / 2
    else:
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
        assert 0 < max(event.cpu_memory_usage for event in profile.events()) < whole_bytes / 2


def test_opcheck_and_compile():
    hidden, weight, targets = case(6, 8, 13, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    args = (hidden, weight, None, targets, -100, 4, True, True, False)
    torch.library.opcheck(torch.ops.vblackwell.linear_cross_entropy, args)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    got = torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"reduction": "none"}, "mean"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"targets": torch.zeros(3)}, "belong"),
        ({"targets": torch.zeros(5)}, "word numbers"),
        ({"bias_V": torch.zeros(4)}, "bias"),
        ({"weight_VD": torch.zeros(13, 8, dtype=torch.bfloat16)}, "one floating-point type"),
    ],
)
def test_refusals(change, match):
    hidden, weight, targets = (tensor.cpu() for tensor in case(5, 8, 13, torch.float32))
    given = {"hidden": hidden, "weight_VD": weight, "targets": targets, **change}
    with pytest.raises(ConfigurationError, match=match):
        linear_cross_entropy(**given)
