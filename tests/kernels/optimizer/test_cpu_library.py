"""The library of AdamW on the CPU: compiled once, kept, made anew; what a machine without a compiler is told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import adamw, cpu
from vblackwell.kernels.runtime import host_compiler

LIBRARY = cpu._library.__wrapped__  # as at a process's first question
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that is found without CC, told to optimise nothing: a third of the time, and the same bits."""
    name = next(name for name in ("cc", "gcc", "clang") if shutil.which(name))
    script = tmp_path_factory.mktemp("compiler") / name
    script.write_text(f'#!/bin/sh\nexec {shutil.which(name)} "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


@pytest.fixture
def failing_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    found = empty_cache / "failing-cc"
    found.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'no such option' >&2\nexit 3\n")
    found.chmod(0o755)
    monkeypatch.setenv("CC", str(found))
    return str(found)


def test_what_is_missing_is_named(empty_cache: Path, failing_compiler: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(empty_cache))
    assert LIBRARY() == (None, f"{failing_compiler}: ended with 3: no such option")
    monkeypatch.setenv("CC", "")
    with pytest.raises(Unsupported, match=r"no C compiler .*: install one, e.g. apt install gcc"):
        host_compiler.shared_library(cpu.SOURCE, {})


@needs_compiler
def test_a_library_is_kept_and_one_that_rounds_otherwise_or_is_damaged_is_not_used(
    empty_cache: Path, failing_compiler: str, quick_compiler: None, monkeypatch: pytest.MonkeyPatch
):
    """By the next compiler, where the first one fails."""
    order = adamw.torch_order()
    other = adamw.Order(order.width, (not order.lerp[0], order.lerp[1]), order.square)
    monkeypatch.setattr(cpu, "torch_order", lambda: other)
    native, why = LIBRARY()
    assert native is None and "rounds as torch does not" in why
    (wrong,) = (empty_cache / "vblackwell" / "host").iterdir()
    monkeypatch.setattr(cpu, "torch_order", lambda: order)
    assert LIBRARY()[0] is not None
    (kept,) = set((empty_cache / "vblackwell" / "host").iterdir()) - {wrong}
    kept.write_bytes(b"no library")
    assert LIBRARY()[0] is not None
    made = kept.stat()
    assert made.st_size > 1000 and LIBRARY()[0] is not None
    assert kept.stat().st_mtime_ns == made.st_mtime_ns and len(list(kept.parent.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("home", ["/proc/nowhere", pytest.param("/dev/null", marks=pytest.mark.slow)])
def test_a_cache_that_cannot_be_kept_is_no_error(home: str, quick_compiler: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert LIBRARY()[0] is not None


@needs_compiler
def test_a_library_that_is_cut_or_zeroed_is_not_loaded(empty_cache: Path):
    """The system's loader would end the process. Of a short source: AdamW's takes the compiler a second a time."""
    source = empty_cache / "seven.c"
    source.write_text("int seven(void) { return 7; }\n", encoding="ascii")
    assert host_compiler.shared_library(source, {}).seven() == 7
    (kept,) = (empty_cache / "vblackwell" / "host").iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:4096] + bytes(len(whole) - 4096)):
        kept.unlink()  # what is loaded has the file
        kept.write_bytes(damaged)
        assert host_compiler.shared_library(source, {}).seven() == 7
        assert kept.read_bytes() != damaged and host_compiler._is_whole(kept)
