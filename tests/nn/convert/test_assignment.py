"""Precision per layer: what is measured, chosen, kept in a file and refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.nn.convert.assignment import (
    BITS,
    Assignment,
    Sensitivity,
    apply_assignment,
    assign_precision,
    choose,
    measure_sensitivity,
)
from vblackwell.nn.linear.two_part import VBOptimizedLinear


def _bytes(precision: str, shape: tuple[int, int]) -> float:
    return BITS[precision] * shape[0] * shape[1] / 8


class Words(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.first, self.second, self.third = nn.Linear(32, width), nn.Linear(width, width), nn.Linear(width, 32)
        self.lm_head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(x + self.third(functional.gelu(self.second(functional.gelu(self.first(x))))) * 3)


def batches_of(count: int = 2):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 50, (4, 17), generator=generator) for _ in range(count)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]


def loss_of(model, batches):
    return sum(float(functional.cross_entropy(model(i).flatten(0, 1).detach(), t.flatten())) for i, t in batches) / len(
        batches
    )


def test_sensitivity_is_the_divergence_of_each_layer_alone_and_leaves_the_model_alone():
    model, batches = Words(), batches_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure_sensitivity(model, batches)
    assert list(found.divergence) == ["first", "second", "third"] and found.loss == pytest.approx(
        loss_of(model, batches), rel=1e-5
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for row in found.divergence.values():
        assert row["bf16"] == 0 < 20 * row["two-part"] < row["nvfp4"]  # 21 dB apart: a hundredth, roughly
    changed = Words()
    apply_assignment(changed, Assignment({"first": "nvfp4"}, {"first": (32, 32)}), "inference")
    with torch.no_grad():
        predicted = [[m(i).log_softmax(-1) for m in (changed, model)] for i, _ in batches]
    kl = [functional.kl_div(ours, theirs, log_target=True, reduction="none") for ours, theirs in predicted]
    assert found.divergence["first"]["nvfp4"] == pytest.approx(float(torch.stack(kl).sum(-1).mean()), rel=0.01)


def test_what_a_model_drops_is_not_counted():
    model, batches = Words(), batches_of()
    expected = measure_sensitivity(model, batches)
    dropping = nn.Dropout(0.5)
    model.second.register_forward_pre_hook(lambda _, x: (dropping(x[0]),))
    model.dropping, model.first.training = dropping, False
    assert measure_sensitivity(model, batches, pattern="first|third").divergence == {
        name: expected.divergence[name] for name in ("first", "third")
    }
    assert dropping.training and model.second.training and not model.first.training


def test_the_choice_is_the_cheapest_of_all():
    """Against all 81 choices: within one layer's step of the least bytes, never beyond the budget."""
    generator = torch.Generator().manual_seed(3)
    shapes = {name: (32 * 2**i, 64) for i, name in enumerate("abcd")}
    draw = torch.rand(4, generator=generator).tolist()
    rows = {name: {"nvfp4": d, "two-part": d / 100, "bf16": 0.0} for name, d in zip(shapes, draw, strict=True)}
    measured = Sensitivity(1.0, shapes, rows)
    for allowed in (0.0, 0.01, 0.3, 0.9, 9.0):
        chosen = choose(measured, allowed)
        assert sum(rows[name][p] for name, p in chosen.items()) <= allowed + 1e-12
        ours = sum(_bytes(p, shapes[name]) for name, p in chosen.items())
        best = math.inf
        for number in range(81):
            tried = {name: ("nvfp4", "two-part", "bf16")[number // 3**i % 3] for i, name in enumerate(shapes)}
            if sum(rows[name][p] for name, p in tried.items()) <= allowed:
                best = min(best, sum(_bytes(p, shapes[name]) for name, p in tried.items()))
        assert ours - best <= max(_bytes("bf16", s) - _bytes("nvfp4", s) for s in shapes.values())
    full = choose(measured, math.inf, max_bits=6.0)
    assert 5.0 < Assignment(full, shapes).bits <= 6.0


def test_a_budget_is_kept_and_the_file_brings_the_choice_back(tmp_path):
    model, batches = Words(), batches_of()
    found = assign_precision(model, batches, 0.002)
    assert found.measured["loss_after"] <= found.measured["loss"] * 1.002
    found.save(tmp_path / "a.json")
    with pytest.raises(DiskError, match=r"writing .*a\.json/b\.json failed"):
        found.save(tmp_path / "a.json" / "b.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(DiskError, match=r"writing .*taken failed"):
        found.save(tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "taken"], "half a file was left"
    again = Assignment.load(tmp_path / "a.json")
    assert again == found and again.bits == found.bits
    replaced = apply_assignment(model, again, "inference")
    assert replaced == [name for name, p in found.precisions.items() if p != "bf16"]
    with torch.no_grad():
        assert loss_of(model, batches) == pytest.approx(found.measured["loss_after"], rel=1e-4)
    assert assign_precision(Words(), batches, max_bits=4.5).bits == 4.5
    assert set(assign_precision(Words(), batches, 0.0).precisions.values()) == {"bf16"}


def test_an_assignment_trains():
    model = Words()
    shapes = {"first": (32, 32), "second": (32, 32)}
    apply_assignment(model, Assignment({"first": "nvfp4", "second": "two-part"}, shapes), "training")
    assert [type(module) for module in (model.first, model.third)] == [VBOptimizedLinear, nn.Linear]
    ids, targets = batches_of(1)[0]
    functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_refused(tmp_path):
    model, batches = Words(), batches_of(1)
    kinds = [type(module) for module in model.modules()]
    other = Assignment({"first": "nvfp4", "second": "nvfp4"}, {"first": (32, 32), "second": (64, 64)})
    with pytest.raises(ConfigurationError, match="another model than Words: 1 of its 2 linears"):
        apply_assignment(model, other)
    with pytest.raises(ConfigurationError, match="mode"):
        apply_assignment(model, Assignment({"first": "nvfp4"}, {"first": (32, 32)}), "fast")
    assert [type(module) for module in model.modules()] == kinds  # nothing half-replaced
    for empty in ([], [(batches[0][0], torch.full((4, 16), -100))]):
        with pytest.raises(ConfigurationError, match="calibration data is empty"):
            assign_precision(model, empty)
    for arguments in ({"budget": -1.0}, {"budget": math.nan}, {"max_bits": 3.0}):
        with pytest.raises(ConfigurationError, match="budget|max_bits"):
            assign_precision(model, batches, **arguments)
    with torch.no_grad():
        model.second.weight[0, 0] = math.nan
    with pytest.raises(ConfigurationError, match="loss is nan"):
        assign_precision(model, batches)
    (tmp_path / "torn.json").write_text('{"version": 1, "linears"')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "wrong.json").write_text(
        json.dumps({"version": 1, "measured": {}, "linears": {"a": {"precision": "nvfp4"}}})
    )
    for name in ("torn", "list", "wrong"):
        with pytest.raises(CorruptData, match="no assignment"):
            Assignment.load(tmp_path / f"{name}.json")
    (tmp_path / "new.json").write_text('{"version": 9}')
    (tmp_path / "bits.json").write_text(
        json.dumps({"version": 1, "measured": {}, "linears": {"a": {"precision": "int2", "shape": [1, 1]}}})
    )
    for name in ("new", "bits", "missing"):
        with pytest.raises(ConfigurationError):
            Assignment.load(tmp_path / f"{name}.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, "/dev/full is no file"), ("[" * 100_000, "is no assignment of precisions: .*recursion")],
    ids=["device", "nested"],
)
def test_a_device_and_nested_lists_are_refused(text, part, tmp_path):
    path = Path("/dev/full") if text is None else tmp_path / "assignment.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ConfigurationError, CorruptData), match=part):
        Assignment.load(path)


def test_vb_train_takes_the_file(tmp_path):
    from vblackwell.train.config import TrainConfig
    from vblackwell.train.model import TrainableModel, convert_linears

    Assignment({"first": "two-part", "second": "nvfp4"}, {"first": (32, 32), "second": (32, 32)}).save(
        tmp_path / "a.json"
    )
    model, said = Words(), []
    config = TrainConfig(assignment=str(tmp_path / "a.json"))
    convert_linears(config, TrainableModel(model, {}, (1, 1, 1)), torch.device("cpu"), said.append)
    assert isinstance(model.second, VBOptimizedLinear) and "1 in two-part" in said[0] and "6.50 bits" in said[0]
    with pytest.raises(ConfigurationError, match="--assignment"):
        TrainConfig(assignment="a.json", use_fp4=True)
