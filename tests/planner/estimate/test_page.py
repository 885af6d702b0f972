"""The timeline of a step against the replay that the estimate itself uses."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from tests.planner.test_memory_estimate import trace_of
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes, find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.offload.layout.lanes import simulate
from vblackwell.planner.estimate.page import HELD, LANES, ORDER, page_of, timeline
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.forecast import estimate_offload
from vblackwell.planner.memory_estimate import ModelConfig, Run, estimate_trace
from vblackwell.planner.model_spec import of_decoder
from vblackwell.planner.several_gpus import sharded_step
from vblackwell.trace.allocator import replay
from vblackwell.trace.trace import CATEGORIES
from vblackwell.units import MiB, format_bytes


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


@functools.cache
def streamed_page() -> tuple[Estimated, str]:
    """Of a run that does not fit, streamed by the rates of its card."""
    card = find_gpu("RTX 3060")
    config = ModelConfig(vocab_size=4000, hidden_size=256, num_layers=6, num_heads=4, seq_length=128)
    run = Run(of_decoder("small", config.decoder()), 128, capability=card.capability, checkpointing=True)
    trace, below = run.trace(8), (64 * MiB, 256 * MiB)
    gpu_bytes = context_bytes(run.capability) + RUNTIME_BYTES + 220 * MiB
    stack = estimate_offload(run, trace, 8, gpu_bytes, *below, rates_of(card))
    assert stack.forecast is not None, stack.refused
    found = Estimated(run, 8, trace, estimate_trace(trace, run.capability), card, gpu_bytes, False, 0, stack)
    return found, page_of(found)


def test_a_streamed_step_is_shown_by_levels_and_lanes():
    found, page = streamed_page()
    stack = found.stack
    assert stack is not None and stack.forecast is not None and stack.rates is not None
    reader = Reader()
    reader.feed(page)
    assert not reader.open and not reader.fetched
    begin = page.index('class="levels"')
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page[begin : page.index("</table>", begin)])
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]
    assert cells[0] == ["", "GPU", "RAM", "disk"] and {len(row) for row in cells} == {4}
    whole = next(row for row in cells if row[0] == "in all")
    sizes = stack.level0 + stack.step, stack.host, stack.disk
    assert whole[1:] == [format_bytes(each) for each in sizes] and stack.disk
    kinds = [kind for kind, row in stack.forecast.bytes_by_level.items() if any(row)]
    assert [row[0] for row in cells if row[0] in HELD.values()] == [HELD[kind] for kind in kinds]
    times = simulate(stack.forecast.lanes, stack.rates)
    lanes = re.findall(r"<span>([^<]+)</span><svg[^>]*>(.*?)</svg><b>(\d+)%</b>", page)
    shown = {words: int(share) for words, _, share in lanes}
    for lane, busy in times.busy.items():
        words, _ = LANES[lane]
        assert (words in shown) == (busy > 0)
        if busy:  # of one step, not of the two that the simulation counts
            assert shown[words] == pytest.approx(100 * busy, abs=6)
    for _, drawn, _ in lanes:
        pieces = [tuple(map(float, each)) for each in re.findall(r'x="([\d.]+)" width="([\d.]+)"', drawn)]
        assert all(one + width <= other + 0.2 for (one, width), (other, _) in pairwise(pieces))
        assert max(start + width for start, width in pieces) <= 1000.2


# How many names of phases are seen in part: neither inside their phase nor on the second line, which is hidden.
CUT = """
const cut = page => [...page.querySelectorAll('.phases span')].filter(each => {
  const text = page.ownerDocument.createRange(), box = each.getBoundingClientRect();
  text.selectNodeContents(each);
  const name = text.getBoundingClientRect(), inside = name.left >= box.left - 1 && name.right <= box.right + 1;
  return name.width > 0 && name.top < box.bottom - 4 && !inside;
}).length
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it_without_errors_and_nothing_hangs_over(tmp_path):
    """On a phone, a tablet and a screen; a frame is what a browser makes as narrow as it is told."""
    _, page = streamed_page()
    widths, path = (360, 768, 1200), tmp_path / "frames.html"
    frames = "".join(f'<iframe style="width:{width}px;border:0" srcdoc="{escape(page)}"></iframe>' for width in widths)
    asked = "[...document.querySelectorAll('iframe')].map(each => each.contentDocument.documentElement)"
    beyond = "each.clientWidth > 300 ? each.scrollWidth - each.clientWidth : -1"
    found = f"{asked}.map(each => [{beyond}, each.querySelectorAll('rect,polygon').length, cut(each)])"
    path.write_text(f"<title></title>{frames}<script>{CUT};onload = () => document.title = {found}</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}"]
    command = ["chromium", *flags, "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>([-\d,]+)</title>", done.stdout)
    drawn = page.count("<rect") + page.count("<polygon")
    assert title is not None and title[1] == ",".join(f"0,{drawn},0" for _ in widths)


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
