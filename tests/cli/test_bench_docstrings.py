"""Pre-trained, taught to answer with docstrings by adapters over FP4, opened by peft and transformers:
all of it in miniature.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.docstring_chat import talks, write

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "bench_docstrings.py"
SOURCE = '''
class Basket:
    """Not a function."""

    def weigh(self, *, tare: int = 0) -> float:
        """Return the weight of what is in it,
        in grams.

        More about it.
        """

    def _hidden(self):
        """Nobody calls this one from outside."""

    async def empty(self): "Take everything out of it at once."

    def bare(self): pass

def weigh_again(x):
    """Return the weight of what is in it, in grams."""

def short(x):
    """Too short."""
'''


def test_questions_and_answers(tmp_path):
    path = tmp_path / "basket.py"
    path.write_text(SOURCE)
    made = talks([("shop.basket", path)])
    assert sorted(made, key=lambda talk: talk["output"]) == [
        {
            "instruction": "What does shop.basket.Basket.weigh do?",
            "input": "def weigh(self, *, tare: int=0):",
            "output": "Return the weight of what is in it, in grams.",
        },
        {
            "instruction": "What does shop.basket.Basket.empty do?",
            "input": "def empty(self):",
            "output": "Take everything out of it at once.",
        },
    ]
    (tmp_path / "other.py").write_text('def f(x):\n    "The answer of another module, long enough."\n')
    files = [("shop.basket", path), ("other", tmp_path / "other.py")]
    write(tmp_path / "one.jsonl", talks(files))
    write(tmp_path / "two.jsonl", talks(files[::-1]))
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_model_learns_to_answer(place):
    """The benchmark's own exit code says that the loss fell and that logits are equal; here by how much."""
    output = place.vb(str(BENCHMARK), "--quick", "--out", "run").stdout
    numbers = json.loads((place.folder / "run/docstrings.json").read_text())
    assert numbers["loss_merged"] < numbers["loss_base"] - 0.03
    assert numbers["apart"] < 1e-5 and numbers["packed_linears"] == 14
    assert abs(numbers["loss_peft"] - numbers["loss_merged"]) < 0.02, "rounding the base changed what the adapter does"
    assert "--use-fp4" in output and "placement: streamed" in output
    lines = (place.folder / "run/chat.jsonl").read_text().splitlines()
    assert len({json.loads(line)["output"] for line in lines}) == len(lines) > 100
