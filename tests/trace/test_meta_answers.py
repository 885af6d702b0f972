"""Remembered answers of operators against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vblackwell.trace.recorder as recording
from tests.planner.test_memory_estimate import trace_of
from vblackwell.trace.meta_answers import MetaAnswers

aten = torch.ops.aten


class Asking(MetaAnswers):
    """Every operator runs, and nothing of it is known again."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "optimizer", "autocast"),
    [("llama", "adamw", torch.bfloat16), ("mixtral", "adamw-fused", None), ("gpt2", "adafactor", None)],
)
def test_a_trace_is_the_same(monkeypatch, kind, optimizer, autocast):
    found = trace_of(kind, optimizer=optimizer, autocast=autocast)
    monkeypatch.setattr(recording, "MetaAnswers", Asking)
    assert trace_of(kind, optimizer=optimizer, autocast=autocast) == found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def twice(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    answers = MetaAnswers()
    return answers.call(answers.of(func), args, kwargs), answers.call(answers.of(func), args, kwargs)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.Tensor, (meta(3, 1), meta(1, 4, dtype=torch.bfloat16))),
        (aten.mm.default, (meta(3, 5), meta(7, 5).t())),
        (aten.clone.default, (meta(4, 6).t(),)),
        (aten.cat.default, ([meta(2, 3), meta(5, 3)],)),
        (aten.native_layer_norm.default, (meta(2, 3, 8), [8], meta(8), None, 1e-5)),
        (aten.var_mean.correction, (meta(6, 7), [0])),
    ],
)
def test_remembered_answers_are_new_tensors_of_the_same_form(func, args):
    answers = MetaAnswers()
    first, second = answers.call(answers.of(func), args, {}), answers.call(answers.of(func), args, {})
    expected = func(*args)
    for one, two, truth in zip(
        *(x if isinstance(x, (list, tuple)) else [x] for x in (first, second, expected)), strict=True
    ):
        assert one is not two and one.untyped_storage()._cdata != two.untyped_storage()._cdata
        for each in (one, two):
            assert (each.shape, each.stride(), each.dtype, each.device) == (
                truth.shape,
                truth.stride(),
                truth.dtype,
                truth.device,
            )
            assert each.untyped_storage().nbytes() == truth.untyped_storage().nbytes()
    assert answers.known is not None and answers.known.recipe is not None


def test_views_stay_views_and_in_place_gives_the_same_tensor():
    x = meta(4, 6)
    for view in twice(aten.view.default, x, [24]):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    for same in twice(aten.mul_.Tensor, x, meta(6)):
        assert same is x
    assert twice(aten._foreach_add_.Scalar, [x], 1.0) == (None, None)
    twice(aten.t_.default, x)
    assert x.shape == (4, 6)  # turned twice, for real


def test_what_has_bytes_is_computed():
    x = torch.zeros(3)
    twice(aten.add_.Tensor, x, torch.ones(3))
    twice(aten._foreach_add_.Scalar, [x], 1.0)
    assert x.tolist() == [4.0] * 3
    one, two = twice(aten.add.Tensor, x, x)
    assert one.tolist() == two.tolist() == [8.0] * 3


def test_plain_arguments_of_other_types_are_other_questions():
    x, answers = meta(3, dtype=torch.int64), MetaAnswers()
    assert answers.call(answers.of(aten.mul.Scalar), (x, 1), {}).dtype == torch.int64
    assert answers.call(answers.of(aten.mul.Scalar), (x, 1.0), {}).dtype == torch.float32


def test_a_question_that_fails_fails_again():
    answers = MetaAnswers()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim|cannot be multiplied"):
            answers.call(answers.of(aten.mm.default), (meta(3, 4), meta(5, 6)), {})
