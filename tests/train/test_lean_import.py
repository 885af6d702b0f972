"""``import vblackwell`` is quick, starts no CUDA and loads nothing heavy: people import it in every script."""

import os
import subprocess
import sys

import vblackwell
from vblackwell import cli

PROGRAM = """
import sys, time
import torch
start = time.process_time()
import vblackwell
seconds = time.process_time() - start
assert not torch.cuda.is_initialized()
heavy = {"transformers", "pyarrow", "tensorboard", "rich", "jsonargparse", "triton", "tokenizers"} & set(sys.modules)
assert not heavy - BEFORE, heavy - BEFORE
assert seconds < 1.0, seconds
"""


def test_lean_import():
    program = "import sys, torch\nBEFORE = set(sys.modules)\n" + PROGRAM
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there():
    assert [name for name in vblackwell.__all__ if getattr(vblackwell, name, None) is None] == []


def test_torchs_own_lines_are_silenced_before_it_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # main sets its own
    for name in (*cli.QUIET, *cli.QUIET_IN_FILES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")  # somebody's wish
    assert cli.main(["--version"]) == 0
    assert all(os.environ[name] == value for name, value in cli.QUIET_IN_FILES.items())  # stderr is no terminal
    assert os.environ["KINETO_LOG_LEVEL"] == "99" and os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    monkeypatch.delenv("KINETO_LOG_LEVEL")
    assert cli.main(["--version", "--debug"]) == 0
    assert "KINETO_LOG_LEVEL" not in os.environ
    for name in cli.QUIET_IN_FILES:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["--version"]) == 0 and not set(cli.QUIET_IN_FILES) & set(os.environ)
    capsys.readouterr()
