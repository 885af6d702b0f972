"""A run's folder: what lies where, who may use it, and whether it holds something to go on from.

    settings.json    the settings, as resolved
    metrics.jsonl    a line a step          tensorboard/   the same for TensorBoard
    checkpoints/     step-00000100/ ...     final/         the trained model, a Hugging Face folder
    adapter/         with --lora, as peft opens it; final/ has it merged, as --merge says
    report.json      the table at the end   trace.json     with --profile

Nothing is created before the run is sure to start.
"""

import difflib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.folders.commit import clean_leftovers
from vblackwell.machine.lock import Locked, lock_file, refuse_locked
from vblackwell.train.metrics import METRICS_NAME, TENSORBOARD

FINAL, ADAPTER, CHECKPOINTS = "final", "adapter", "checkpoints"
SETTINGS, REPORT, TRACE, LOCK = "settings.json", "report.json", "trace.json", ".lock"
T = TypeVar("T")
RUNS, MAX_SHOWN = Path("runs"), 4
_HASH = "xxh3"  # of the settings, in their own file
_KEPT = SETTINGS, METRICS_NAME, CHECKPOINTS, FINAL  # of which a run that has begun has one


class RunFolder:
    """``path`` as a run's folder; nothing is written or locked yet. Raises ConfigurationError: it is the folder of the
    run's ``model``, a file, a dangling link or below one, holds a run that ``resume`` does not ask for, or a file where
    a run has a folder or the reverse; DiskError: it may not be written to.
    """

    def __init__(self, path: Path, resume: bool, model: str | None = None) -> None:
        self.path, self.checkpoints, self.final = path, path / CHECKPOINTS, path / FINAL
        self._lock: int | None = None  # the descriptor that holds it
        if not resume and model is not None and path.is_dir() and path.resolve() == Path(model).resolve():
            raise ConfigurationError(f"--out {path} is the folder of --model: choose another --out")
        nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not nearest.is_dir():
            below = f": {nearest}" if nearest != path else ""
            kind = "a file" if nearest.exists() else "a link to what is not there"
            raise ConfigurationError(f"--out {path}{below} is {kind}: choose another --out")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise DiskError(f"--out {path}: {nearest} may not be written to: choose another --out")
        for names, is_wrong, kind in (
            ((FINAL, ADAPTER, CHECKPOINTS, TENSORBOARD), lambda it: it.exists() and not it.is_dir(), "a folder"),
            ((METRICS_NAME, SETTINGS, REPORT, TRACE, LOCK), Path.is_dir, "a file"),
        ):
            for misplaced in (path / name for name in names if is_wrong(path / name)):
                advice = "as a run has there: move it away, or choose another --out"
                raise ConfigurationError(f"--out {path}: {misplaced} is not {kind}, {advice}")
        self._had_run = self.has_run
        if not resume and self._had_run:
            raise ConfigurationError(f"--out {path} holds a run: add --resume to go on, or choose another --out")

    @property
    def has_run(self) -> bool:
        return holds_run(self.path)

    def lock(self) -> None:
        """Keep other processes out of the folder, which is there, and remove what a killed one left half written.
        Raises ConfigurationError: another one uses it, or has begun a run there since this one began; DiskError."""
        self._lock = self._ask(lock_file)
        if self.has_run and not self._had_run:
            self.release()
            said = "has come to hold a run of another process since this one began: choose another"
            raise ConfigurationError(f"--out {self.path} {said}")
        for name in (SETTINGS, REPORT):  # of a process that was killed while it wrote them
            _fresh(self.path / name).unlink(missing_ok=True)
        clean_leftovers(self.path, FINAL)
        clean_leftovers(self.path, ADAPTER)  # which take room, too; nobody else writes here while it is locked
        clean_leftovers(self.checkpoints)

    def refuse_in_use(self) -> None:
        """Raise as `lock` where another process uses the folder, which may not be there; nothing is locked."""
        self._ask(refuse_locked)

    def create(self) -> None:
        """Make the folder if need be, and `lock` it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"cannot create run folder {self.path}: {error.strerror}; choose another --out") from error
        if self._lock is None:
            self.lock()

    def write_json(self, name: str, value: Any) -> None:
        """``value`` into file ``name``, atomically. Raises DiskError."""
        path = self.path / name
        fresh = _fresh(path)
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except OSError as error:
            raise DiskError(f"writing {path} failed: {error.strerror}; make room, or choose another --out") from error

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Keep what the run is started with, and a hash of it."""
        self.write_json(SETTINGS, settings | {_HASH: _hash_of(settings)})

    def release(self) -> None:
        """Let others use the folder. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _ask(self, of_lock: Callable[[Path], T]) -> T:
        path = self.path / LOCK
        try:
            return of_lock(path)
        except Locked as holder:
            raise ConfigurationError(
                f"run folder {self.path} is in use by process {holder}: wait for it, or choose another --out"
            ) from None
        except OSError as error:
            advice = "make room if its disk is full, or choose another --out"
            raise DiskError(f"cannot lock the run folder: {path}: {error.strerror}; {advice}") from error


def _fresh(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _hash_of(settings: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())


def read_stored_config(folder: Path) -> dict[str, Any] | None:
    """The settings that the run in ``folder`` was started with; None if it never got that far. Raises DiskError: the
    file cannot be read; CorruptData: it is not what was written, and another run would be computed.
    """
    path, remedy = folder / SETTINGS, "remove it to resume with the flags alone"
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DiskError(f"{path} cannot be read: {error.strerror}; check the disk") from error
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(stored, dict):
        raise CorruptData(f"{path} holds no settings: {remedy}")
    written = stored.pop(_HASH, None)
    if written is not None and written != _hash_of(stored):
        raise CorruptData(
            f"{path} is not what the run wrote (its XXH3 is another): put back what was changed ('config' in a "
            f"checkpoint's trainer.json has the values), or {remedy}"
        )
    return stored


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in ``folder``."""
    return any((folder / name).exists() for name in _KEPT)


def find_run(out: str | None, of: dict[str, Any]) -> Path:
    """The folder of the run that ``--resume`` goes on with: ``out``, or the newest in runs/ that was started with the
    settings ``of``. Raises ConfigurationError: there is none.
    """
    if out is not None:
        if not Path(out).exists() or (Path(out).is_dir() and not holds_run(Path(out))):
            near = _runs_near(out)
            raise ConfigurationError(f"--resume: --out {out} holds no run to go on with{near or '; drop --resume'}")
        return Path(out)
    found = [folder for folder in _runs_in(RUNS) if _may_be(folder, of)]
    if not found:
        flags = {"preset": "--config", "model": "--model"}
        given = "".join(f" with {flags[name]} {value}" for name, value in of.items())
        said = f"no run in ./{RUNS} was started{given}"
        raise ConfigurationError(f"--resume: {said}: drop --resume, or name the run's folder with --out")
    return found[0]


def refuse_folder_after_resume(word: str) -> None:
    """Raises ConfigurationError: ``--resume`` was given ``word``, as if it took a folder."""
    said = "--resume takes no folder: the run's goes with --out"
    if holds_run(Path(word)):
        raise ConfigurationError(f"{said}: vb train --resume --out {word}")
    raise ConfigurationError(f"{said}, and {word} holds no run{_runs_near(word)}")


def _may_be(folder: Path, of: dict[str, Any]) -> bool:
    """Whether the run in ``folder`` was started so, or its settings cannot be read, which is then said."""
    try:
        stored = read_stored_config(folder) if of else None
    except (CorruptData, DiskError):
        stored = None
    return stored is None or all(stored.get(name) == value for name, value in of.items())


def _runs_in(folder: Path) -> list[Path]:
    """Runs, the newest first: by what was written last."""
    try:
        runs = [path for path in folder.iterdir() if path.is_dir() and holds_run(path)]
    except OSError:
        return []
    return sorted(runs, key=lambda run: max(_written(run / name) for name in _KEPT), reverse=True)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _runs_near(name: str) -> str:
    """The ending of a sentence about a folder that holds no run: the nearest that does, or the newest; may be empty."""
    above = next((parent for parent in Path(name).parents if holds_run(parent)), None)  # of its final, or a checkpoint
    folders = dict.fromkeys((Path(name).parent, RUNS))
    runs = {run.name: str(run) for folder in folders for run in _runs_in(folder)}
    cases = {run.lower(): path for run, path in runs.items()}
    near = [cases[found] for found in difflib.get_close_matches(Path(name).name.lower(), cases, n=1)]
    if above is not None or near:
        return f"; did you mean {str(above or near[0])!r}?"
    return f"; there is {', '.join(list(runs.values())[:MAX_SHOWN])}" if runs else ""


def default_out(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist yet."""
    names = (RUNS / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in names if not os.path.lexists(path))
