"""How fast a disk level is on this machine, and how far a lossless codec gets with what would be there: measured once, kept in the cache.

The disk: what `vb doctor` measures, kept by mount point. The codec: what the level's threads do to pieces
(`vblackwell.memory.codec_speed`) of weights of the model that is about to be trained, and of what AdamW makes of them in a few steps with
drawn gradients whose size differs from row to row. Moments of a real run hold zeros besides, for rows that were never looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import Unsupported, VBError
from vblackwell.kernels.runtime.nvrtc import write_atomically
from vblackwell.machine.cache import cache_root
from vblackwell.machine.facts import disk_facts
from vblackwell.machine.rates import DISK_BYTES_PER_SECOND
from vblackwell.memory import lossless
from vblackwell.memory.cache.entry import layout_of
from vblackwell.memory.codec_speed import codec_speed
from vblackwell.memory.disk import THREADS
from vblackwell.numerics.fp4 import quantize
from vblackwell.offload.measure import disk_gbps
from vblackwell.offload.storage.moments import quantised
from vblackwell.planner.compression import CodecSpeed, DiskSpeed, not_hidden

ELEMENTS = 1 << 21  # 8 MiB of fp32, a piece of a disk level
ROW = 256
FROM_ONE = 8  # a tensor gives at most so large a part of the sample
STEPS, LEARNING_RATE, BETAS, EPSILON = 6, 3e-4, (0.9, 0.95), 1e-8
SPREAD = 1.0  # of the logarithm of the gradients' size between rows


@dataclass(frozen=True)
class Sample:
    """Weights to measure with.

    Attributes:
        elements: makes them, flat fp32. name: what they are, for people. key: tells them from others in the cache.
    """

    elements: Callable[[], Tensor]
    name: str
    key: str


def sample_of(model: nn.Module | None, folder: Path | None) -> Sample:
    """Weights of ``folder``, where the model has one and floating-point matrices are in it; else the model's own, or drawn like them."""
    if folder is not None:
        changed = [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
        key = hashlib.blake2b(repr((str(folder.resolve()), changed)).encode(), digest_size=8).hexdigest()
        count = sum(min(shape.numel(), ELEMENTS // FROM_ONE) for _, shape in _stored(folder))
        drawn = "" if count >= ELEMENTS else f" ({count / ELEMENTS:.0%} of the sample, the rest drawn)"
        return Sample(lambda: _of_tensors(_beginnings(folder)), f"weights of {folder.name}{drawn}", key)
    return Sample(lambda: _of_tensors(_own(model)), "weights as they are drawn", "drawn")


def _own(model: nn.Module | None) -> Iterator[Tensor]:
    for param in () if model is None else model.parameters():
        if param.dim() > 1 and param.is_floating_point() and not param.is_meta:
            yield param.detach().flatten()[: ELEMENTS // FROM_ONE].float()


def _stored(folder: Path) -> Iterator[tuple[Any, torch.Size]]:
    """The folder's floating-point matrices, to be read in parts, with their shapes."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it has no __iter__)
                part: Any = file.get_slice(name)
                shape = torch.Size(part.get_shape())
                if len(shape) > 1 and shape.numel() and part.get_dtype() in ("F32", "BF16", "F16"):
                    yield part, shape


def _beginnings(folder: Path) -> Iterator[Tensor]:
    most = ELEMENTS // FROM_ONE
    for part, shape in _stored(folder):
        yield part[: max(1, most // shape[1:].numel())].flatten()[:most].float()


def _of_tensors(parts: Iterable[Tensor]) -> Tensor:
    """`ELEMENTS` of them; what is missing is drawn."""
    found, count = [], 0
    for part in parts:
        found.append(part[: ELEMENTS - count])
        count += len(found[-1])
        if count == ELEMENTS:
            break
    if count < ELEMENTS:
        made = torch.Generator().manual_seed(0)
        found.append(torch.randn(ELEMENTS - count, generator=made) * 0.02)
    return torch.cat(found).contiguous()


@torch.no_grad()
def bytes_like(kinds: Iterable[str], weights: Tensor) -> dict[str, Tensor]:
    """Values of each kind (`vblackwell.planner.compression.kinds_on`) after a few steps of AdamW without decay from
    ``weights``, flat fp32."""
    master, first, second = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    beta1, beta2 = BETAS
    for step, gradient in enumerate(gradients(len(weights)), start=1):
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(EPSILON)
        master.addcdiv_(first, root, value=-LEARNING_RATE / (1 - beta1**step))
    return {kind: _values(kind, master, first, second) for kind in kinds}


def gradients(count: int) -> Iterator[Tensor]:
    """Of `STEPS` steps: normal numbers, of another size in every row."""
    made = torch.Generator().manual_seed(0)
    size = torch.exp(SPREAD * torch.randn(count // ROW, 1, generator=made)) * 1e-4
    for _ in range(STEPS):
        yield (torch.randn(count // ROW, ROW, generator=made) * size).view(-1)


def _values(kind: str, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    if kind.endswith(" weights"):
        dtype: torch.dtype = getattr(torch, kind.removesuffix(" weights"))
        if dtype == torch.uint8:
            return layout_of(quantize(weights.view(-1, ROW), "nvfp4"))[1][0]
        return weights.to(dtype)
    if kind == "remainders":  # bits(master) = (bits(weight) << 16) + remainder
        narrow = weights.bfloat16().view(torch.int16).int() << 16
        return (weights.view(torch.int32) - narrow).to(torch.int16)
    values, name = (second, "exp_avg_sq") if "second" in kind else (first, "exp_avg")
    return quantised(values, name)[0] if kind.startswith("8-bit") else values


# -- measured once ---------------------------------------------------------------------------------------------------------


@dataclass
class DiskSpeeds:
    """Answers what a plan asks of its disk level: from the cache, else measured now and kept there.

    Args:
        path: the level's folder.
        asked: 'lossless' or 'none' where the user has decided.
        say: told before anything is measured; None: nothing is, and what is not in the cache is not known.
    """

    path: str
    sample: Sample
    asked: str | None = None
    say: Callable[[str], None] | None = None
    _found: dict[frozenset[str], DiskSpeed] = field(default_factory=dict)

    def __call__(self, kinds: Iterable[str]) -> DiskSpeed:
        """Rates of the disk, and the codec's on ``kinds``; what cannot be had has its reason in ``refused``.

        Raises:
            Unsupported: a codec is asked for, and the package zstandard is not installed.
        """
        wanted = frozenset(kinds)
        if wanted not in self._found:
            self._found[wanted] = self._look(wanted)
        return self._found[wanted]

    def _look(self, kinds: frozenset[str]) -> DiskSpeed:
        read, write, source, refused = self._disk()
        found = DiskSpeed(read, write, source, asked=self.asked, refused=refused)
        if self.asked == "none" or (refused and self.asked is None):
            return found
        try:
            codec, codec_source = self._codec(kinds)
        except Unsupported as error:
            if self.asked is not None:
                raise
            return DiskSpeed(read, write, source, refused=str(error))
        refused = refused if codec else "compression was not measured here: run vb doctor"
        return DiskSpeed(read, write, source, codec, codec_source, self.asked, refused, not_hidden(_cores(), THREADS))

    def _disk(self) -> tuple[float, float, str, str]:
        file, of = _disk_of(self.path)
        where, kept = of["mount"], _read(file, of)
        if kept is None and self.say is not None:
            self.say(f"measuring the disk at {where}, once (vb doctor does it again)")
            try:
                kept = keep_disk(self.path, disk_gbps(self.path))
            except VBError as error:
                kept = {"refused": str(error)}
        if kept is None or "refused" in kept:
            reason = "the disk was not measured here: run vb doctor" if kept is None else str(kept["refused"])
            return DISK_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND, "assumed", reason
        return float(kept["read"]) * 1e9, float(kept["write"]) * 1e9, f"measured at {where}, {of['file_system']}", ""

    def _codec(self, kinds: frozenset[str]) -> tuple[dict[str, CodecSpeed], str]:
        speeds = _kept_codec(self.sample)
        missing = sorted(kinds - set(speeds))
        if missing and self.say is None:
            return {}, ""
        if missing:
            assert self.say is not None
            self.say(f"measuring lossless compression of {', '.join(missing)}, once")
            speeds |= keep_codec(self.sample, missing)
        source = f"{self.sample.name} and states of {STEPS} AdamW steps, {_cores()} cores"
        return {kind: speeds[kind] for kind in kinds}, source


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def keep_codec(sample: Sample, kinds: Iterable[str]) -> dict[str, CodecSpeed]:
    """Measure the codec on ``kinds`` of bytes, and remember it beside those that were measured before.

    Raises:
        Unsupported: the package zstandard is not installed.
    """
    of = _codec_of(sample)
    found = {kind: CodecSpeed(*codec_speed([values])) for kind, values in bytes_like(kinds, sample.elements()).items()}
    speeds = {kind: astuple(speed) for kind, speed in (_kept_codec(sample) | found).items()}
    write_atomically(_codec_file(sample), json.dumps(of | {"speeds": speeds}, indent=2).encode())
    return found


def _codec_of(sample: Sample) -> dict[str, Any]:
    """What rates of a codec are of: they mean nothing elsewhere."""
    version = lossless.require_zstandard().__version__
    cores = _cores()
    return {"of": sample.name, "cores": cores, "threads": THREADS, "zstandard": version, "elements": ELEMENTS}


def _codec_file(sample: Sample) -> Path:
    return _folder() / f"codec-{sample.key}.json"


def _kept_codec(sample: Sample) -> dict[str, CodecSpeed]:
    kept = _read(_codec_file(sample), _codec_of(sample))
    try:
        return {} if kept is None else {kind: CodecSpeed(*speed) for kind, speed in kept["speeds"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}


def keep_disk(path: str, rates: dict[str, Any]) -> dict[str, Any]:
    """Remember what `disk_gbps` found of the disk at ``path``, unless it was refused; ``rates`` with what they are of."""
    file, of = _disk_of(path)
    if "refused" not in rates:
        write_atomically(file, json.dumps(of | rates, indent=2).encode())
    return of | rates


def _disk_of(path: str) -> tuple[Path, dict[str, Any]]:
    """Where rates of the disk at ``path`` are kept, and what they are of: they mean nothing elsewhere."""
    where = _mount_of(Path(path))
    of = {"mount": str(where), "file_system": disk_facts(path).file_system, "device": os.stat(where).st_dev}
    return _folder() / f"disk-{_slug(str(where))}.json", of


def _mount_of(path: Path) -> Path:
    """Where the file system of ``path`` is mounted."""
    found = path.resolve()
    while not os.path.ismount(found):
        found = found.parent
    return found


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-") or "root"


def _folder() -> Path:
    return cache_root() / "rates"


def _read(file: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """What the file holds, if it is of the same things."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return values if all(values[name] == value for name, value in of.items()) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
