"""Two models in one stack: a frozen teacher and the student that learns from it,
bit for bit as both would resident in plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from tests.offload.test_round_trip_models import CONFIGS, same_bits, tokens, written  # noqa: F401 (a fixture)
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_

STEPS, TEMPERATURE, MAX_NORM = 4, 2.0, 1.0
RATES = {"lr": 1e-2, "weight_decay": 0.1}


def loss_of(student, teacher, step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Half of what the teacher says, half of what comes next."""
    torch.manual_seed(step)  # of the student's dropout
    ids_BS = tokens().roll(step, 1).to(device)
    with torch.no_grad():
        wanted_BSV = teacher(input_ids=ids_BS, use_cache=False).logits / TEMPERATURE
    output = student(input_ids=ids_BS, labels=ids_BS, use_cache=False)
    said_BSV = output.logits / TEMPERATURE
    apart = functional.kl_div(said_BSV.log_softmax(-1), wanted_BSV.log_softmax(-1), log_target=True, reduction="none")
    return 0.5 * output.loss + 0.5 * TEMPERATURE**2 * apart.sum(-1).mean()


def small_student(kind: str = "gpt2"):
    """Fewer layers than the teacher; gpt2's has dropout and a tied head."""
    torch.manual_seed(3)
    config = CONFIGS[kind]()
    config.num_hidden_layers = 3
    return AutoModelForCausalLM.from_config(config).train()


def weight_bytes(model) -> int:
    return sum(4 * param.numel() for param in model.parameters())


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_distilling_is_what_it_is_in_plain_torch(in_backward, written, make_stack):  # noqa: F811
    folder = written("llama", num_hidden_layers=6)
    teacher, plain = AutoModelForCausalLM.from_pretrained(folder).eval(), small_student()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **RATES)
    expected, norms = [], []
    for step in range(STEPS):
        loss = loss_of(plain, teacher, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    assert max(norms) > MAX_NORM, "nothing was clipped"

    student = small_student()
    # Level 0 holds neither of them whole; RAM not both with the student's states, so that some of it all is on the
    # disk.
    stack = make_stack(int(0.75 * weight_bytes(student)), host_bytes=weight_bytes(teacher) + 2 * weight_bytes(student))
    streamed = load_causal_lm(folder, stack, "teacher", trainable=False, placement="streamed").eval()
    enable_vgpu_stack_optimization(student, stack, "student", placement="streamed")
    options = {"max_grad_norm": MAX_NORM, "update_in_backward": True} if in_backward else {}
    optimizer = VGPUAdamW(student.parameters(), **RATES, **options)
    for step in range(STEPS):
        loss = loss_of(student, streamed, step)
        assert same_bits(loss.detach(), expected[step])
        loss.backward()
        if not in_backward:
            assert float(clip_grad_norm_(student.parameters(), MAX_NORM)) == norms[step]
        optimizer.step()
        optimizer.zero_grad()
        if in_backward:
            assert float(optimizer.grad_norm) == norms[step]

    engines = offload_of(streamed), offload_of(student)
    assert all(isinstance(engine, Offload) for engine in engines)
    held = engines[0].storage.plan.bytes_by_level()
    assert held["weight"][0] == 0 and sum(held["weight"][1:]) >= weight_bytes(teacher)
    assert not any(sum(row) for kind, row in held.items() if kind not in ("weight", "staging")), (
        "states of what is frozen"
    )
    levels = stack.get_stats()["levels"]
    assert levels[0]["peak_bytes"] <= levels[0]["capacity_bytes"] < weight_bytes(student) < weight_bytes(teacher)
    assert levels[2]["used_bytes"] > 0

    trained, frozen = release(student), release(streamed)
    for name, param in plain.named_parameters():
        assert same_bits(trained.get_parameter(name), param), name
    for name, param in teacher.named_parameters():
        assert same_bits(frozen.get_parameter(name), param), name


def distilled(folder, weight_bytes: str | None, device: str) -> list[torch.Tensor]:
    """Losses, then the student's weights."""
    student = small_student("llama")
    with VGPUStack({"levels": [{"capacity_mb": 64, "device": device}, {"capacity_mb": 64, "device": "cpu"}]}) as stack:
        placed = {"placement": "streamed", "compute_dtype": torch.bfloat16, "weight_bytes": weight_bytes}
        placed["accelerate"] = False  # the student's logits are read next to its loss
        teacher = load_causal_lm(folder, stack, "teacher", trainable=False, **placed).eval()
        enable_vgpu_stack_optimization(student, stack, "student", **placed)
        optimizer = VGPUAdamW(student.parameters(), max_grad_norm=MAX_NORM, update_in_backward=True, **RATES)
        losses = []
        for step in range(STEPS):
            loss = loss_of(student, teacher, step, stack.level0_device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float().cpu())
        release(student)
        release(teacher)
        return [*losses, *(param.detach().float().cpu() for param in student.parameters())]


@pytest.mark.gpu
def test_level0_size_changes_no_bit_on_a_gpu(written, monkeypatch):  # noqa: F811
    """In bf16 with fp32 masters: level 0 keeps a few layers of each model, or both whole."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    folder = written("llama")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            tight, wide = (distilled(folder, room, "cuda:0") for room in ("64KiB", "32MiB"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tight[0] > tight[STEPS - 1]
    assert all(same_bits(one, other) for one, other in zip(tight, wide, strict=True))
