"""The attention kernels compile and fit where there is no GPU: shared memory, and spilled registers within what edge tiles may cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.attention_compile import SHARED_BYTES

# The inner loop without masks holds no spilled register; the walk over diagonal tiles, compiled into the same kernel, may hold some.
SPILLED_BYTES = 160
CASES = {
    80: ("dkv,128,none",),
    86: ("forward,128,none", "dkv,128,none"),
    89: ("forward,64,none",),
    90: ("forward,128,none", "dkv,128,none", "forward,128,boolean", "specialized,128,none"),
}


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_fit(capability, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.attention_compile", str(capability), *CASES[capability]]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert result.returncode == 0, result.stderr[-2000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(CASES[capability])
    for name, shared_bytes, spilled_bytes in found:
        assert shared_bytes <= SHARED_BYTES[capability] and spilled_bytes <= SPILLED_BYTES, (
            name,
            shared_bytes,
            spilled_bytes,
        )
