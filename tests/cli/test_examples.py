"""The examples run as they stand, and are short enough to read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_train_own_module(place):
    path = EXAMPLES / "train_own_module.py"
    assert len(path.read_text().splitlines()) <= 40
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=place.folder,
        env=place.environment(),
    )
    assert result.returncode == 0, result.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses[1] < losses[0] / 4
    (held,) = re.findall(r"level 0 held at most (\d+) bytes", result.stdout)
    assert 0 < int(held) <= 1 << 20


def test_every_example_has_a_test():
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == ["train_own_module.py"]
