"""Puts docs/*.md and the changelog into the wheel, as ``vblackwell/docs``: the repository has one copy of each page.

All else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithDocs(build_py):
    def _pages(self) -> dict[str, Path]:
        """The files to write, below the build folder, and what each is a copy of."""
        found = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]
        return {f"{self.build_lib}/vblackwell/docs/{path.name.lower()}": path for path in found}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there vblackwell/tools/docs.py reads the checkout's
            for target, page in self._pages().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(str(page), target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._pages()]


setup(cmdclass={"build_py": BuildWithDocs})
