"""What `cuobjdump` says of a cubin: registers, stack and instructions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def resources(cubin: bytes, folder: Path) -> dict[str, dict[str, int]]:
    """{kernel: {REG: .., STACK: .., LOCAL: ..}}."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\w+):\s*\n\s*(.*)", text)
    assert found, text
    return {name: {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", usage)} for name, usage in found}


def sass(folder: Path) -> list[str]:
    """Lines of what `resources` looked at last."""
    command = [str(CUOBJDUMP), "-sass", str(folder / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
