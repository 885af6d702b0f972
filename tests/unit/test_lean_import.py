"""``import vblackwell`` is quick, starts no CUDA and loads nothing heavy: people import it in every script."""

import subprocess
import sys

PROGRAM = """
import sys, time
import torch
start = time.perf_counter()
import vblackwell
seconds = time.perf_counter() - start
assert not torch.cuda.is_initialized()
heavy = {"transformers", "pyarrow", "tensorboard", "rich", "jsonargparse", "triton", "tokenizers"} & set(sys.modules)
assert not heavy - BEFORE, heavy - BEFORE
assert seconds < 1.0, seconds
missing = [name for name in vblackwell.__all__ if getattr(vblackwell, name, None) is None]
assert not missing, missing
"""


def test_lean_import():
    program = "import sys, torch\nBEFORE = set(sys.modules)\n" + PROGRAM
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
