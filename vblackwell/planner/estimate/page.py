"""``vb estimate --html``: one page of an estimate, that needs nothing from anywhere: memory over the step, the peak in
its parts, the plan.

The drawings stretch with the window, and their words are text next to them, so that a phone shows them as large as a
desktop. Light or dark as the reader's system is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

from vblackwell.planner.estimate.result import SHOWN, Estimated
from vblackwell.planner.parallel.plan import ParallelPlan
from vblackwell.planner.parallel.strategies import Strategy
from vblackwell.trace.allocator import Block, CachingAllocator
from vblackwell.trace.trace import CATEGORIES, Trace
from vblackwell.units import GiB, KiB, MiB, format_bytes

ORDER = ("context", "weights", "gradients", "optimizer", "activations", "logits_and_loss", "workspace", "fragmentation")
WIDTH, HEIGHT = 1000, 300  # of drawings, in their own units
MAX_TICKS = 5
UNITS = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))


def page_of(estimated: Estimated) -> str:
    """The page's HTML."""
    found = timeline(estimated.trace, expandable=estimated.run.expandable)
    title = f"vb estimate: {estimated.model}"
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    sections = [
        _answer(estimated),
        _section("Memory over one training step", _timeline(estimated, found)),
        _section("At the peak", _peak(estimated)),
        _section("Plan", _plan(estimated)),
        _section("What this assumes", _list(estimated.assumptions())),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light '
        'dark">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        f"<h1>{escape(estimated.model)}</h1>"
        f'<p class="sub">{escape(estimated.title().partition(": ")[2])}</p>\n'
        + "\n".join(sections)
        + f"\n<footer>vblackwell {escape(metadata.version('vblackwell'))}</footer></main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _answer(estimated: Estimated) -> str:
    memory = estimated.memory
    cards = [
        ("expected peak", format_bytes(memory.peak_p50), ""),
        ("plan for (P99)", format_bytes(memory.peak_p99), ""),
    ]
    if estimated.gpu_bytes is not None:
        name = estimated.card.name if estimated.card else "this GPU"
        mark = "good" if estimated.fits else "bad"
        cards.append(
            (f"{name}, {format_bytes(estimated.gpu_bytes)}", "fits" if estimated.fits else "does not fit", mark)
        )
    if (shown := estimated.tokens_per_second) is not None:
        cards.append(("tokens/s" if estimated.fits else "tokens/s, streamed", f"{shown:,.0f}", ""))
    inner = "".join(
        f'<div class="card {mark}"><span>{escape(label)}</span><b>{escape(value)}</b></div>'
        for label, value, mark in cards
    )
    return f'<div class="cards">{inner}</div>'


@dataclass(frozen=True)
class Timeline:
    """Moments of a trace's last step, in order; of every stretch of it the one at which most is allocated.

    Attributes:
        bytes_by_category: of `CATEGORIES`, one value a moment. reserved: what the allocator holds at each.
        phases: (name, from, to) as shares of the step's allocations; neighbours of one name are one.
    """

    bytes_by_category: dict[str, tuple[int, ...]]
    reserved: tuple[int, ...]
    phases: tuple[tuple[str, float, float], ...]

    def allocated(self, moment: int) -> int:
        """All categories together."""
        return sum(values[moment] for values in self.bytes_by_category.values())


def timeline(trace: Trace, moments: int = 240, expandable: bool = False) -> Timeline:
    """The last step of ``trace`` at ``moments`` moments, or as many as it has events."""
    last = max((step for _, step, _ in trace.marks), default=0)
    begin = min((index for index, step, _ in trace.marks if step == last), default=0)
    # What is freed after the last phase is the end of the run, not of a step.
    ends = [index for index, _, phase in trace.marks if phase == "setup" and index > begin]
    end = min([len(trace.events), *ends])
    count, length = max(1, min(moments, end - begin)), max(1, end - begin)
    allocator = CachingAllocator(None, expandable)
    blocks: dict[int, Block | None] = {}
    live: dict[str, int] = {category: 0 for category in CATEGORIES}
    best: list[tuple[int, dict[str, int], int]] = [(-1, {}, 0)] * count
    for position, event in enumerate(trace.events[:end]):
        index = event if event >= 0 else ~event
        if event >= 0:
            blocks[event] = allocator.malloc(trace.sizes[event])
        else:
            allocator.free(blocks.pop(index))
        live[trace.categories[index]] += trace.sizes[index] if event >= 0 else -trace.sizes[index]
        if position >= begin:
            place, total = (position - begin) * count // length, sum(live.values())
            if total > best[place][0]:
                best[place] = (total, dict(live), allocator.reserved)
    marks = [(index, phase) for index, of, phase in trace.marks if of == last and phase != "setup" and index < end]
    phases: list[tuple[str, float, float]] = []
    for (index, phase), until in zip(marks, [*(index for index, _ in marks[1:]), end], strict=True):
        name, start = phase.replace("loss_backward", "loss"), (index - begin) / length
        if phases and phases[-1][0] == name:
            start = phases.pop()[1]
        phases.append((name, start, (until - begin) / length))
    return Timeline(
        {category: tuple(found.get(category, 0) for _, found, _ in best) for category in CATEGORIES},
        tuple(reserved for _, _, reserved in best),
        tuple(phases),
    )


# -- drawings ----------------------------------------------------------------------------------------------------------


def _timeline(estimated: Estimated, found: Timeline) -> str:
    """Stacked areas, with the context below and what the allocator holds beyond above; the card's size as a line."""
    count, context = len(found.reserved), estimated.memory.context
    layers: dict[str, Sequence[int]] = {"context": [context] * count, **found.bytes_by_category}
    layers["fragmentation"] = [max(0, found.reserved[i] - found.allocated(i)) for i in range(count)]
    top = max(sum(layers[name][i] for name in ORDER) for i in range(count))
    limit = estimated.gpu_bytes
    scale = max(top * 1.05, limit * 1.02 if limit is not None and limit <= 2 * top else 0)
    below = [0.0] * count
    shapes = []
    for name in ORDER:
        above = [low + value for low, value in zip(below, layers[name], strict=True)]
        if any(layers[name]):
            there, back = _steps(above, scale), _steps(below, scale)
            points = " ".join(there + back[::-1])
            shapes.append(f'<polygon class="c-{name}" points="{points}"><title>{escape(SHOWN[name])}</title></polygon>')
        below = above
    lines = [
        f'<line class="phase" x1="{start * WIDTH:.1f}" x2="{start * WIDTH:.1f}" y1="0" y2="{HEIGHT}"/>'
        for _, start, _ in found.phases[1:]
    ]
    marks = _ticks(scale)
    lines += [
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (_y(tick, scale) for tick in marks)
    ]
    notes = [f'<span style="top:{100 * _y(tick, scale) / HEIGHT:.2f}%">{_short(tick)}</span>' for tick in marks]
    if limit is not None and limit <= scale:
        y = _y(limit, scale)
        lines.append(f'<line class="limit" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        notes.append(f'<em style="top:{100 * y / HEIGHT:.2f}%">{_short(limit)} GPU</em>')
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Bytes on the GPU over one step, by kind">{"".join(shapes)}{"".join(lines)}</svg>'
    )
    phases = "".join(
        f'<span style="left:{100 * start:.2f}%;width:{100 * (stop - start):.2f}%" title="{escape(name)}">'
        f"{escape(name) if stop - start > 0.09 else ''}</span>"
        for name, start, stop in found.phases
    )
    legend = "".join(f'<span><i class="c-{name}"></i>{escape(SHOWN[name])}</span>' for name in ORDER)
    return (
        f'<div class="plot">{drawing}{"".join(notes)}</div><div class="phases">{phases}</div>'
        f'<div class="legend">{legend}</div><p class="note">From left to right the step\'s allocations in order, not '
        "seconds. The grey on top is held by the allocator and not in use.</p>"
    )


def _steps(values: Sequence[float], scale: float) -> list[str]:
    """The outline of a row of columns, left to right."""
    width = WIDTH / len(values)
    return [f"{x:.1f},{_y(value, scale):.1f}" for i, value in enumerate(values) for x in (i * width, (i + 1) * width)]


def _y(value: float, scale: float) -> float:
    return HEIGHT * (1 - value / scale)


def _ticks(scale: float) -> list[float]:
    """Round numbers of a binary unit, at most `MAX_TICKS` of them."""
    unit = next((unit for unit, _ in UNITS if scale >= 2 * unit), 1)
    step = next(
        s for power in range(6) for s in (10**power, 2 * 10**power, 5 * 10**power) if scale / (s * unit) <= MAX_TICKS
    )
    return [step * unit * number for number in range(1, int(scale / (step * unit)) + 1)]


def _short(num_bytes: float) -> str:
    unit, name = next((each for each in UNITS if num_bytes >= each[0]), (1, "B"))
    return f"{num_bytes / unit:.3g} {name}"


def _peak(estimated: Estimated) -> str:
    values, peak = estimated.memory.as_dict(), estimated.memory.peak_p50
    whole = max(peak, estimated.gpu_bytes or 0) if (estimated.gpu_bytes or 0) <= 2 * peak else peak
    parts = "".join(
        f'<div class="c-{name}" style="width:{100 * values[name] / whole:.3f}%" title="{escape(SHOWN[name])}: '
        f'{format_bytes(values[name])}"></div>'
        for name in ORDER
        if values[name]
    )
    rows = "".join(
        f'<tr><td><i class="c-{name}"></i>{escape(SHOWN[name])}</td><td>{format_bytes(values[name])}</td>'
        f"<td>{values[name] / peak:.1%}</td></tr>"
        for name in ORDER
    )
    rows += f'<tr class="sum"><td>peak (P50)</td><td>{format_bytes(peak)}</td><td></td></tr>'
    rows += f"<tr><td>plan for (P99)</td><td>{format_bytes(estimated.memory.peak_p99)}</td><td></td></tr>"
    state = estimated.memory.state_bytes
    note = (
        f"Weights, gradients and optimizer states in full: {format_bytes(state)} ({state / 1e9:.1f} GB); not all are "
        "alive at the peak."
    )
    return (
        f'<div class="bar">{parts}</div><div '
        f'class="scroll"><table><tr><th></th><th>bytes</th><th>share</th></tr>{rows}</table></div>'
        f'<p class="note">{escape(note)}</p>'
    )


def _plan(estimated: Estimated) -> str:
    lines = estimated.plan_lines()
    if not lines:
        lines = ["no GPU was named: --gpu or --gpu-memory says whether it fits, and what an offload stack would hold"]
    body = _list(lines)
    if estimated.advice:
        body += "<h3>What would help</h3>" + _list([str(each) for each in estimated.advice])
    parallel = estimated.parallel
    if parallel is not None:
        rows = "".join(_strategy(parallel, each) for each in parallel.strategies)
        body += (
            f"<h3>On {parallel.num_gpus} such GPUs</h3><p class='note'>{escape(parallel.topology)}; "
            f"{escape(parallel.link)}</p>"
            '<div class="scroll"><table><tr><th></th><th>tokens/s</th><th>efficiency</th><th>waiting</th><th>sent a '
            "GPU</th>"
            f"<th>one holds</th><th></th></tr>{rows}</table></div>"
        )
    return body


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _strategy(plan: ParallelPlan, each: Strategy) -> str:
    if each.refused:
        return f'<tr><td>{escape(each.name)}</td><td class="why" colspan="6">{escape(each.refused)}</td></tr>'
    return f"<tr><td>{escape(each.name)}</td>" + "".join(f"<td>{cell}</td>" for cell in plan.cells(each)) + "</tr>"
