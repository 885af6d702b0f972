"""``vb estimate --html``: one page of an estimate, that needs nothing from anywhere: memory over the step, the peak in
its parts, of a streamed one levels and lanes, the plan. Its frame, colours and fixed words are ``page.html``.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from itertools import islice
from pathlib import Path
from string import Template

from vblackwell.offload.layout.lanes import spans
from vblackwell.planner.estimate.result import SHOWN, Estimated, both_units
from vblackwell.planner.forecast import OffloadEstimate
from vblackwell.trace.allocator import CachingAllocator, play
from vblackwell.trace.trace import CATEGORIES, Trace
from vblackwell.units import GiB, KiB, MiB, format_bytes

ORDER = ("context", "weights", "gradients", "optimizer", "activations", "logits_and_loss", "workspace", "fragmentation")
# What a streamed step holds where, in the order of its forecast.
HELD = {
    "weight": "weights", "master": "masters", "remainder": "the rest of masters", "exp_avg": "first moments",
    "exp_avg_sq": "second moments", "exp_avg_codes": "first moments, 8 bits", "exp_avg_scales": "their scales",
    "exp_avg_sq_codes": "second moments, 8 bits", "exp_avg_sq_scales": "their scales", "gradient": "gradients",
    "accumulated": "sums of gradients", "staging": "staging", "ring": "states that pass", "loaded": "loaded weights",
    "leaving": "gradients that leave", "locked": "weights that updates hold", "undo": "for rollbacks, of what is free",
}  # fmt: skip
# Lane: its words, and the part of the peak whose colour it has.
LANES = {
    "gpu": ("GPU computes", "weights"), "up": ("to the GPU", "activations"), "down": ("from the GPU", "gradients"),
    "cpu": ("CPU updates", "optimizer"), "disk": ("disk", "workspace"),
}  # fmt: skip
NARROW = 0.001  # of a step: what is between two pieces of work and narrower is not drawn
WIDTH, HEIGHT = 1000, 300  # of the drawing in page.html, in its own units; it stretches with the window
MAX_TICKS = 5


def page_of(estimated: Estimated) -> str:
    memory, size = estimated.memory, estimated.gpu_bytes
    values, peak = memory.as_dict(), memory.peak_p50
    cards = [("", "expected peak", format_bytes(peak)), ("", "plan for (P99)", format_bytes(memory.peak_p99))]
    if size is not None:
        name = f"{estimated.card.name if estimated.card else 'this GPU'}, {format_bytes(size)}"
        cards.append(("good", name, "fits") if estimated.fits else ("bad", name, "does not fit"))
    if (speed := estimated.tokens_per_second) is not None:
        cards.append(("", "tokens/s" if estimated.fits else "tokens/s, streamed", f"{speed:,.0f}"))
    whole = size if size is not None and peak < size <= 2 * peak else peak
    keys = {name: f'<i class="c-{name}"></i>{SHOWN[name]}' for name in ORDER}
    rows = [(keys[name], values[name], f"{values[name] / peak:.1%}") for name in ORDER]
    rows += [("peak (P50)", peak, ""), ("plan for (P99)", memory.peak_p99, "")]
    parts = {
        "model": escape(estimated.run.spec.name),
        "title": escape(estimated.title().partition(": ")[2]),
        "cards": "".join(
            f'<div class="card {mark}"><span>{escape(label)}</span><b>{value}</b></div>' for mark, label, value in cards
        ),
        "legend": "".join(f"<span>{key}</span>" for key in keys.values()),
        "bar": "".join(
            f'<div class="c-{name}" style="width:{100 * values[name] / whole:.3f}%" title="{SHOWN[name]}: '
            f'{format_bytes(values[name])}"></div>'
            for name in ORDER
            if values[name]
        ),
        "rows": "".join(
            f"<tr{' class=sum' if text == 'peak (P50)' else ''}><td>{text}</td><td>{format_bytes(num_bytes)}</td>"
            f"<td>{share}</td></tr>"
            for text, num_bytes, share in rows
        ),
        "state": both_units(memory.state_bytes),
        "streamed": _streamed(estimated),
        "plan": _plan(estimated),
        "assumptions": _list(estimated.assumptions()),
        "version": metadata.version("vblackwell"),
    }
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute(parts | _drawing(estimated))


def _list(lines: Iterable[object]) -> str:
    return "<ul>" + "".join(f"<li>{escape(str(line))}</li>" for line in lines) + "</ul>"


def _plan(estimated: Estimated) -> str:
    lines = estimated.plan_lines()
    body = _list(lines or ["no GPU was named: --gpu or --gpu-memory says whether it fits, and what a stack would hold"])
    if estimated.advice:
        body += "<h3>What would help</h3>" + _list(estimated.advice)
    return body


def _streamed(estimated: Estimated) -> str:
    """Where the bytes of a streamed step are, and when its lanes work; empty where nothing is planned to stream."""
    stack = estimated.stack
    if stack is None or stack.forecast is None:
        return ""
    table = stack.forecast.bytes_by_level
    names = ("GPU", "RAM", "disk")[: max(map(len, table.values()))]
    rows = [(HELD[kind], row) for kind, row in table.items() if any(row) and kind != "undo"]
    rows.append(("activations and workspace", [stack.step, *[0 for _ in names[1:]]]))
    waiting = stack.host - sum(row[1] for _, row in rows)
    rows += [("inputs that wait, and the disk's threads", [0, waiting, 0][: len(names)])] if waiting else []
    rows.append(("in all", [stack.level0 + stack.step, stack.host, stack.disk][: len(names)]))
    rows += [(HELD[kind], row) for kind, row in table.items() if any(row) and kind == "undo"]
    cells = "".join(
        f"<tr{' class=sum' if name == 'in all' else ''}><td>{name}</td>"
        + "".join(f"<td>{format_bytes(each) if each else ''}</td>" for each in row)
        + "</tr>"
        for name, row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in ("", *names))
    levels = f'<div class="scroll"><table class="levels"><tr>{head}</tr>{cells}</table></div>'
    return f"<section><h2>Where a streamed step is</h2>{levels}</section>{_lanes(stack)}"


def _lanes(stack: OffloadEstimate) -> str:
    if stack.rates is None or stack.forecast is None:
        return ""
    found = spans(stack.forecast.lanes, stack.rates)
    seconds = max(stop for pieces in found.values() for _, stop in pieces)
    rows = ""
    for lane, pieces in found.items():
        if not pieces:
            continue
        (words, color), drawn = LANES[lane], list[tuple[float, float]]()
        for start, stop in sorted(pieces):
            if drawn and start - drawn[-1][1] < NARROW * seconds:
                start = drawn.pop()[0]
            drawn.append((start, stop))
        rectangles = "".join(
            f'<rect x="{WIDTH * start / seconds:.1f}" width="{WIDTH * (stop - start) / seconds:.1f}" height="10"/>'
            for start, stop in drawn
        )
        share = sum(stop - start for start, stop in pieces) / seconds
        picture = f'<svg class="c-{color}" viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none">{rectangles}</svg>'
        rows += f"<span>{words}</span>{picture}<b>{share:.0%}</b>"
    note = f"One step of {seconds:.3g} s in the long run, simulated: from the end of a backward to the end of the next."
    return f'<section><h2>What works when</h2><div class="lanes">{rows}</div><p class="note">{note}</p></section>'


Phase = tuple[str, float, float]  # its name, from and to, as shares of the step's allocations


def timeline(trace: Trace, moments: int = 240, expandable: bool = False) -> tuple[dict[str, list[int]], list[Phase]]:
    """The last step of ``trace`` at ``moments`` moments, or as many as it has events: of every stretch of it the one at
    which most is allocated, as bytes of each of `CATEGORIES` and of what the allocator holds beyond; and its phases."""
    last = max((step for _, step, _ in trace.marks), default=0)
    begin = min((index for index, step, _ in trace.marks if step == last), default=0)
    # What is freed after the last phase is the end of the run, not of a step.
    ends = [index for index, _, phase in trace.marks if phase == "setup" and index > begin]
    end = min([len(trace.events), *ends])
    count, length = max(1, min(moments, end - begin)), max(1, end - begin)
    allocator = CachingAllocator(None, expandable)
    live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    best: list[tuple[int, dict[str, int]]] = [(-1, live | {"fragmentation": 0})] * count
    for position, event in enumerate(islice(play(trace, allocator), end)):
        index = max(event, ~event)
        live[trace.categories[index]] += trace.sizes[index] if event >= 0 else -trace.sizes[index]
        if position >= begin:
            place, total = (position - begin) * count // length, sum(live.values())
            if total > best[place][0]:
                best[place] = (total, live | {"fragmentation": max(0, allocator.reserved - total)})
    marks = [(index, phase) for index, of, phase in trace.marks if of == last and phase != "setup" and index < end]
    phases: list[Phase] = []
    for (index, phase), until in zip(marks, [*(index for index, _ in marks[1:]), end], strict=True):
        name, start = phase.replace("loss_backward", "loss"), (index - begin) / length
        if phases and phases[-1][0] == name:
            start = phases.pop()[1]
        phases.append((name, start, (until - begin) / length))
    return {name: [found[name] for _, found in best] for name in (*CATEGORIES, "fragmentation")}, phases


def _drawing(estimated: Estimated) -> dict[str, str]:
    """Stacked areas, with the context below and what the allocator holds beyond above; the card's size as a line."""
    layers, spans = timeline(estimated.trace, expandable=estimated.run.expandable)
    moments, limit = range(len(layers["weights"])), estimated.gpu_bytes
    layers["context"] = [estimated.memory.context for _ in moments]
    top = max(sum(layers[name][i] for name in ORDER) for i in moments)
    scale = max(top * 1.05, limit * 1.02 if limit is not None and limit <= 2 * top else 0)

    def y(num_bytes: float) -> float:
        return HEIGHT * (1 - num_bytes / scale)

    def outline(values: Sequence[float]) -> list[str]:
        corners = ((x * WIDTH / len(moments), i) for i in moments for x in (i, i + 1))
        return [f"{x:.1f},{y(values[i]):.1f}" for x, i in corners]

    below, areas = [0.0 for _ in moments], ""
    for name in ORDER:
        above = [low + value for low, value in zip(below, layers[name], strict=True)]
        if any(layers[name]):
            points = " ".join(outline(above) + outline(below)[::-1])
            areas += f'<polygon class="c-{name}" points="{points}"><title>{SHOWN[name]}</title></polygon>'
        below = above
    starts = [start * WIDTH for _, start, _ in spans[1:]]
    lines = [f'<line class="phase" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"/>' for x in starts]
    heights = [("grid", "span", tick, format_bytes(tick)) for tick in _ticks(scale)]
    heights += [("limit", "em", limit, f"{format_bytes(limit)} GPU")] if limit is not None and limit <= scale else []
    lines += [f'<line class="{of}" x1="0" x2="{WIDTH}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>' for of, _, at, _ in heights]
    notes = [f'<{tag} style="top:{100 * y(at) / HEIGHT:.2f}%">{text}</{tag}>' for _, tag, at, text in heights]
    phases = (
        f'<span style="left:{100 * start:.2f}%;width:{100 * (stop - start):.2f}%" title="{name}">'
        f"{name if stop - start > 0.09 else ''}</span>"
        for name, start, stop in spans
    )
    return {"areas": areas, "lines": "".join(lines), "notes": "".join(notes), "phases": "".join(phases)}


def _ticks(scale: float) -> list[float]:
    """Round numbers of a binary unit, at most `MAX_TICKS` of them."""
    unit = next((unit for unit in (GiB, MiB, KiB) if scale >= 2 * unit), 1)
    steps = (each * 10**power * unit for power in range(6) for each in (1, 2, 5))
    step = next(each for each in steps if scale / each <= MAX_TICKS)
    return [step * number for number in range(1, int(scale / step) + 1)]
