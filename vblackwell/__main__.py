"""``python -m vblackwell`` is ``vb``."""

from vblackwell.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
