"""Where there is no GPU, Triton's kernels run in its interpreter: it must be on before anything (transformers, say) imports triton."""

import gc
import importlib.util
import os
import signal
from collections.abc import Generator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        from tests.interpreter import repair

        repair()

# A shell starts what it runs in the background with Ctrl-C ignored, and Python then leaves it so: tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """pyproject.toml limits each test's time. Where pytest-timeout is not installed, nothing does, and that is no error."""
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds that a test may take (pytest-timeout)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: a million objects that full collections need not walk through, at some 0.3 s a time, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
