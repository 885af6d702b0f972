"""Tokens a step against speed: measured, and the arithmetic it should follow; a table and a plot.

A step of T tokens with recompute takes 8 P T / F seconds of matrix products, P the parameters that a token is multiplied by, and
the causal attention's share of it. Streamed, the link brings 4 bytes of each of N parameters (a bf16 weight for forward and for
backward) and 10 of those that AdamW updates on the GPU (their states), and takes back 12 of these, or 2 (a gradient) of those that
the CPU updates at A parameters a second. What stays loaded at the two turns, between forward and backward and behind backward, comes
in once less, and what lives on the GPU with its states asks nobody. The longest of computing, the link each way, at the B bytes/s that
it carries while both ways and the CPU's updates run, and the CPU is the step. F is what the resident run sustains at its largest step,
so the line tests the streaming and not whether a model reaches the speed of one large product; the grey dashed line takes F from the
product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.offload.case import Recipe, Result, Shape
from vblackwell.offload.layout.placement import GROUPS_IN_USE, OVERLAP, share_for
from vblackwell.units import parse_bytes

WEIGHT_BYTES, STATE_BYTES, UPDATED_BYTES, GRADIENT_BYTES = 4, 10, 12, 2
# Of the rate of an update that was measured alone, what copies leave: 1.9 of 2.65 G parameters/s on the reference machine.
CPU_DURING_COPIES = 0.7
TOLERANCE = 0.15
COLOURS = {"resident": "#1f77b4", "streamed": "#d62728"}


@dataclass(frozen=True)
class Lanes:
    """What the lanes beside the computing one can do.

    Attributes:
        duplex_gbps: of the link, each way.
        share: of the parameters, updated by the CPU. cpu: parameters/s of it, beside copies, over a whole step.
        kept_bytes: of weights that stay loaded at each of the two turns.
        living: parameters that live on the GPU with their states.
    """

    duplex_gbps: float
    share: float = 0.0
    cpu: float = float("inf")
    kept_bytes: float = 0.0
    living: int = 0

    @classmethod
    def of(cls, recipe: Recipe, rates: dict[str, float], shape: Shape) -> Lanes | None:
        """Those of a recipe on a machine; None without its rates."""
        duplex = rates.get("shared_gbps") or rates.get("duplex_gbps")
        if not duplex:
            return None
        cpu = 1e9 * (rates.get("shared_adamw_gps") or rates.get("adamw_gps", float("inf")) * CPU_DURING_COPIES)
        living = living_parameters(recipe, shape)
        passing = shape.num_parameters - living
        room = 0 if recipe.weight_bytes is None else parse_bytes(recipe.weight_bytes)
        kept = min(max(0, room - GROUPS_IN_USE * 2 * shape.block_parameters), 2 * passing)
        auto = share_for(duplex * 1e9, cpu, WEIGHT_BYTES - 2 * kept / passing) * passing / shape.num_parameters
        named = {"level0": 0.0, "home": 1.0, "auto": auto, None: auto}
        share = named[recipe.update] if recipe.update in named else float(recipe.update or 0)
        return cls(duplex, share, cpu * OVERLAP, kept, living)

    def seconds(self, shape: Shape) -> float:
        """The longest of the link's two ways and the CPU."""
        passing, there = shape.num_parameters - self.living, self.share * shape.num_parameters
        here = passing - there
        inward = passing * WEIGHT_BYTES + here * STATE_BYTES - 2 * self.kept_bytes
        outward = here * UPDATED_BYTES + there * GRADIENT_BYTES
        return max(inward / self.duplex_gbps / 1e9, outward / self.duplex_gbps / 1e9, there / self.cpu)


def living_parameters(recipe: Recipe, shape: Shape) -> int:
    """Of the first groups, embeddings and then blocks, those that a recipe keeps on the GPU with their states."""
    room = 0 if recipe.resident_bytes is None else parse_bytes(recipe.resident_bytes)
    found = 0
    for group in (shape.vocab_size * shape.hidden_size, *[shape.block_parameters] * shape.num_layers):
        if (found + group) * UPDATED_BYTES > room:
            break
        found += group
    return found


def step_flops(shape: Shape, tokens: int, seq: int) -> float:
    """FLOP of a step with every block computed twice: 8 a parameter and token, and causal attention.

    Attention: 2 products of 2 S H FLOP a token and head forward, halved by the causal mask, 2.5 times that backward.
    """
    forward = 2 * min(seq, tokens) * shape.hidden_size * shape.num_layers
    return 8.0 * shape.matmul_parameters * tokens + 4.5 * forward * tokens


def streamed_seconds(shape: Shape, tokens: int, seq: int, flops: float, lanes: Lanes) -> float:
    """The arithmetic's step: the longest of computing and the other lanes."""
    return max(step_flops(shape, tokens, seq) / flops, lanes.seconds(shape))


def sustained_flops(results: list[Result], shape: Shape, seq: int) -> float | None:
    """What the resident run reaches at its largest step."""
    good = [result for result in results if result.system == "resident" and result.tokens_per_second]
    if not good:
        return None
    largest = max(good, key=lambda result: result.tokens)
    assert largest.tokens_per_second is not None
    return step_flops(shape, largest.tokens, seq) * largest.tokens_per_second / largest.tokens


def sweep_lines(results: list[Result], shape: Shape, lanes: Lanes | None, seq: int) -> list[str]:
    """A line a number of tokens: resident, streamed, their ratio, the arithmetic, and by how much it is off."""
    speed = {(result.system, result.tokens): result.tokens_per_second for result in results}
    flops = sustained_flops(results, shape, seq)
    lines = [] if lanes is None else [f"arithmetic of {lanes}: {lanes.seconds(shape):.3f} s beside the computing"]
    lines += [f"{'tokens/step':>12}{'resident':>12}{'streamed':>12}{'ratio':>8}{'model':>12}{'off by':>9}"]
    for tokens in sorted({result.tokens for result in results if result.tokens}):
        resident, streamed = speed.get(("resident", tokens)), speed.get(("streamed", tokens))
        ratio = f"{streamed / resident:.3f}" if resident and streamed else ""
        model = off = ""
        if flops and lanes:
            predicted = tokens / streamed_seconds(shape, tokens, seq, flops, lanes)
            model = f"{predicted:,.0f}"
            if streamed:
                error = streamed / predicted - 1
                off = f"{error:+.1%}" + (" !" if abs(error) > TOLERANCE else "")
        lines.append(f"{tokens:12,}{_speed(resident):>12}{_speed(streamed):>12}{ratio:>8}{model:>12}{off:>9}")
    lines += [
        f"{result.system}: {result.status} at {result.tokens:,} tokens: {result.error}"
        for result in results
        if result.error
    ]
    return lines


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


# -- the plot --------------------------------------------------------------------------------------------------------------------

Curve = tuple[str, str, list[tuple[float, float]], bool]  # label, colour, points, whether measured


def curves(results: list[Result], shape: Shape, rates: dict[str, float], lanes: Lanes | None, seq: int) -> list[Curve]:
    """What is drawn: measured points, and the arithmetic on a fine grid."""
    found: list[Curve] = []
    for system, colour in COLOURS.items():
        points = [(float(r.tokens), r.tokens_per_second) for r in results if r.system == system and r.tokens_per_second]
        if points:
            found.append((f"{system}, measured", colour, sorted(points), True))
    tokens = [result.tokens for result in results if result.tokens]
    if not lanes or not tokens:
        return found
    low, high = min(tokens), max(tokens)
    grid = [int(low * (high / low) ** (step / 60)) for step in range(61)]
    for label, colour, flops in (
        ("streamed, arithmetic", "#555555", sustained_flops(results, shape, seq)),
        ("streamed, arithmetic at the speed of one large product", "#bbbbbb", rates.get("matmul_flops")),
    ):
        if flops:
            line = [(float(t), t / streamed_seconds(shape, t, seq, flops, lanes)) for t in grid]
            found.append((label, colour, line, False))
    return found


def draw(
    results: list[Result],
    shape: Shape,
    rates: dict[str, float],
    lanes: Lanes | None,
    path: Path,
    about: dict[str, Any],
    seq: int,
) -> Path:
    """The plot: a PNG by matplotlib where it is installed, else an SVG of the same name; the path written."""
    found = curves(results, shape, rates, lanes, seq)
    title = f"{shape.num_parameters / 1e9:.2f} B parameters, {about.get('gpu', '')}, torch {about.get('torch', '')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        target = path.with_suffix(".svg")
        target.write_text(svg(found, title))
        return target
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), dpi=150)
    for label, colour, points, measured in found:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-" if measured else "--", color=colour, label=label, linewidth=1.4)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for _, _, points, measured in found if measured for x, _ in points})
    axes.set_xticks(ticks, [f"{x / 1024:g}k" for x in ticks])
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


WIDTH, HEIGHT, MARGIN = 760, 460, 64


def svg(found: list[Curve], title: str) -> str:
    """The same plot without a library: logarithmic tokens to the right, tokens/s upwards from 0."""
    from math import log2

    points = [point for _, _, line, _ in found for point in line]
    if not points:
        points = [(1.0, 1.0)]
    left, right = log2(min(x for x, _ in points)), log2(max(x for x, _ in points))
    top = 1.08 * max(y for _, y in points)
    across = (WIDTH - 2 * MARGIN) / max(right - left, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (log2(x) - left) * across, HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{MARGIN}" y="28" font-size="14">{title}</text>',
        *_axes(place, left, right, top),
    ]
    for number, (label, colour, line, measured) in enumerate(found):
        places = [place(*point) for point in line]
        dashes = "" if measured else ' stroke-dasharray="6 4"'
        trail = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{trail}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        if measured:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{MARGIN + 12}" y="{MARGIN + 4 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _axes(place: Callable[[float, float], tuple[float, float]], left: float, right: float, top: float) -> list[str]:
    parts = []
    for power in range(round(left), round(right) + 1):
        x, y = place(2.0**power, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{MARGIN}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{2**power / 1024:g}k</text>')
    for part in range(6):
        value = top * part / 5
        _, y = place(2.0**left, value)
        parts.append(f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">tokens a step (upwards: tokens/s)</text>'
    )
    return parts
