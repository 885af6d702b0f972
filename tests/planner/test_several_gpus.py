"""Divided layers against layers that are divided, chains against all chains, pipelines and stages against slow ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.planner.test_estimate import SMALL
from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.parallel.collectives import Cost, Link, cost_of, grid_of
from vblackwell.planner.parallel.layers import Layer, Size, legal_degree, linear_layers, undivided, with_heads
from vblackwell.planner.parallel.plan import ParallelPlan
from vblackwell.planner.parallel.strategies import (
    Unit,
    Workload,
    flow_seconds,
    layer_cost,
    stages_of,
    strategies,
)
from vblackwell.trace.causal_lm import build_causal_lm, language_loss, plain_batches

FAST = Link(0.0, 1e18)
BYTES_ONLY = Link(0.0, 1e9)


def workload(layers: tuple[Layer, ...] = (), units: tuple[Unit, ...] = (), **more) -> Workload:
    compute = sum(unit.forward + unit.backward for unit in units) or 1.0
    fields = {
        "parameters": sum(layer.elements for layer in layers) or 1, "tokens": 64, "width": 2, "products": compute,
        "others": 0.0,
        "optimizer": 0.0, "state_bytes": 16000, "activation_bytes": 100, "boundary_bytes": 1000,
    }  # fmt: skip
    return Workload(layers, units, **(fields | more))


def layer(taken: int, made: int, joined: bool = False, rows: int = 64) -> Layer:
    return Layer(f"{taken}to{made}", rows, taken, (made,), joined)


# -- a divided layer, carried out --------------------------------------------------------------------------------------


class Ledger:
    """Collectives on lists of tensors, one a GPU, that add up what they cost."""

    def __init__(self, width: int) -> None:
        self.width, self.spent = width, Cost()

    def all_reduce(self, parts: list[Tensor]) -> list[Tensor]:
        return self._each("all_reduce", [sum(parts[1:], start=parts[0])] * len(parts))

    def all_gather(self, parts: list[Tensor]) -> list[Tensor]:
        return self._each("all_gather", [torch.cat(parts, dim=1)] * len(parts))

    def reduce_scatter(self, parts: list[Tensor]) -> list[Tensor]:
        whole = sum(parts[1:], start=parts[0])
        self._each("reduce_scatter", [whole] * len(parts))
        return list(whole.chunk(len(parts), dim=1))

    def _each(self, operation: str, parts: list[Tensor]) -> list[Tensor]:
        self.spent += cost_of(operation, parts[0].numel() * self.width, len(parts))
        return parts

    def taken(self) -> Cost:
        spent, self.spent = self.spent, Cost()
        return spent


def carried_out(kind: str, divided: bool, p: int, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Cost, Cost]:
    """Forward and backward of y = x w on p GPUs; fails where a result is wrong."""
    ledger, y, dx = Ledger(2), x @ w, dy @ w.T
    copies = list(x.chunk(p, dim=1)) if divided else [x] * p
    if kind == "column":
        copies = ledger.all_gather(copies) if divided else copies
        ws = w.chunk(p, dim=1)
        assert torch.equal(torch.cat([a @ b for a, b in zip(copies, ws, strict=True)], dim=1), y)
        forward = ledger.taken()
        partial = [d @ b.T for d, b in zip(dy.chunk(p, dim=1), ws, strict=True)]
        found = ledger.reduce_scatter(partial) if divided else ledger.all_reduce(partial)
        assert torch.equal(torch.cat(found, dim=1) if divided else found[0], dx)
    elif kind == "row":
        copies = copies if divided else list(x.chunk(p, dim=1))
        ws = w.chunk(p, dim=0)
        assert torch.equal(ledger.all_reduce([a @ b for a, b in zip(copies, ws, strict=True)])[0], y)
        forward = ledger.taken()
        found = [dy @ b.T for b in ws]
        assert torch.equal(torch.cat(found, dim=1) if divided else ledger.all_gather(found)[0], dx)
    else:
        rows, columns = grid_of(p)
        copies = ledger.all_gather(copies) if divided else copies
        blocks = [half.chunk(columns, dim=1) for half in w.chunk(rows, dim=0)]
        parts = [[a @ blocks[r][c] for r, a in enumerate(x.chunk(rows, dim=1))] for c in range(columns)]
        # Groups work at the same time: one of each is what it takes.
        sums = [(ledger if c == 0 else Ledger(2)).all_reduce(part)[0] for c, part in enumerate(parts)]
        assert torch.equal(ledger.all_gather(sums)[0], y)
        forward = ledger.taken()
        dys = dy.chunk(columns, dim=1)
        back = [[dys[c] @ blocks[r][c].T for c in range(columns)] for r in range(rows)]
        sums = [(ledger if r == 0 else Ledger(2)).all_reduce(part)[0] for r, part in enumerate(back)]
        assert torch.equal(ledger.all_gather(sums)[0], dx)
    return forward, ledger.taken()


@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize(
    ("kind", "divided"),
    [("column", False), ("column", True), ("row", False), ("row", True), ("hybrid", False), ("hybrid", True)],
)
def test_a_layer_costs_what_dividing_it_takes(kind, divided, p):
    torch.manual_seed(p)
    x, w, dy = (torch.randint(-4, 5, shape).double() for shape in ((5, 12), (12, 24), (5, 24)))
    expected = carried_out(kind, divided, p, x, w, dy)
    assert layer_cost(layer(12, 24, rows=5), kind, divided, 2, p) == expected


# -- chains ------------------------------------------------------------------------------------------------------------


def kinds_of(layers: tuple[Layer, ...], p: int, **more) -> list[str]:
    found = next(each for each in strategies(workload(layers, **more), p, link=BYTES_ONLY) if each.name == "tensor")
    return [kind for _, kind in found.layers]


def test_large_outputs_go_by_columns_small_ones_by_rows_balanced_ones_as_a_grid():
    assert kinds_of((layer(1024, 8192),), 16) == ["column"]
    assert kinds_of((layer(8192, 1024),), 16) == ["row"]
    assert kinds_of((layer(4096, 4096),), 16) == ["hybrid"]


def test_joined_layers_are_column_and_row():
    pair = (layer(1024, 4096), layer(4096, 1024, joined=True))
    assert kinds_of(pair, 4) == ["column", "row"]
    found = next(each for each in strategies(workload(pair), 4, link=BYTES_ONLY) if each.name == "tensor")
    both = cost_of("all_reduce", 64 * 1024 * 2, 4)  # one in each direction, as Megatron-LM has it
    assert found.sent_bytes == 2 * both.num_bytes
    again = next(
        each for each in strategies(workload(pair, recompute=True), 4, link=BYTES_ONLY) if each.name == "tensor"
    )
    assert again.sent_bytes == 3 * both.num_bytes


def all_chains(layers: tuple[Layer, ...], p: int, link: Link) -> float:
    """The least seconds by trying every choice."""
    best = float("inf")
    for kinds in itertools.product(("column", "row", "hybrid"), repeat=len(layers)):
        total, divided = Cost(), False
        for index, (each, kind) in enumerate(zip(layers, kinds, strict=True)):
            if divided and not each.joined:
                total += cost_of("all_gather", 2 * each.rows * layers[index - 1].out_features, p)
                divided = False
            total = sum(layer_cost(each, kind, divided, 2, p), start=total)
            divided = kind == "column"
        if divided:
            total += cost_of("all_gather", 2 * layers[-1].rows * layers[-1].out_features, p)
        best = min(best, total.seconds(link))
    return best


def test_the_chain_is_the_cheapest_of_all():
    draw, tried = random.Random(3), 0
    for _ in range(25):
        widths = [draw.choice([64, 128, 512, 2048]) for _ in range(5)]
        layers = tuple(layer(a, b, draw.random() < 0.6) for a, b in itertools.pairwise(widths))
        p, link = draw.choice([2, 4, 16]), Link(draw.choice([0.0, 1e-6, 1e-3]), 1e9)
        with_all = replace(workload(layers), parameters=10**9)
        small = max(each.elements for each in layers) / 100
        if any(each.elements <= small for each in layers):
            continue  # left whole
        tried += 1
        found = next(each for each in strategies(with_all, p, link=link) if each.name == "tensor")
        assert found.communication_seconds == pytest.approx(all_chains(layers, p, link), rel=1e-9)
    assert tried > 10


def test_what_does_not_divide_is_refused_by_name():
    found = {each.name: each for each in strategies(workload((Layer("odd", 64, 1023, (4095,), False),)), 4)}
    assert found["tensor"].refused == "odd, 1,023 to 4,095 features, does not divide by 4 GPUs"
    assert found["fsdp"].refused and found["pipeline"].refused == "0 layer groups do not make 4 stages"
    with pytest.raises(ConfigurationError, match="1 GPUs"):
        strategies(workload(), 1)
    with pytest.raises(ConfigurationError, match="did you mean 'mesh'"):
        strategies(workload(), 2, "mesch")


# -- heads -------------------------------------------------------------------------------------------------------------

FOUR_HEADS = (
    Layer("q", 64, 1024, (1024, 512, 512), False, heads=(28, 4)), layer(1024, 1024, joined=True),
    layer(1024, 4096), layer(4096, 1024, joined=True),
)  # fmt: skip
SIZES = (Size("attention heads", 28), Size("key heads", 4), Size("intermediate size", 4096), Size("vocabulary", 50257))


def test_heads_that_do_not_divide_are_gathered_before_attention():
    apart = (FOUR_HEADS[0], replace(FOUR_HEADS[1], joined=False), *FOUR_HEADS[2:])
    for p, link in itertools.product((2, 4, 8), (BYTES_ONLY, Link(1e-3, 1e9))):
        found = next(each for each in strategies(workload(FOUR_HEADS), p, link=link) if each.name == "tensor")
        best = all_chains(FOUR_HEADS if p < 8 else apart, p, link)
        assert found.communication_seconds == pytest.approx(best, rel=1e-9)
    assert all_chains(apart, 8, BYTES_ONLY) > all_chains(FOUR_HEADS, 8, BYTES_ONLY)


def test_attention_is_whole_where_its_heads_are_not_divided():
    work = workload(FOUR_HEADS, (Unit(1000, 1.0, 2.0),), attention=0.5)  # of 3 seconds of products
    seconds = {p: {each.name: each.step_seconds for each in strategies(work, p, link=FAST)} for p in (4, 8)}
    assert seconds[4]["tensor"] == pytest.approx(3 / 4) and seconds[8]["tensor"] == pytest.approx(2.5 / 8 + 0.5)
    assert [seconds[4][kind] for kind in ("row", "hybrid")] == [pytest.approx(2.5 / 4 + 0.5)] * 2


def test_groups_of_the_largest_legal_degree_are_tried_beside():
    assert [legal_degree(SIZES, p) for p in (2, 3, 4, 6, 8, 12)] == [2, 1, 4, 2, 4, 4]
    assert undivided(SIZES, 8) == [SIZES[0], SIZES[1], SIZES[3]] and not undivided((), 7)
    work = workload(FOUR_HEADS, (Unit(1000, 1.0, 2.0),) * 8, sizes=SIZES)
    found = {each.name: each for each in strategies(work, 8, link=BYTES_ONLY)}
    four = {each.name: each for each in strategies(work, 4, link=BYTES_ONLY)}
    assert "tensor x4" not in four and "tensor x4" not in {each.name for each in strategies(work, 3, link=BYTES_ONLY)}
    both, one = found["tensor x4"], four["tensor"]
    summed = cost_of("all_reduce", 8 * 1000 / 4, 2)  # gradients are as wide as weights, not as activations
    assert both.tokens == 2 * one.tokens and both.gpu_bytes == one.gpu_bytes
    assert both.step_seconds == pytest.approx(one.step_seconds + summed.seconds(BYTES_ONLY))
    assert both.sent_bytes == pytest.approx(one.sent_bytes + summed.num_bytes)
    free = next(each for each in strategies(work, 8, link=FAST) if each.name == "tensor x4")
    assert free.efficiency == pytest.approx(1.0)


def test_a_plan_says_what_does_not_divide_and_what_would():

    def told(p: int, sizes: tuple[Size, ...] = SIZES) -> str:
        work = workload(FOUR_HEADS, sizes=sizes)
        return ParallelPlan(p, "ring", "a link", 1, tuple(strategies(work, p)), sizes).division()

    assert told(4) == (
        "tensor parallelism: 4 GPUs do not divide the vocabulary of 50,257: the head is divided by its input features, "
        "or whole on every GPU"
    )
    assert told(2, SIZES[:2]) == "tensor parallelism: 2 GPUs divide 28 attention heads and 4 key heads"
    assert told(8).startswith(
        "tensor parallelism: 8 GPUs do not divide 28 attention heads, 4 key heads and the vocabulary of 50,257; "
        "'tensor' gathers before attention"
    )
    assert told(8).endswith("; 'tensor x4' is groups of 4 GPUs, which do, each with a separate batch")
    assert told(3).endswith("; no part of 3 GPUs divides: take 2 or 4 GPUs for tensor parallelism")
    assert "gathers" not in told(3)


# -- sharded data and pipelines ----------------------------------------------------------------------------------------


def units(count: int, draw: random.Random) -> tuple[Unit, ...]:
    return tuple(Unit(draw.randrange(1, 50) * 1000, draw.uniform(1, 5), draw.uniform(2, 10)) for _ in range(count))


def test_with_endless_links_nothing_is_lost_but_the_pipelines_ends():
    pile = tuple(Unit(1000, 1.0, 2.0) for _ in range(8))
    found = {each.name: each for each in strategies(workload((layer(64, 64),), pile), 4, link=FAST)}
    assert found["fsdp"].efficiency == pytest.approx(1.0) and found["tensor"].efficiency == pytest.approx(1.0)
    micro = 16
    assert found["pipeline"].efficiency == pytest.approx(micro / (micro + 3))  # 1F1B's and GPipe's share


def test_sharded_data_hides_what_compute_covers_and_no_more():
    draw = random.Random(5)
    for _ in range(20):
        pile, p = units(draw.randrange(1, 9), draw), draw.choice([2, 4, 8])
        compute = sum(unit.forward + unit.backward for unit in pile)
        link = Link(draw.choice([0.0, 0.1]), draw.choice([1e3, 1e4, 1e6]))
        found = next(each for each in strategies(workload(units=pile), p, link=link) if each.name == "fsdp")
        bytes_moved = 3 * sum(unit.weight_bytes for unit in pile) - pile[-1].weight_bytes
        assert found.sent_bytes == pytest.approx(bytes_moved * (p - 1) / p)
        assert max(compute, found.communication_seconds) < found.step_seconds <= compute + found.communication_seconds
        assert found.step_seconds == pytest.approx(compute + found.exposed_seconds)
        # The first gather and the last scatter have nothing to hide behind.
        ends = [cost_of(kind, pile[0].weight_bytes, p).seconds(link) for kind in ("all_gather", "reduce_scatter")]
        assert found.exposed_seconds >= sum(ends) * (1 - 1e-9)


def test_a_flow_of_equal_jobs():
    draw = random.Random(11)
    for _ in range(30):
        stages = [draw.uniform(0.1, 5) for _ in range(draw.randrange(1, 6))]
        link, jobs = draw.uniform(0, 6), draw.randrange(1, 9)
        machines = [time for stage in stages for time in (stage, link)][:-1]
        free = [0.0] * len(machines)
        for _ in range(jobs):
            ready = 0.0
            for index, time in enumerate(machines):
                ready = free[index] = max(ready, free[index]) + time
        assert flow_seconds(stages, link, jobs) == pytest.approx(free[-1])


def test_stages_are_as_even_as_they_can_be():
    draw = random.Random(13)
    for _ in range(20):
        pile, count = units(draw.randrange(3, 8), draw), draw.randrange(2, 4)
        times = [unit.forward + unit.backward for unit in pile]
        cuts = itertools.combinations(range(1, len(pile)), count - 1)
        best = min(max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cut, len(pile)))) for cut in cuts)
        found = stages_of(pile, count)
        assert [unit for stage in found for unit in stage] == list(pile) and len(found) == count and all(found)
        assert max(sum(unit.forward + unit.backward for unit in stage) for stage in found) == pytest.approx(best)


# -- layers of real models ---------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.zeros((2, 16), dtype=torch.int64, device="meta")


def layers_of(kind: str) -> tuple[Layer, ...]:
    return of_small(kind)[1]


def of_small(kind: str) -> tuple[torch.nn.Module, tuple[Layer, ...]]:
    model = build_causal_lm({"model_type": kind} | SMALL[kind], kind)
    with plain_batches():
        return model, linear_layers(model, lambda: language_loss(model, {"input_ids": tokens(), "labels": tokens()}))


def shape_of(each: Layer) -> tuple[int, tuple[int, ...], bool]:
    return each.in_features, each.parts, each.joined


def test_layers_of_known_architectures():
    llama = layers_of("llama")
    block = [(64, (64, 64, 64), False), (64, (64,), True), (64, (128, 128), False), (128, (64,), True)]
    assert [shape_of(each) for each in llama] == [*block * 3, (64, (500,), False)]
    assert llama[0].name == "model.layers.0.self_attn.q_proj" and llama[0].rows == 32
    gpt2 = [(64, (192,), False), (64, (64,), True), (64, (256,), False), (256, (64,), True)]
    assert [shape_of(each) for each in layers_of("gpt2")] == [*gpt2 * 3, (64, (500,), False)]
    experts = [each for each in layers_of("mixtral") if each.copies == 4]
    assert [shape_of(each) for each in experts[:2]] == [(64, (256,), True), (256, (64,), True)]


@pytest.mark.parametrize(
    ("kind", "heads", "sizes"),
    [("llama", (4,), [4, 128, 500]), ("gpt2", (4,), [4, 256, 500]), ("mixtral", (4, 2), [4, 2, 128, 500])],
)
def test_heads_of_known_architectures(kind, heads, sizes):
    layers, found = with_heads(*of_small(kind))
    assert [each.heads for each in layers].count(heads) == SMALL[kind].get(
        "n_layer", SMALL[kind].get("num_hidden_layers")
    )
    assert {each.heads for each in layers} == {(), heads}
    assert [size.count for size in found] == sizes and found[-1].name == "vocabulary"


def test_our_decoder_has_them_too():
    with torch.device("meta"):
        model = Decoder(
            DecoderConfig(
                vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, max_position=16
            )
        )
    found = linear_layers(model, lambda: model(tokens(), tokens()))
    assert [each.joined for each in found] == [False, True, False, True] * 2 + [False]
    assert sum(each.elements for each in found) == sum(p.numel() for p in model.parameters() if p.dim() == 2) - 100 * 32
    assert [size.count for size in with_heads(model, found)[1]] == [2, 64, 100]
