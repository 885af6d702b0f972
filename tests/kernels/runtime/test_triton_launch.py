"""Launching again what was compiled."""

import pytest
import torch

from vblackwell.kernels.runtime import triton_launch
from vblackwell.kernels.runtime.triton_launch import (
    Launch,
    describe,
    described,
    keep,
    kept,
    launch,
    layout,
    queue,
    recall,
    remember,
)


class Compiled:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append((self.name, grid, arguments))


class Kernel:
    """Compiles anew at every launch through it, as Triton does for arguments that it has not seen."""

    def __init__(self):
        self.log, self.compilations = [], 0

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compilations += 1
            self.log.append(("triton", grid, arguments, options))
            return Compiled(self.log, f"compiled {self.compilations}")

        return launch


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(triton_launch, "_launches", {})
    monkeypatch.setattr(triton_launch, "_last", {})


def test_what_was_compiled_for_a_key_is_launched_again():
    kernel, other = Kernel(), Kernel()
    compiled = queue(kernel, (1,), (2, 3, 4), ("a", 5), num_warps=4)
    assert queue(kernel, (1,), (9, 1, 1), ("b", 5), num_warps=4) is compiled is not None
    queue(kernel, (2,), (1, 1, 1), ("c", 6), num_warps=8)
    queue(other, (1,), (1, 1, 1), ("d", 5))
    assert kernel.log == [
        ("triton", (2, 3, 4), ("a", 5), {"num_warps": 4}),
        ("compiled 1", (9, 1, 1), ("b", 5)),
        ("triton", (1, 1, 1), ("c", 6), {"num_warps": 8}),
    ]
    assert other.compilations == 1


def test_the_interpreter_compiles_nothing():
    calls = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(arguments)

    for _ in range(2):
        assert queue(Interpreted(), (), (1, 1, 1), (7,)) is None
    assert calls == [(7,), (7,)] and not triton_launch._compiled


def test_no_more_is_kept_than_fits(monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_KEYS", 3)
    kernel = Kernel()
    for key in range(10):
        queue(kernel, (key,), (1, 1, 1), ())
        assert len(triton_launch._compiled) <= 3


def test_what_launches_alike_have_in_common_is_kept_with_what_was_compiled(monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_KEYS", 3)
    launch = Launch("plan", (None,), (1, 1, 1), (), (), "form")
    keep("forward", (1,), launch, None)  # the interpreter
    assert kept("forward", (1,)) is None
    for number in range(10):
        keep("forward", (number,), launch, "compiled")
        assert kept("forward", (number,)) == launch._replace(compiled="compiled") and kept("dq", (number,)) is None
        assert len(triton_launch._launches) <= 3


def test_launches_of_tensors_alike_are_recalled(monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_KEYS", 3)
    some = (Launch("plan", (None,), (1, 1, 1), (), (), "form", "compiled"),)
    x, y = torch.zeros(8, 16), torch.zeros(4, 16)
    assert recall(("forward",), [x, y]) is None
    remember(("forward",), [x, y], (*some, None))  # the interpreter keeps nothing
    assert recall(("forward",), [x, y]) is None
    remember(("forward",), [x, y], some)
    assert recall(("forward",), [x + 1, y + 1]) == some and recall(("dq",), [x, y]) is None
    shifted = torch.zeros(129)[1:].view(8, 16)  # not at 16 bytes
    for other in (x.half(), torch.zeros(8, 32)[:, ::2], x[:4], shifted, x.to("meta"), x.double()):
        assert recall(("forward",), [other, y]) is None
    remember(("forward",), [shifted, y], some)
    assert recall(("forward",), [shifted, y]) == some and recall(("forward",), [x, y]) is None  # only the last
    for number in range(10):
        remember((number,), [x], some)
        assert recall((number,), [x]) == some and len(triton_launch._last) <= 3


def test_a_descriptor_is_of_the_tensor_at_hand_and_keeps_none_alive():
    class Descriptor:
        def __init__(self, base, shape, strides, block_shape, *layout):
            self.base, self.shape, self.strides, self.rest = base, shape, strides, (block_shape, layout)

    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    made = describe(Descriptor, x, x.stride(), [2, 8], "swizzled")
    assert made.base is None
    first, second = described(made, x), described(made, y)
    assert first.base is x and second.base is y and made.base is None
    assert vars(second) | {"base": None} == vars(made)
    assert made.strides == [8, 1] and made.rest == ([2, 8], ("swizzled",))


def test_a_layout_is_the_type_the_strides_and_the_alignment():
    x = torch.zeros(8, 16)
    assert layout(None) is None and layout(x) == layout(torch.ones(3, 16))
    others = [x.half(), x[:, ::2], torch.zeros(8, 17)[:, :16], torch.zeros(129)[1:].view(8, 16)]
    assert len({layout(each) for each in (x, *others)}) == 5


def test_a_launch_is_compiled_for_its_tensors_numbers_and_warps():
    kernel, x = Kernel(), torch.zeros(16)
    changes = [{}, {"numbers": (4, False)}, {"tensors": (x, None)}, {"tensors": (x, x.half())}, {"warps": 8}]
    for change in changes * 2:
        launch(kernel, (2, 1, 1), **{"tensors": (x, x), "numbers": (3, False), "warps": 4, **change})
    assert kernel.compilations == len(changes)
    assert kernel.log[0] == ("triton", (2, 1, 1), (x, x, 3, False), {"num_warps": 4})
