"""One answer for equal layers, and none for those that only look equal."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from vblackwell.nn.convert.alike import Answers


class Layer(nn.Module):
    def __init__(self, number: int, scale: float = 1.0, width: int = 4) -> None:
        super().__init__()
        self.layer_idx, self.scale, self.sizes = number, scale, {"widths": [width]}
        self.linear = nn.Linear(width, width)


def by_scale(layer: Any) -> str:
    return f"scale {layer.scale}"


def by_place(layer: Any) -> str:
    try:
        return "odd" if layer.layer_idx % 2 else "even"
    except Exception:  # as a probe, which takes what a foreign forward raises for a reason
        return "refused"


def test_equal_layers_are_asked_about_once_and_others_for_themselves():
    asked = []
    layers = [Layer(0), Layer(1), Layer(2, scale=2.0), Layer(3, width=8), Layer(4)]

    def question(layer: Any) -> str:
        asked.append(layer)
        return by_scale(layer)

    answers = Answers()
    assert [answers.of(question, layer) for layer in layers] == [by_scale(layer) for layer in layers]
    assert len(asked) == 3 and all(each.linear is layer.linear for each, layer in zip(asked, layers[:1], strict=False))


def test_whoever_asks_for_the_place_gets_an_answer_for_each():
    answers, layers = Answers(), [Layer(number) for number in range(3)]
    assert [answers.of(by_place, layer) for layer in layers] == ["even", "odd", "even"]
    assert [layer.layer_idx for layer in layers] == [0, 1, 2]


@pytest.mark.parametrize("change", ["training", "hook", "buffer", "object", "dtype"])
def test_what_may_change_an_answer_makes_another_form(change):
    first, other = Layer(0), Layer(1)
    if change == "training":
        other.eval()
    elif change == "hook":
        other.linear.register_forward_hook(lambda *args: None)
    elif change == "buffer":
        other.register_buffer("table", first.linear.bias.detach())
    elif change == "object":
        first.rule, other.rule = object(), object()  # type: ignore[assignment]
    else:
        other.half()
    asked, answers = [], Answers()
    for layer in (first, other):
        answers.of(asked.append, layer)
    assert len(asked) == 2
