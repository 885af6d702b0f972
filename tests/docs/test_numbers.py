"""Numbers that docs/results.md and the README claim are in a results file, in the journal,
or in a page that is tested.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")
SHAPES = [(4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192)]


def numbers(text: str) -> set[str]:
    """Numbers of at least three digits or with a point: smaller ones are counts of rows and the like."""
    found = {number.rstrip(",") for number in NUMBER.findall(text)}
    return {number for number in found if "." in number or len(number.replace(",", "")) > 2}


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables, heads and rules left out."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        cells for cells, after in zip(split, [*split[1:], []], strict=True) if not _rule(cells) and not _rule(after)
    ]


def _rule(cells: list[str]) -> bool:
    return bool(cells) and all(re.fullmatch(r":?-+:?", cell) for cell in cells)


def measured(name: str, **where: str) -> list[dict[str, str]]:
    """Rows of a results file; a value of ``where`` is what the cell begins with."""
    with (ROOT / "benchmarks/results" / name).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key].startswith(value) for key, value in where.items())]


def offload(date: str, column: str = "tokens_per_second", **where: str) -> dict[str, float]:
    found = measured("offload.csv", date=date, shape="2.70B", status="ok", **where)
    return {row["system"]: float(row[column]) for row in found}


def streamed() -> set[str]:
    speed, held = offload("2026-11-22T14:48"), offload("2026-11-22T14:48", "peak_reserved")
    plain, ours = held["plain"], held["streamed"]
    ratios = {f"{speed['streamed'] / speed[peer]:.3f}" for peer in ("plain", "resident", "fsdp2", "deepspeed")}
    ratios |= {f"{speed['resident'] / speed['plain']:.3f}", f"{plain / ours:.2f}"}
    return ratios | {f"{speed[name]:,.0f}" for name in speed} | {f"{ours / 1e9:.2f}", f"{plain / 1e9:.1f}"}


def clipped() -> set[str]:
    speed = offload("2026-11-22T14:54")
    return {f"{speed['streamed'] / speed['plain']:.3f}", f"{speed['streamed'] / speed['fsdp2']:.2f}"}


def lines(date: str, of_plain: str) -> set[str]:
    speed, held = (offload(of_plain, key) | offload(date, key) for key in ("tokens_per_second", "peak_reserved"))
    rss = offload(date, "host_rss")["lines"]
    ratios = {f"{speed['lines'] / speed['plain']:.3f}", f"{held['plain'] / held['lines']:.2f}", f"{rss / 1e9:.1f}"}
    memory = {f"{held['lines'] / 1e9:.2f}", f"{held['plain'] / 1e9:.1f}"}
    return ratios | memory | {f"{each:,.0f}" for each in speed.values()}


def limited(limit: str) -> set[str]:
    """Of a command with several limits, which plain has the first of: none."""
    date = "2026-11-30T14:01"

    def of(column: str) -> dict[str, float]:
        under = measured("offload.csv", date=date, system="lines")
        (row,) = [row for row in under if row["max_grad_norm"] == limit]
        return offload(date, column, system="plain") | {"lines": float(row[column])}

    speed, held, rss = of("tokens_per_second"), of("peak_reserved"), of("host_rss")["lines"]
    unclipped = next(row for row in measured("offload.csv", date=date, system="lines") if not row["max_grad_norm"])
    free = float(unclipped["tokens_per_second"])
    if limit == "1.0":  # of which some steps clip: by the mean steps of both
        (plain,) = measured("offload.csv", date=date, system="plain")
        seconds = [[float(each) for each in row["step_seconds"].split()] for row in (plain, unclipped)]
        speed["plain"], free = (16384 * len(each) / sum(each) for each in seconds)
    ratios = {f"{speed['lines'] / speed['plain']:.3f}", f"{held['plain'] / held['lines']:.2f}", f"{rss / 1e9:.1f}"}
    ratios |= {f"{speed['lines'] / free:.3f}", limit}
    memory = {f"{held['lines'] / 1e9:.2f}", f"{held['plain'] / 1e9:.1f}"}
    return ratios | memory | {f"{each:,.0f}" for each in speed.values()}


def enabled() -> set[str]:
    speed = offload("2026-11-22T14:46")
    return {f"{speed['enabled'] / speed['plain']:.3f}", *(f"{each:,.0f}" for each in speed.values())}


def adapters() -> set[str]:
    found = {row["system"]: row for row in measured("lora.csv", date="2026-11-22T21:16", status="ok")}
    speed = {name: float(row["tokens_per_second"]) for name, row in found.items()}
    held = {f"{float(row['peak_reserved']) / 1e9:.2f}" for row in found.values()}
    length = {row["seq"] for row in found.values()}
    return (
        held | length | {f"{each:,.0f}" for each in speed.values()} | {f"{speed['ours'] / speed['bitsandbytes']:.3f}"}
    )


def written() -> set[str]:
    found = measured("generate.csv", date="2026-11-22T21:12", rows="1", through="False", status="ok")
    rate = {row["system"]: float(row["rate"]) for row in found}
    held = {row["system"]: float(row["peak_reserved"]) / 1e9 for row in found}
    ratio = rate["streamed"] / rate["accelerate"]
    prompt = {row["prompt"] for row in found}
    fp4 = prompt | {f"{rate['streamed-fp4']:.0f}", f"{held['streamed-fp4']:.2f}"}
    return fp4 | {f"{rate['streamed']:.2f}", f"{ratio:.2f}"}


def fp4(m: int) -> set[str]:
    found = {
        (row["n"], row["k"]): row["ratio"]
        for row in measured("fp4.csv", system="fp4_linear nvfp4")
        if row["m"] == str(m)
    }
    return {f"{float(found[str(n), str(k)]):.2f}" for n, k in SHAPES}


def two_part() -> set[str]:
    (row,) = measured("two_part.csv", date="2026-11-27", what="start of 62 layers, 36 M parameters")
    return numbers(row["measured"])


SOURCES = {
    "three lines of Python, clipping on": lambda: limited("1.0"),
    "three lines, no clipping": lambda: limited(""),
    "three lines, every step clips": lambda: limited("0.001"),
    "the same on a busy host": lambda: lines("2026-11-28T06:49", "2026-11-28T06:49"),
    "the same on the busy host": lambda: lines("2026-11-28T06:50", "2026-11-28T06:49"),
    "the same, each step, on the busy host": lambda: lines("2026-11-28T06:51", "2026-11-28T06:49"),
    "streamed, every setting by hand": streamed,
    "the same over peers": streamed,
    "the same over our own resident run": streamed,
    "the same, every step clips": clipped,
    "a model that fits": enabled,
    "adapters of rank 16 over FP4, 6.7B": adapters,
    "6.7B in bf16 under 8 GiB": written,
    "the same packed to FP4, where it fits": written,
    "FP4 linears over cuBLAS bf16, one row": lambda: fp4(1),
    "the same, 16 rows": lambda: fp4(16),
    "the same, 1,024 rows": lambda: fp4(1024),
    "62 linears of 36 M parameters replaced by ones in two parts": two_part,
}
TRAINING = RESULTS.split("## Training\n")[1].split("\n|")[0]  # the condition of that section's rows
CLAIMS = {cells[0]: cells for cells in rows(RESULTS.split("## Measure your own")[0]) if len(cells) == 4}


def test_every_source_is_a_claim():
    assert set(SOURCES) <= set(CLAIMS) and len(CLAIMS) > 15
    assert all(numbers(cells[1]) for cells in CLAIMS.values())


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_number_is_in_its_source(claim: str):
    _, said, condition, source = CLAIMS[claim]
    if claim in SOURCES:
        assert numbers(said) | numbers(condition) <= SOURCES[claim]()
        return
    while source.startswith("the same"):  # as the row above says
        names = list(CLAIMS)
        source = CLAIMS[names[names.index(claim) - 1]][3]
        claim = names[names.index(claim) - 1]
    pages = re.findall(r"\]\(([\w/]+\.md)\)", source)
    assert pages, source
    told = set().union(*(numbers((ROOT / "docs" / page).read_text(encoding="utf-8")) for page in pages))
    assert numbers(said) | numbers(condition) <= told


def test_commands_are_files():
    for path in re.findall(r"`(?:benchmarks/)?(bench_\w+\.py)", RESULTS):
        assert (ROOT / "benchmarks" / path).is_file(), path
    for name in re.findall(r"`([\w-]+\.csv)`", RESULTS):
        assert (ROOT / "benchmarks/results" / name).is_file(), name


def test_the_number_of_tries_is_the_page_s():
    (tries,) = re.findall(r"Tries \| (\d+), of which", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"))
    assert f"{tries} tries of {tries} held" in RESULTS


def test_the_readme_claims_nothing_else():
    """Tables: measured ones have results.md's numbers,
    and what a card can do has the numbers of the page of that card.
    """
    head, cards = (
        README.split("## What your card can do\n")[0],
        README.split("## What your card can do\n")[1].split("\n## ")[0],
    )
    claimed = [cells for cells in rows(head) if len(cells) == 4]
    assert len(claimed) >= 6
    proven = list[set[str]]()  # what a row says, with those after it that begin with "the same"
    for name, *said, _ in CLAIMS.values():
        if not name.startswith("the same"):
            proven.append(numbers(TRAINING))
        proven[-1] |= numbers(" ".join([name, *said]))
    for cells in claimed:
        assert any(numbers(" ".join(cells)) <= one for one in proven), cells
    page = (ROOT / "docs/what-fits.md").read_text(encoding="utf-8")
    for card, *tasks in (cells for cells in rows(cards) if len(cells) == 4):
        name = card.split(", ")[0]
        (section,) = [part for part in page.split("\n## ") if re.match(rf"[\d ]+GB: {re.escape(name)},", part)]
        for kind, task in zip(("train all weights", "train adapters over FP4", "run in FP4"), tasks, strict=True):
            model, speed = task.split(": ")
            first = next(cells for cells in rows(section) if cells[0] == kind)
            assert (first[1], first[3]) == (model, speed.removesuffix(" tokens/s")), (name, kind)


# By definition, not measured: bytes a parameter and ranges of the 8-bit formats, rows and the capabilities from which
# on FP8 and FP4 activations are; a vocabulary for example; a version, and what tests/nn/convert/test_architectures.py
# counts.
DEFINED = {
    "numerics": {"1984", "4032", "2.03", "6.03", "897", "8.9", "10.0", "12.0"},
    "models": {"150,000", "5.23", "162"},
}


@pytest.mark.parametrize("name", ["architecture", "attention", "estimate", "guide", "models", "numerics", "offload"])
def test_pages_claim_what_results_or_the_journal_have(name: str):
    """Those of one sentence, or of one row of a table, outside of code, in one entry of the journal."""
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    page = re.sub(r"^```.*?^```|`[^`]+`", "", page, flags=re.DOTALL | re.MULTILINE)
    journal = (path.read_text(encoding="utf-8") for path in (ROOT / "docs/journal").glob("*.md"))
    entries = [numbers(entry) | numbers(RESULTS) for text in journal for entry in re.split(r"^## ", text, flags=re.M)]
    for sentence in re.split(r"\n\n|\n(?=\||- )|[.;:]\s", page):
        claimed = numbers(sentence) - DEFINED.get(name, set())
        assert any(claimed <= entry for entry in entries), sentence
