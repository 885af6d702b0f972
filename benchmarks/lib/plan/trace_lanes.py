"""Where the gaps are: a profiler trace, lane by lane.

    python benchmarks/lib/plan/trace_lanes.py RUN/trace.json [--gaps 8] [--threads]

Reads what `vb train --profile` or `bench_offload.py --trace` wrote (``.json`` or ``.json.gz``). For every GPU stream: its share
of the traced steps that it was busy, the bytes it copied and at which rate, and its largest gaps with what ran before and after. For
threads (``--threads``) the same, with the time that they spent waiting inside CUDA calls apart. Times are milliseconds
from the beginning of the first traced step.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from vblackwell.train.profile import GPU_CATEGORIES, ORDER, Lane, direction_of, read_trace, stream_roles

STEP = "ProfilerStep#"
WAITS = ("Synchronize",)
Span = tuple[float, float]  # begin and end, in us


@dataclass(frozen=True)
class Gap:
    """Time in which a lane ran nothing, in us."""

    begin: float
    end: float
    before: str
    after: str


@dataclass(frozen=True)
class LaneReport:
    """One stream or thread.

    Attributes:
        busy_us: time covered by at least one event. waiting_us: of it, inside CUDA calls that only wait.
        copied: bytes by direction. copying_us: time covered by copies.
        gaps: the largest. neighbours: (before, after), how many gaps lie between such two, and their sum in us; most first.
        heaviest: names with most time, and that time in us.
    """

    name: str
    events: int
    busy_us: float
    waiting_us: float
    copied: dict[str, int]
    copying_us: float
    gaps: list[Gap]
    neighbours: list[tuple[tuple[str, str], int, float]]
    heaviest: list[tuple[str, float]]


def union(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans merged, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in union(spans))


def span_of(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def window(events: Sequence[dict[str, Any]]) -> Span:
    """The traced steps, as far as their work on the GPU reaches; the whole trace where no step is marked."""
    steps = [span_of(event) for event in events if str(event.get("name", "")).startswith(STEP)]
    spans = steps or [span_of(event) for event in events]
    if not spans:
        raise SystemExit("the trace has no events")
    begin = min(begin for begin, _ in spans)
    ends = [end for _, end in spans] + [span_of(e)[1] for e in events if e.get("cat") in GPU_CATEGORIES]
    return begin, max(ends)


def report(name: str, events: list[dict[str, Any]], inside: Span, gaps: int) -> LaneReport:
    """What one lane did within ``inside``."""
    begin, end = inside
    events = sorted((e for e in events if span_of(e)[1] > begin and span_of(e)[0] < end), key=lambda e: float(e["ts"]))
    spans = [(max(s, begin), min(t, end)) for s, t in map(span_of, events)]
    copies = [(event, span) for event, span in zip(events, spans, strict=True) if event.get("cat") == "gpu_memcpy"]
    copied: Counter[str] = Counter()
    for event, _ in copies:
        copied[direction_of(event["name"])] += int(event.get("args", {}).get("bytes", 0))
    times: Counter[str] = Counter()
    for event, (first, last) in zip(events, spans, strict=True):
        times[short(event["name"])] += last - first  # pyright: ignore[reportArgumentType]
    waits = [s for e, s in zip(events, spans, strict=True) if any(word in str(e["name"]) for word in WAITS)]
    found = sorted(_gaps(events, spans, inside), key=lambda gap: gap.begin - gap.end)
    return LaneReport(
        name=name,
        events=len(events),
        busy_us=length(spans),
        waiting_us=length(waits),
        copied=dict(copied),
        copying_us=length(span for _, span in copies),
        gaps=found[:gaps],
        neighbours=_by_neighbours(found)[:gaps],
        heaviest=[(each, float(time)) for each, time in times.most_common(5)],
    )


def _by_neighbours(gaps: list[Gap]) -> list[tuple[tuple[str, str], int, float]]:
    """Gaps of one kind come once a layer: their sum is what counts."""
    sums: dict[tuple[str, str], list[float]] = {}
    for gap in gaps:
        sums.setdefault((gap.before, gap.after), []).append(gap.end - gap.begin)
    found = [(pair, len(times), sum(times)) for pair, times in sums.items()]
    return sorted(found, key=lambda each: -each[2])


def _gaps(events: list[dict[str, Any]], spans: list[Span], inside: Span) -> list[Gap]:
    """Between what ended last so far and what begins next; also before the first and after the last."""
    gaps, reached, before = [], inside[0], "(begin)"
    for event, (begin, end) in zip(events, spans, strict=True):
        if begin > reached:
            gaps.append(Gap(reached, begin, before, short(event["name"])))
        if end >= reached:
            reached, before = end, short(event["name"])
    if inside[1] > reached:
        gaps.append(Gap(reached, inside[1], before, "(end)"))
    return gaps


# torch's elementwise kernels say what they compute only inside their template arguments.
INNER = re.compile(r"(?!(?:gpu_kernel|Binary|AUnary|BUnary))\b(\w*Functor\w*|\w+_kernel(?:_cuda|_impl)?)\b")


def short(name: Any, limit: int = 56) -> str:
    """A kernel's name without return type, namespace and template arguments, cut."""
    text = str(name).removeprefix("void ").replace("(anonymous namespace)::", "")
    if text.startswith("Memcpy"):
        return text
    outer, _, inner = text.partition("<")
    outer = outer.split("(")[0].removeprefix("at::native::").strip()
    found = INNER.search(inner) if "elementwise" in outer else None
    text = f"elementwise {found[1]}" if found else outer
    return text if len(text) <= limit else text[: limit - 1] + "~"


def lanes(trace: dict[str, Any], *, threads: bool) -> list[tuple[str, list[dict[str, Any]]]]:
    """Names and events of GPU streams, then of threads if asked for."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    roles = stream_roles(events)
    labels = {
        (event.get("pid"), event.get("tid")): event["args"]["name"]
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    held: dict[Lane, list[dict[str, Any]]] = {}
    for event in events:
        lane = (event.get("pid"), event.get("tid"))
        work = event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
        marks = str(event.get("name", "")).startswith(STEP)
        if lane in roles and event.get("cat") in GPU_CATEGORIES or threads and lane not in roles and work and not marks:
            held.setdefault(lane, []).append(event)
    ranks = {lane: ORDER.index(role) for lane, role in roles.items()}
    ordered = sorted(held, key=lambda lane: (ranks.get(lane, len(ORDER)), -len(held[lane])))
    streams = {lane: f"{role} (stream {lane[1]})" for lane, role in roles.items()}
    return [(streams.get(lane) or labels.get(lane) or f"thread {lane[1]}", held[lane]) for lane in ordered]


def lines(reports: list[LaneReport], inside: Span) -> list[str]:
    """The table, and every lane's gaps."""
    begin, end = inside
    whole = end - begin
    out = [
        f"traced steps: {whole / 1e3:.1f} ms",
        f"{'lane':42}{'busy':>8}{'waiting':>9}{'events':>8}{'copied':>12}{'GB/s':>8}",
    ]
    for each in reports:
        total = sum(each.copied.values())
        rate = f"{total / each.copying_us / 1e3:.1f}" if each.copying_us else ""
        size = f"{total / 1e9:.2f} GB" if total else ""
        waiting = f"{each.waiting_us / whole:.1%}" if each.waiting_us else ""
        out.append(f"{each.name[:41]:42}{each.busy_us / whole:8.1%}{waiting:>9}{each.events:8}{size:>12}{rate:>8}")
    for each in reports:
        missing = whole - each.busy_us
        out += [
            "",
            f"{each.name}: idle {missing / 1e3:.1f} ms; most time in "
            + ", ".join(f"{n} {t / 1e3:.1f} ms" for n, t in each.heaviest),
        ]
        for gap in each.gaps:
            at = (gap.begin - begin) / 1e3
            out.append(f"  {(gap.end - gap.begin) / 1e3:9.3f} ms at {at:9.1f}: {gap.before}  ->  {gap.after}")
        for (before, after), count, total in each.neighbours:
            if count > 1:
                out.append(f"  {total / 1e3:9.3f} ms in {count:5} gaps: {before}  ->  {after}")
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gaps", type=int, default=8, help="largest gaps to show of each lane")
    parser.add_argument("--threads", action="store_true", help="threads too")
    args = parser.parse_args(argv)
    trace = read_trace(args.trace)
    inside = window([event for event in trace["traceEvents"] if event.get("ph") == "X"])
    reports = [report(name, events, inside, args.gaps) for name, events in lanes(trace, threads=args.threads)]
    print("\n".join(lines(reports, inside)))


if __name__ == "__main__":
    main()
