"""The timeline of a step against the replay that the estimate itself uses."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.planner.test_memory_estimate import trace_of
from vblackwell.machine.gpus import find_gpu
from vblackwell.planner.estimate.page import ORDER, page_of, timeline
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.memory_estimate import ModelConfig, Run, estimate_trace
from vblackwell.planner.model_spec import of_decoder
from vblackwell.planner.several_gpus import sharded_step
from vblackwell.trace.allocator import replay
from vblackwell.trace.trace import CATEGORIES


def test_the_peak_is_in_it_and_reserved_bytes_are_the_replays():
    trace = trace_of("llama")
    (layers, _), truth = timeline(trace, moments=40), replay(trace)
    step = max(index for _, index, _ in trace.marks)
    begin = min(index for index, of, _ in trace.marks if of == step)
    reserved = [sum(values) for values in zip(*layers.values(), strict=True)]
    allocated = [all_of - beyond for all_of, beyond in zip(reserved, layers["fragmentation"], strict=True)]
    assert max(reserved) == truth.peak_reserved and len(reserved) == 40
    sizes = {event: trace.sizes[event] for event in trace.events if event >= 0}
    live = peak = 0
    for position, event in enumerate(trace.events):
        live += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, live) if position >= begin else 0
    assert max(allocated) == peak
    every, _ = timeline(trace, moments=10**6)
    assert max(map(sum, zip(*(every[name] for name in CATEGORIES), strict=True))) == peak


def test_phases_follow_each_other_without_gaps():
    _, phases = timeline(trace_of("gpt2"))
    assert [name for name, _, _ in phases] == ["forward", "loss", "backward", "optimizer"]
    assert phases[0][1] == 0.0 and phases[-1][2] == pytest.approx(1.0)
    assert all(one[2] == other[1] for one, other in zip(phases, phases[1:], strict=False))


class Reader(HTMLParser):
    """Tags that are open, and what a page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "line", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing():
    card = find_gpu("RTX 3060")
    config = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=3, num_heads=4, seq_length=64)
    model = "<script>alert(1)</script>"
    run = Run(of_decoder(model, config.decoder()), 64, capability=card.capability)
    trace = run.trace(4)
    memory = estimate_trace(trace, run.capability)
    several = sharded_step(run, trace, 4, card, card.total_bytes, 2, "ring")
    page = page_of(Estimated(run, 4, trace, memory, card, card.total_bytes, True, 90, several=several))
    reader = Reader()
    reader.feed(page)
    assert not reader.open and not reader.fetched
    assert "<script" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    for name in ORDER:
        assert f'class="c-{name}"' in page and f".c-{name}{{" in page
    assert set(ORDER) == {*CATEGORIES, "fragmentation", "context"}
    widths = [float(each) for each in re.findall(r'style="width:([\d.]+)%" title', page)]
    assert sum(widths) == pytest.approx(100, abs=0.1)  # the card is more than twice the peak: the bar is the peak alone
    assert "on 2 such GPUs" in page
    tops = [float(y) for points in re.findall(r'points="([^"]+)"', page) for y in re.findall(r",([\d.]+)", points)]
    assert min(tops) >= 0 and max(tops) <= 300
