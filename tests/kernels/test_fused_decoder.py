"""The decoder on a GPU, where its fused operators run:
against the plain one on the CPU, against Hugging Face's, and repeated.
"""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(1000, 256, 704, 3, 4, num_kv_heads=2, max_position=128)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1000, (3, 101), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[0, :30] = -100
    return ids[:, :-1], targets


def gradients(model: Decoder, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    model.to(dtype)
    loss = model(*(tensor.to(device) for tensor in batch()))
    loss.backward()
    return [loss.detach().double().cpu(), *(param.grad.double().cpu() for param in model.parameters())]


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fp32_is_the_plain_decoder(checkpointing):
    plain = Decoder(CONFIG, seed=3)
    model = copy.deepcopy(plain).cuda()
    model.gradient_checkpointing, model.loss_chunk_tokens = checkpointing, 64
    # fp32 sums in other orders through three layers, without tf32
    assert max(errors(gradients(model), gradients(plain))) < 1e-4


def test_bf16_is_as_near_to_fp32_as_transformers_is():
    plain = Decoder(CONFIG, seed=3)
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG.to_hf()))
    theirs.load_state_dict(plain.state_dict())
    theirs = theirs.cuda().bfloat16()
    accelerated = copy.deepcopy(theirs)
    accelerate_causal_lm(accelerated)
    ids, targets = (tensor.cuda() for tensor in batch())
    exact = gradients(copy.deepcopy(plain).double())
    found = {"ours": gradients(copy.deepcopy(plain).cuda(), torch.bfloat16)}
    for name, model in (("theirs", theirs), ("accelerated", accelerated)):
        loss = model(input_ids=ids, labels=targets, shift_labels=targets).loss
        loss.backward()
        found[name] = [loss.detach().double().cpu(), *(param.grad.double().cpu() for param in model.parameters())]
    mean = {name: sum(errors(got, exact)) / len(exact) for name, got in found.items()}
    assert 0 < mean["ours"] < 1.1 * mean["theirs"] and 0 < mean["accelerated"] < 1.1 * mean["theirs"], mean


def test_equal_bits_again():
    """On flash attention, whose backward adds in any order only where there is more than one block of keys;
    100 are one.
    """
    runs = []
    for _ in range(2):
        model = Decoder(CONFIG, seed=3).cuda()
        model.gradient_checkpointing = True
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            runs.append(gradients(model, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
