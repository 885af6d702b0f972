"""`model_plan`: what a user reads of a model's place in its stack; `prepare`: all three in one call; and which batches
a cap of the process refuses.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections import defaultdict

import psutil
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import vblackwell as vb
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, restore_causal_lm
from vblackwell.nn.convert.training import checkpoint_layers
from vblackwell.nn.decoder.decoder import Decoder, DecoderConfig
from vblackwell.offload.api import enable_vgpu_stack_optimization, model_plan, offload_of, release
from vblackwell.offload.batch_check import BatchCheck
from vblackwell.offload.parameters import SiteHook
from vblackwell.planner.forecast import ANY_RATES, Forecast, Machine
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.placement import Bounds, Choice
from vblackwell.trace.causal_lm import language_batch
from vblackwell.train.auto import spec_of

_, DECODER, GPT2, *_ = CASES
LEVEL0 = 128 << 10


def test_a_streamed_model_tells_its_shares(make_stack: MakeStack):
    model = build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", update=0.4)
    found = offload_of(model).summary()
    lines = model_plan(model).splitlines()
    assert lines[0].startswith(f"streamed: {found['groups']} layer groups") and lines[1].endswith("in RAM")
    assert lines[3].endswith("% of the parameters in fast memory, others on the CPU")
    assert 0.5 < int(lines[3].split("AdamW: ")[1].split("%")[0]) / 100 < 0.75  # whole groups of 0.6
    assert lines[4] == "inputs of checkpoints wait in fast memory"
    release(model)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", activations="host")
    assert model_plan(model).splitlines()[3:] == ["AdamW: on the CPU", "inputs of checkpoints wait in RAM"]
    with pytest.raises(ConfigurationError, match="is in no stack: enable_vgpu_stack_optimization"):
        model_plan(release(model))


@pytest.mark.parametrize("update", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("host", "device")), 0.4])
def test_a_plan_says_how_much_waits_for_the_step(update: str | float):
    """From the optimizer on, and steps leave it as it was; less where RAM has less room for the way back."""
    shares = list[int]()
    for host_bytes in (8 << 20, 700 << 10):
        model, levels = (
            build(DECODER),
            [{"capacity_mb": size / 2**20, "device": "cpu"} for size in (LEVEL0, host_bytes)],
        )
        stack = VGPUStack({"levels": levels})
        enable_vgpu_stack_optimization(model, stack, placement="streamed", update=update)
        assert "step()" not in model_plan(model)
        optimizer = vb.VGPUAdamW(model.parameters(), max_grad_norm=1e9, update_in_backward=True)
        said = model_plan(model).splitlines()
        (line,) = (line for line in said if "before step()" in line)
        shares.append(int(line.split("%")[0]))
        assert line.endswith("before step()" if shares[-1] == 100 else "step(), the others after it")
        for step in range(2):
            DECODER.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert set(said) <= set(model_plan(model).splitlines())
        release(model)
        stack.close()
    assert shares[0] == 100 > shares[1] > 0


def test_a_plan_says_nothing_of_updates_that_wait_for_a_scale(make_stack: MakeStack):
    model = build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed")
    optimizer = vb.VGPUAdamW(model.parameters(), update_in_backward=True, loss_scale=1024.0)
    assert "before step()" not in model_plan(model)
    optimizer.loss_scale = 1.0
    assert "100% of the parameters are updated before step()" in model_plan(model)


def test_a_resident_model_says_whose_operators_it_has(make_stack: MakeStack):
    model = build(GPT2)
    enable_vgpu_stack_optimization(model, make_stack(64 << 20), accelerate=True, compute_dtype=torch.bfloat16)
    first, held, operators = model_plan(model).splitlines()
    assert first.startswith("resident: ") and held.endswith(" in fast memory")
    assert operators == "operators of accelerate_causal_lm, until release"


def trained(model, optimizer, case, steps=3, micro_batches=1):
    """Train in place, and release: weights by name, bit for bit, and the norms of all steps."""
    norms = []
    for step in range(steps):
        for part in range(micro_batches):
            (case.loss(model, step * micro_batches + part) / micro_batches).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    vb.release(model)
    return {name: param.detach().clone() for name, param in model.named_parameters()}, norms


@pytest.mark.each_value
@pytest.mark.parametrize("level0", [LEVEL0, 64 << 20], ids=["streamed", "resident"])
@pytest.mark.parametrize(("dtype", "micro_batches"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)])
def test_one_call_trains_as_the_three_do(dtype, micro_batches, level0, make_stack: MakeStack, monkeypatch):
    """Bit for bit, twice in one process: the second begins where the first has given everything back."""
    stacks = [make_stack(level0) for _ in range(3)]
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "max_grad_norm": 0.5}
    settings["accumulation_steps"] = micro_batches
    model = build(DECODER).to(dtype)
    enable_vgpu_stack_optimization(model, stacks[0])
    optimizer = vb.VGPUAdamW(model.parameters(), update_in_backward=True, **settings)
    wanted, norms = trained(model, optimizer, DECODER, micro_batches=micro_batches)
    assert max(norms) > 0.5, "nothing was clipped"
    monkeypatch.setattr("vblackwell.offload.prepare.create_vgpu_stack", lambda: stacks.pop(1))
    for _ in range(2):
        given = build(DECODER).to(dtype)
        model, optimizer = vb.prepare(given, **settings)
        assert model is given and optimizer.update_in_backward and optimizer.undo
        found, again = trained(model, optimizer, DECODER, micro_batches=micro_batches)
        assert again == norms and list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(stacks) == 1


def test_what_was_prepared_is_given_back():
    """Memory, file, threads and stack, of runs on a stack of this machine; the optimizer goes on without it."""

    def run():
        model, optimizer = vb.prepare(build(DECODER), max_grad_norm=1.0)
        stack = weakref.ref(vb.offload_of(model).stack)
        for _ in range(2):
            DECODER.loss(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert vb.release(model) is model and vb.offload_of(model) is None
        DECODER.loss(model, 0).backward()  # a plain module, and its optimizer has the moments
        optimizer.step()
        return stack

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), psutil.Process().memory_info().rss

    run()
    files, threads, resident = held()
    stacks = [run() for _ in range(3)]
    after = held()
    # Threads that other tests left may end meanwhile.
    assert after[0] == files and after[1] <= threads and after[2] < resident + (16 << 20), (
        files,
        threads,
        resident,
        after,
    )
    assert not any(stack() for stack in stacks)


def test_a_stack_that_was_given_stays_open(make_stack: MakeStack):
    stack = make_stack(64 << 20)
    (one, _), (other, _) = (vb.prepare(build(DECODER), stack=stack) for _ in range(2))
    assert [vb.offload_of(model).name for model in (one, other)] == ["model", "model-2"]
    with pytest.raises(KeyClash, match="'model-2'"):
        vb.prepare(build(DECODER), stack=stack, name="model-2")
    vb.release(one)
    _, optimizer = vb.prepare(one, stack=stack)
    assert vb.offload_of(one).name == "model" and optimizer.max_grad_norm is None
    for model in (one, other):
        vb.release(model)
    stack.register("still", torch.ones(1))


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"lr": -1.0}, ConfigurationError, "lr -1.0 is not a learning rate"),
        ({"betas": (0.9, 2.0)}, ConfigurationError, "Invalid beta parameter at index 1"),
        ({"max_grad_norm": 0.0}, ConfigurationError, "max_grad_norm 0.0 must be > 0"),
        ({"accumulation_steps": 0}, ConfigurationError, "accumulation_steps 0"),
        ({"accumulation_steps": 1.5}, ConfigurationError, "accumulation_steps 1.5 must be a whole number"),
        ({"betas": 0.9}, ConfigurationError, r"betas=0.9 is no pair: give two numbers, e.g. \(0.9, 0.999\)"),
        ({"betas": (0.9, None)}, ConfigurationError, r"betas\[1\]=None is no number"),
        ({"lr": "a"}, ConfigurationError, "lr='a' is no number"),
        ({"max_grad_norm": "1"}, ConfigurationError, "max_grad_norm='1' is no number"),
        ({"host_bytes": 4096}, InsufficientMemory, "MiB|KiB"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(settings, kind, said, make_stack: MakeStack):
    model = build(DECODER).to(torch.bfloat16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    stack = make_stack(LEVEL0, host_bytes=settings.pop("host_bytes", 1 << 20), disk_bytes=4096)
    with pytest.raises(kind, match=said):
        vb.prepare(model, stack=stack, **settings)
    assert vb.offload_of(model) is None and not any(level.used_bytes for level in stack.levels)
    after = dict(model.named_parameters())
    assert all(after[name].dtype == kept.dtype and torch.equal(after[name], kept) for name, kept in before.items())


def test_no_room_for_the_states_leaves_the_model_as_it_was(make_stack: MakeStack, monkeypatch):
    model = build(DECODER).to(torch.bfloat16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}

    def adopt(self, groups):
        raise InsufficientMemory("no room")

    with monkeypatch.context() as lacking:
        lacking.setattr(vb.VGPUAdamW, "_adopt", adopt)
        lacking.setattr("vblackwell.offload.prepare._check", lambda settings: None)
        with pytest.raises(InsufficientMemory, match="no room"):
            vb.prepare(model, stack=make_stack(LEVEL0))
    after = dict(model.named_parameters())
    assert all(after[name].dtype == kept.dtype and torch.equal(after[name], kept) for name, kept in before.items())


def test_a_frozen_model_and_one_of_fp16():
    """Which is trained with a scaled loss: its gradients are no gradients before the step."""
    with pytest.raises(ConfigurationError, match="Decoder has nothing to train"):
        vb.prepare(build(DECODER).requires_grad_(False))
    model, optimizer = vb.prepare(build(DECODER).half())
    assert not optimizer.update_in_backward
    vb.release(model)


# -- batches under a cap -----------------------------------------------------------------------------------------------

TOO_SMALL = 40 << 20  # of which a step of `rows(64)` takes more, and one of a few rows less


def rows(count: int, length: int = 64) -> torch.Tensor:
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(count))


LAYERS = {"llama": {"num_hidden_layers": 6}, "gpt2": {"n_layer": 6}}


def capped_model(make_stack: MakeStack, monkeypatch, kind: str = "llama", cap: int = TOO_SMALL, **options):
    """A causal model, streamed on a device of which the process may take ``cap`` bytes."""
    monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: cap)
    torch.manual_seed(0)
    if kind == "decoder":
        model: torch.nn.Module = Decoder(DecoderConfig(96, 32, 48, num_layers=6, num_heads=4, max_position=64))
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**LAYERS.get(kind, LAYERS["llama"])))
    enable_vgpu_stack_optimization(model.train(), make_stack(LEVEL0), placement="streamed", **options)
    return model


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Decoder):
        return model(tokens, tokens)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize(("kind", "accelerate"), [("llama", True), ("gpt2", False), ("decoder", False)])
def test_a_batch_is_refused_before_its_forward(kind: str, accelerate: bool, make_stack: MakeStack, monkeypatch):
    """With what fits, which trains to the bits of a run without a cap; nothing has changed in between."""
    outcomes = []
    for cap in (None, TOO_SMALL):
        model = capped_model(make_stack, monkeypatch, kind, cap, accelerate=accelerate)
        optimizer, reached = vb.VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5), list[torch.nn.Module]()
        noted = SiteHook(lambda module, _, reached=reached: reached.append(module))
        next(model.children()).register_forward_pre_hook(noted)
        if cap is not None:
            state = torch.get_rng_state()
            for _ in range(2):
                with pytest.raises(InsufficientMemory, match="64 sequences of 64 tokens are too many") as refused:
                    loss_of(model, rows(64))
            assert not reached and torch.equal(torch.get_rng_state(), state)
            error = refused.value
            assert 0.9 * error.needed_bytes > error.available_bytes == TOO_SMALL
            assert "caps this process at 40.0 MiB: give at most" in str(error)
            most = int(str(error).split("at most ")[1].split()[0])
            assert 1 <= most < 64 and "gradient checkpointing" in str(error)
            loss_of(model, rows(most)).backward()
            optimizer.zero_grad()
        losses = []
        for step in range(2):
            torch.manual_seed(step)  # of dropout
            loss = loss_of(model, rows(1 + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        vb.release(model)
        outcomes.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        loss_of(model, rows(64))  # which is nobody's to refuse any more
    (wanted, weights), (found, others) = outcomes
    assert found == wanted and all(torch.equal(others[name], weights[name]) for name in weights)


def test_a_batch_is_traced_once_for_each_that_is_larger(make_stack: MakeStack, monkeypatch):
    model, traced = capped_model(make_stack, monkeypatch, cap=1 << 40), list[tuple[int, ...]]()

    def noted(vocab_size: int, *batch: int):
        traced.append(batch)
        return language_batch(vocab_size, *batch)

    monkeypatch.setattr("vblackwell.offload.batch_check.language_batch", noted)
    for count, length in ((2, 16), (2, 16), (1, 8), (2, 12), (3, 16), (1, 32), (3, 16)):
        loss_of(model, rows(count, length)).backward()
    assert traced == [(2, 16), (3, 16), (1, 32)]
    model.eval()
    loss_of(model, rows(8))
    with torch.no_grad():
        loss_of(model.train(), rows(8))
    with torch.autograd.graph.save_on_cpu():
        loss_of(model, rows(8))
    with FlopCounterMode(display=False):
        loss_of(model, rows(8))
    assert len(traced) == 3
    vars(model.model)["forward"] = model.model.forward
    loss_of(model, rows(8))
    del vars(model.model)["forward"]
    assert len(traced) == 3
    loss_of(copy.deepcopy(model), rows(8))
    assert len(traced) == 3
    loss_of(model, rows(8))
    assert traced[3:] == [(8, 64)]


@pytest.fixture
def needs(monkeypatch) -> list[tuple[int, int]]:
    """What each trace says of a batch, as long as nothing is refused."""
    found, needed = list[tuple[int, int]](), BatchCheck._needed

    def noted(self, *args):
        found.append(needed(self, *args))
        return found[-1]

    monkeypatch.setattr(BatchCheck, "_needed", noted)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_batch_takes_what_a_plan_says(checkpointing: bool, make_stack: MakeStack, monkeypatch, needs):
    """To the byte, and a step without labels no more than one with them. Seen is what comes late: that layers are
    computed again, and which parameters are trained. What takes little more than the cap is not refused.
    """
    model = capped_model(make_stack, monkeypatch, cap=1 << 40, accelerate=False, activations="host")
    plain = AutoModelForCausalLM.from_config(CONFIGS["llama"](num_hidden_layers=6)).train()

    def planned(count: int) -> int:
        run = Run(spec_of(plain, "llama"), 64, precision="fp32", checkpointing=checkpointing)
        forecast = Forecast(run, Machine(Bounds(1 << 40, 1 << 40), ANY_RATES))
        choice = Choice("streamed", count, 1, checkpointing, activations="host" if checkpointing else "level0")
        return forecast.step_bytes(choice, forecast.trace(checkpointing, count))

    if checkpointing:
        checkpoint_layers(model)
    loss_of(model, rows(4)).backward()
    held, step = needs.pop()
    assert step == planned(4) and 0 < held <= offload_of(model).stack.levels[0].capacity_bytes
    model(input_ids=rows(4), use_cache=False).logits.sum().backward()
    assert needs.pop()[1] <= step
    if not checkpointing:  # else transformers lets the embeddings' output want a gradient, by a hook that is not seen
        before = planned(5)
        for each in (model, plain):
            for param in list(each.parameters())[:-4]:
                param.requires_grad_(False)
        loss_of(model, rows(5)).backward()
        assert needs.pop()[1] == planned(5) < before
    monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: int(0.92 * (held + planned(6))))
    loss_of(model, rows(6)).backward()
    assert sum(needs.pop()) > 0.92 * (held + planned(6))


@pytest.mark.parametrize("placement", ["streamed", "resident"])
def test_dropout_is_seen_that_began_after_the_stack_had_the_model(placement: str, monkeypatch, needs):
    """In both placements; a resident model's gradients are part of its step."""
    for began in (True, False):
        stack = VGPUStack({"levels": [{"capacity_mb": 8, "device": "cpu"}, {"capacity_mb": 8, "device": "cpu"}]})
        monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: 1 << 40)
        model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).train(began)
        enable_vgpu_stack_optimization(model, stack, placement=placement, accelerate=False)
        loss_of(model.train(), rows(4)).backward()
        gradients = sum(4 * param.numel() for param in model.parameters())
        vb.release(model)
        stack.close()
    assert needs[0] == needs[1] and needs[0][1] > gradients * (placement == "resident")


def test_nothing_is_refused_that_nobody_caps_or_knows(make_stack: MakeStack, monkeypatch):
    """A model of the user's own, whose step may be anything; and a process that may take all there is."""
    monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: 1)
    own = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    enable_vgpu_stack_optimization(own, make_stack(LEVEL0), placement="streamed")
    own(torch.ones(2, 8)).sum().backward()
    monkeypatch.undo()
    assert BatchCheck.of(build(DECODER), torch.device("cpu"), None) is None


def test_a_check_that_fails_ends_no_training_and_says_so(make_stack: MakeStack, monkeypatch):
    model = capped_model(make_stack, monkeypatch, cap=1)

    def fails(*args):
        raise ValueError("odd")

    with monkeypatch.context() as patched:
        patched.setattr("vblackwell.offload.batch_check.language_batch", fails)
        with pytest.warns(RuntimeWarning, match="4 sequences of 64 tokens fit .* was not found out: ValueError: odd"):
            loss_of(model, rows(4)).backward()
    loss_of(model, rows(4)).backward()  # asked about once
    with pytest.raises(InsufficientMemory):
        loss_of(model, rows(5))


def test_a_frozen_model_is_called_as_ever(make_stack: MakeStack, monkeypatch, needs):
    model = capped_model(make_stack, monkeypatch, cap=1)
    model.requires_grad_(False)
    assert loss_of(model, rows(4)).isfinite() and not needs


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_no_code_of_a_user_runs_in_a_trace(make_stack: MakeStack, monkeypatch, needs):
    """What it does besides computing would be done twice, with tensors that have no values, and it may take less."""
    model, called = capped_model(make_stack, monkeypatch, cap=1), list[object]()
    original = model.loss_function

    def own(logits, *args, **kwargs):
        called.append(logits.device)
        return original(logits, *args, **kwargs)

    model.loss_function = own
    loss_of(model, rows(4))
    assert called == [torch.device("cpu")]
    del vars(model)["_loss_function"]
    with model.lm_head.register_forward_pre_hook(lambda module, args: (args[0][:, -1:],)):
        model(input_ids=rows(4), use_cache=False)
    with model.register_forward_pre_hook(lambda module, args, given: (args, {"input_ids": rows(1)}), with_kwargs=True):
        model(input_ids=rows(4), use_cache=False)
    head, model.lm_head.__class__ = type(model.lm_head), Scaled
    loss_of(model, rows(4))
    model.lm_head.__class__ = head
    with Watching():
        loss_of(model, rows(4))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss_of(model, rows(4))
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda self, input_ids, **_: self.model(input_ids=input_ids))
        model(input_ids=rows(4))
    assert not needs
    with pytest.raises(InsufficientMemory):
        loss_of(model, rows(4))


class OddTensor(torch.Tensor):
    pass


@pytest.mark.parametrize("odd", ["lock", "itself", "subclass", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_cannot_be_copied_is_not_checked(odd: str, make_stack: MakeStack, monkeypatch, needs):
    monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: 1)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).train()
    if odd == "lock":
        model.notes = defaultdict(threading.Lock, {"a": threading.Lock()})
    elif odd == "itself":
        model.notes = []
        model.notes.append(model.notes)
    elif odd == "subclass":
        model.lm_head.register_buffer("notes", torch.ones(3).as_subclass(OddTensor), persistent=False)
    else:
        model.notes = torch.eye(4).to_sparse_csr()
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed")
    assert loss_of(model, rows(4)).isfinite() and not needs


def test_nothing_is_said_of_a_forward_that_may_take_less(make_stack: MakeStack, monkeypatch, needs):
    """Than tokens and labels alone do."""
    model, tokens = capped_model(make_stack, monkeypatch, cap=1), rows(4)
    model(input_ids=tokens, logits_to_keep=1)
    model(tokens, None, None, None, None, tokens)
    model(inputs_embeds=torch.ones(2, 8, 32))
    loss_with = {"attention_mask": torch.ones_like(tokens), "labels": tokens}
    model(input_ids=tokens, **loss_with)  # whose queries are grouped, in fp32
    assert not needs
    vb.release(model)
    model = capped_model(make_stack, monkeypatch, "gpt2", cap=1)
    with pytest.raises(InsufficientMemory):
        model(input_ids=tokens, **loss_with)
    assert needs


def test_loops_that_look_for_a_batch_that_fits_find_one(make_stack: MakeStack, monkeypatch):
    """As transformers' auto_find_batch_size, and whatever catches torch's own error."""
    model = capped_model(make_stack, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        loss_of(model, rows(64))
    assert should_reduce_batch_size(refused.value)


def test_the_cap_is_that_of_the_forward(make_stack: MakeStack, monkeypatch):
    """Stacks that are opened later add theirs, and one that is closed caps nothing."""
    model = capped_model(make_stack, monkeypatch)
    with pytest.raises(InsufficientMemory):
        loss_of(model, rows(64))
    for cap in (1 << 40, None):
        monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device, cap=cap: cap)
        loss_of(model, rows(64))
        loss_of(model, rows(65))


def test_a_loss_in_chunks_takes_what_its_chunks_do(make_stack: MakeStack, monkeypatch, needs):
    """As the model computes it now: by chunks of a stated size, or otherwise again."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](num_hidden_layers=6, vocab_size=20000)).train()
    monkeypatch.setattr("vblackwell.offload.batch_check.process_cap", lambda device: 1 << 40)
    enable_vgpu_stack_optimization(model, make_stack(8 << 20, 64 << 20), placement="streamed")
    steps = []
    for size, how in enumerate(({"loss": False}, {"chunk_tokens": 16}, {"chunk_tokens": 1024})):
        accelerate_causal_lm(model, **how)
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, rows(16 + size))
        restore_causal_lm(model)
        steps.append(needs.pop()[1])
    assert steps[0] > steps[2] > 2 * steps[1]
