"""``python -m vblackwell`` is ``vb``."""

from __future__ import annotations

from vblackwell.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
