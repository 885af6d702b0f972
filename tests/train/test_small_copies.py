"""Tokens to the device and losses from it."""

import pytest
import torch

from vblackwell.train.trainer import send, send_back

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_arrives_is_what_was_sent(device: str):
    target = torch.device(device, 0) if device == "cuda" else torch.device(device)
    tokens = [torch.randint(0, 1000, (4, 128)) for _ in range(20)]
    sent = [send(each, target) for each in tokens]
    assert all(torch.equal(each().cpu(), expected) for each, expected in zip(sent, tokens, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_late_number_is_that_of_its_moment(device: str):
    value = torch.tensor(1.5, device=device)
    read = send_back(value * 2)
    value.fill_(7.0)
    assert read() == read() == 3.0


@pytest.mark.gpu
def test_reading_does_not_wait_for_later_work():
    value = torch.tensor(1.0, device="cuda")
    read = send_back(value)
    later = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    later.record()
    assert read() == 1.0 and not later.query()
    torch.cuda.synchronize()
