"""On a Hopper GPU: every path of the FP4 kernels, those that no rule takes yet included, in a process that is watched
(fp4/paths.py).
"""

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
# The longest step compiles everything on all cores, or makes a weight on the CPU: a few seconds, 20 on slow cores
SILENCE_SECONDS = 300


def test_every_path_is_right_and_ends():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma and clusters of this kind are Hopper's")
    command = [sys.executable, "-m", "tests.kernels.fp4.paths"]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)], daemon=True).start()
    said = ["nothing"]
    try:
        while (line := lines.get(timeout=SILENCE_SECONDS)) is not None:
            said.append(line)
    except queue.Empty:
        pytest.fail(f"never ended: {said[-1]}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert said[-1] == "all paths are right\n", "".join(said[-30:])
