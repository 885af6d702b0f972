"""``vb docs`` and ``vb --version``: what is installed, without torch, whose import takes a second.

The pages are those of ``docs/`` in the repository, which setup.py puts into the wheel as ``vblackwell/docs``, with the
changelog next to them.
"""

import platform
from importlib import metadata
from pathlib import Path

from vblackwell.errors import ConfigurationError, check_known

_PACKAGE = Path(__file__).parents[1]


def pages() -> dict[str, Path]:
    """The documentation's files by topic. Raises ConfigurationError where the package was installed without them."""
    folder = _PACKAGE / "docs"
    if folder.is_dir():
        found = sorted(folder.glob("*.md"))
    else:  # in a checkout
        found = [*sorted((_PACKAGE.parent / "docs").glob("*.md")), _PACKAGE.parent / "CHANGELOG.md"]
    known = {path.stem.lower(): path for path in found if path.is_file()}
    if not known:
        raise ConfigurationError(f"{folder} is missing, and with it the pages: install vblackwell from its wheel")
    return known


def docs_command(topic: str | None = None) -> int:
    """Print the page about ``topic``, or which topics there are."""
    known = pages()
    if topic is None:
        for name, path in known.items():
            print(f"  {name:<13} {_title(path)}")
        print("\nvb docs TOPIC prints a page.")
    else:
        check_known("topic", topic, known)
        print(known[topic].read_text(encoding="utf-8"), end="")
    return 0


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").rstrip()


def version(own: str) -> str:
    """One line: this package's version ``own``, those of Python and torch, and the GPUs that the driver shows."""
    from vblackwell.machine.facts import list_gpus

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    gpus = ", ".join(gpu.name for gpu in list_gpus()) or "no GPU"
    return f"vblackwell {own}, Python {platform.python_version()}, {torch}, {gpus}"
