"""C of this package, compiled for the CPU at hand on first use by the machine's C compiler, as Triton's launchers are.

Shared libraries are kept under ``$XDG_CACHE_HOME/vblackwell/host``, named by a hash of source, options, compiler and
processor: a home may be shared by machines that differ. A digest follows each, as a damaged one would end the process.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from vblackwell.errors import Unsupported
from vblackwell.machine.cache import cache_root, write_atomically

# Every operation as it is written: no fused ones, and roots that set no errno, which would keep loops from vectors.
OPTIONS = ("-std=c11", "-O3", "-march=native", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SECONDS = 120  # that a compiler may take


def shared_library(path: Path, macros: dict[str, int]) -> ctypes.CDLL:
    """The library of the C file at ``path``, by ``$CC`` or the first of cc, gcc and clang that makes one. Raises
    Unsupported with each one's reason."""
    options = [*OPTIONS, *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
    names = dict.fromkeys(name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name)
    compilers = dict.fromkeys(found for name in names if (found := shutil.which(name)))
    reasons = []
    for compiler in compilers:
        try:
            return _library_by(compiler, path, options)
        except (OSError, RuntimeError, subprocess.SubprocessError, Unsupported) as error:
            reasons.append(f"{compiler}: {error}")
    raise Unsupported(
        "; ".join(reasons) or "there is no C compiler (cc, gcc or clang): install one, e.g. apt install gcc"
    )


def _library_by(compiler: str, path: Path, options: list[str]) -> ctypes.CDLL:
    source, version = path.read_text(encoding="utf-8"), _output([compiler, "--version"])
    key = "\n".join([source, *options, version, _processor()])
    kept = cache_root() / "host" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if _is_whole(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # nothing may be run from there
            pass
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "built.so"
        _output([compiler, *options, "-shared", "-fPIC", str(path), "-o", str(built), "-lm"])
        code = built.read_bytes()
        write_atomically(kept, code + hashlib.sha256(code).digest())
        return ctypes.CDLL(str(built))


def _is_whole(library: Path) -> bool:
    try:
        found = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(found[:-32]).digest() == found[-32:]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    if done.returncode != 0:
        raise Unsupported(f"ended with {done.returncode}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def _processor() -> str:
    """What -march=native goes by, on Linux; elsewhere the machine's type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part")))
