"""``vb quantize``: a Hugging Face folder in, the same folder with packed linears out, complete or not at all.

Tensors stream twice (for tensor scales and bad values, then to be packed), with memory for one layer. The others are
copied, in the type that transformers runs the format in; a parameter that it makes of several tensors is written as
one.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported, VBError
from vblackwell.folders import compressed_tensors
from vblackwell.folders.checked import LIMITS
from vblackwell.folders.commit import MANIFEST, CommitFolder
from vblackwell.folders.folder import load_specs, read_config, read_json, stored_dtype
from vblackwell.folders.tensor_file import SafetensorsShards, TensorSpec
from vblackwell.folders.weights import FolderWeights, stays_fp32
from vblackwell.generate.load import load_model, model_on_meta, resolve_model
from vblackwell.kernels.fp4.encode import quantize, separate
from vblackwell.kernels.fp4.w4a8 import MIN_ROWS, check_device, check_packed, check_shape
from vblackwell.nn.convert.assignment import DEFAULT_BUDGET, Assignment, assign_precision, mean_loss
from vblackwell.nn.convert.linears import HEAD, find_linears, head_and, needed_to_initialize, nothing_selected
from vblackwell.nn.linear.packed_linear import is_transposed, sizes_of, turned
from vblackwell.numerics.formats import Format, check_search, format_named
from vblackwell.numerics.fp4 import joint_tensor_scale
from vblackwell.numerics.sqnr import decibels, noise_and_signal
from vblackwell.units import MiB, format_bytes

# Projections that runtimes fuse into one matrix, and that therefore share a tensor scale.
_FUSED = (re.compile(r"^(.*\.)?(q|k|v)_proj$"), re.compile(r"^(.*\.)?(gate|up)_proj$"), re.compile(r"^(.*\.)?w[13]$"))
_SEQUENCES, _SEQ_LENGTH = 16, 256  # of a calibration: its windows
_BATCH = 4  # windows of a calibration in one forward


@dataclass(frozen=True)
class PackedLayer:
    """A linear of shape (N, K) that was packed, energies of noise and signal, and the bytes of its weight on disk."""

    name: str
    shape: tuple[int, int]
    noise: float
    signal: float
    bytes_before: int
    bytes_after: int

    @property
    def sqnr_db(self) -> float:
        return decibels(self.noise, self.signal)


@dataclass
class QuantizeReport:
    """What becomes of each tensor of a folder, from tables alone; and, as they are packed, the ``layers``."""

    packed: dict[str, tuple[int, int]]  # linear -> (N, K)
    two_parts: set[str]  # of those
    kept: dict[str, str]  # linear -> why
    specs: list[TensorSpec]  # of the output
    sources: dict[str, str]  # what is copied: its name there -> the model's
    bytes_before: int
    dtype_before: torch.dtype
    dtype: torch.dtype
    foreign: set[str]  # classes of packed linears in whose place no other package puts a packed one
    layers: list[PackedLayer] = field(default_factory=list)

    @property
    def sqnr_db(self) -> float:
        """Of all packed weights."""
        return decibels(sum(layer.noise for layer in self.layers), sum(layer.signal for layer in self.layers))

    @property
    def bytes_after(self) -> int:
        """Of all tensors."""
        return sum(spec.size_bytes for spec in self.specs)


def quantize_folder(
    model: Path | str,
    out: Path | str,
    format: str = "nvfp4",
    scale_search: str = "mse",
    *,
    block_size: int | None = None,
    pattern: str = "all",
    keep: str | Sequence[str] = HEAD,
    device: torch.device | str = "cpu",
    assignment: Assignment | None = None,
    w4a8: bool = False,
    on_layer: Callable[[PackedLayer, int, int], None] | None = None,
) -> QuantizeReport:
    """Packs the linears of a Hugging Face folder into ``out``, which is replaced if this wrote it. ``format``,
    ``scale_search``, ``block_size``: as for ``vblackwell.quantize``; ``pattern``, ``keep``: which linears, as for
    ``select_linears``, or those that an ``assignment`` puts in nvfp4 or in two parts; ``w4a8``: refuse what FP8
    activations do not go with; ``on_layer`` is called with each packed layer, its number and their count.

    Raises ConfigurationError: no such model, nothing to pack, weights with inf or NaN, ``out`` is in use, or the
    assignment is for another model or packs what cannot be packed; FolderMismatch, CorruptData: its files are not those
    of its config.json, or damaged; Unsupported: the model is quantised already, transformers cannot open packed folders
    of its architecture, or w4a8 does not take a weight; DiskError: the disk is full or failed; nothing is left under
    ``out`` then.
    """
    source, target = Path(model), Path(out)
    form = format_named(format, block_size)
    check_search(scale_search)
    config = read_config(source)
    if config.get("quantization_config"):
        raise Unsupported(f"{source} is quantised already: give the folder with the original weights")
    _check_target(source, target)
    if assignment is not None and form.name != "nvfp4":
        raise ConfigurationError(f"an assignment packs to nvfp4, not {form.name}: drop --format, or the assignment")
    module, resolved = model_on_meta(source), target.resolve()
    with FolderWeights(module, source) as weights:
        why = find_linears(module, pattern, keep, transposed=True)
        if None not in why.values():
            raise nothing_selected(module, pattern, why)
        report = _planned(module, weights, form, why, assignment)
        for name, shape in report.packed.items() if w4a8 else ():
            check_shape(form.name, *shape, f"{name}.weight")
        packer = _Packer(report, module, weights, form, scale_search, device, w4a8, on_layer)
        with CommitFolder(resolved.parent, resolved.name, report.bytes_after) as folder:
            of = (form, report.kept, report.two_parts)
            written = compressed_tensors.quantization_config(*of, alone=bool(report.foreign))
            folder.add_json("config.json", _in_type(config, report.dtype) | {"quantization_config": written})
            weight_files = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")
            for path in sorted(source.iterdir()):  # tokenizer, generation settings and whatever else is there
                left = path.name in ("config.json", MANIFEST) or path.name.endswith(weight_files)
                if path.is_file() and not left:
                    with path.open("rb") as file, folder.open(path.name) as copy:
                        shutil.copyfileobj(file, copy, 16 * MiB)
            with SafetensorsShards(folder, "model", report.specs) as shards:
                for name in shards.names:
                    shards.write(name, packer.tensor(name))
    return report


def _in_type(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``config`` of a model in ``dtype``, and so of the parts that state theirs."""
    changed = {key: value for key, value in config.items() if key != "torch_dtype"}
    for key, value in changed.items():
        if isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
            changed[key] = _in_type(value, dtype)
    return changed | {"dtype": str(dtype).removeprefix("torch.")}


def quantize_command(
    model: str,
    out: str,
    format: str = "nvfp4",
    scale_search: str = "mse",
    block_size: int | None = None,
    pattern: str = "all",
    keep: str | None = None,
    device: torch.device | str = "cpu",
    assignment: str | None = None,
    budget: float | None = None,
    max_bits: float | None = None,
    calibration: str | None = None,
    fp8_activations: bool = False,
) -> int:
    """Run ``vb quantize``: a line a layer while it works, then sizes before and after; 0. With ``budget`` or
    ``max_bits`` it first measures which linears bear nvfp4, and keeps that as ``OUT.assignment.json``; with
    ``fp8_activations`` it ends with what packing to mxfp4, and FP8 activations in addition, do to the loss.
    """

    def say(layer: PackedLayer, number: int, count: int) -> None:
        shape = "x".join(map(str, layer.shape))
        print(f"[{number:>{len(str(count))}}/{count}] {layer.name:<48} {shape:>13} {layer.sqnr_db:6.2f} dB", flush=True)

    source, _ = resolve_model(model)
    how: dict[str, Any] = {"pattern": pattern, "keep": head_and(keep), "device": device}
    chosen = None if assignment is None else Assignment.load(assignment)
    text = None if calibration is None else Path(calibration)
    if fp8_activations:
        check_device(torch.device(device), "--fp8-activations")
        if format != "mxfp4" or chosen is not None:
            said = "measures folders of mxfp4 alone: add --format mxfp4, or drop it"
            raise ConfigurationError(f"--fp8-activations {said}")
    path = f"{out.rstrip('/')}.assignment.json"  # of --budget and --max-bits
    with _telling_what_is_there(Path(out), Path(path)):
        if budget is not None or max_bits is not None:
            if chosen is not None:
                raise ConfigurationError("--assignment is the choice that --budget and --max-bits would make: give one")
            if format != "nvfp4":
                said = "--budget and --max-bits choose between nvfp4 and no packing"
                raise ConfigurationError(f"{said}: drop --format {format}")
            _check_target(source, Path(out))  # as packing will
            chosen = calibrate(source, text, budget, max_bits=max_bits, **how)
            rise = 100 * (chosen.measured["loss_after"] / chosen.measured["loss"] - 1)
            coarse, both = len(chosen.names("nvfp4")), len(chosen.names("two-part"))
            if not coarse and not both:
                remedy = "allow more, or give other --calibration"
                raise ConfigurationError(f"no linear may be packed within the budget: {remedy}")
            print(
                f"{coarse} of {len(chosen.shapes)} linears in nvfp4, {both} in two parts, {chosen.bits:.2f} bits a "
                f"weight: calibration loss {chosen.measured['loss']:.4f}, {rise:+.3f} % with them; kept as {path}"
            )
            chosen.save(path)
        elif calibration is not None and not fp8_activations:
            raise ConfigurationError("--calibration is for --budget, --max-bits or --fp8-activations: give one of them")
        batches = calibration_batches(source, text, device, MIN_ROWS) if fp8_activations else []
        how |= {"block_size": block_size, "assignment": chosen, "w4a8": fp8_activations}
        report = quantize_folder(source, out, format, scale_search, on_layer=say, **how)
        _tell(report, source, out, format)
        if batches:
            loss = mean_loss(load_model(source, device), batches)
            for w4a8, said in ((False, f"calibration loss {loss:.4f}, packed"), (True, "with --fp8-activations too")):
                rise = 100 * (mean_loss(load_model(Path(out), device, w4a8=w4a8), batches) / loss - 1)
                print(f"{said} {rise:+.3f} %", flush=True)
    return 0


@contextmanager
def _telling_what_is_there(out: Path, choice: Path) -> Iterator[None]:
    """An interrupt inside says what it leaves at ``out``, which is replaced as a whole or not at all, and whether the
    file ``choice`` was made."""

    def inode(path: Path) -> int | None:
        return path.stat().st_ino if path.exists() else None

    before = inode(out), inode(choice)
    try:
        yield
    except KeyboardInterrupt:
        if (now := inode(out)) != before[0]:
            said = f"{out} is complete"
        else:
            said = f"{out} was not written" if now is None else f"{out} is as it was"
        if inode(choice) != before[1]:
            said += f"; what was measured is kept: --assignment {choice} packs by it"
        raise KeyboardInterrupt(said) from None


def _tell(report: QuantizeReport, source: Path, out: str, format: str) -> None:
    """What was packed and what was not, and sizes before and after."""
    for name, reason in report.kept.items():
        print(f"kept {name}: {reason}")
    experts = [spec.size_bytes for name, spec in load_specs(source).items() if ".experts." in name]
    if experts and not any(".experts." in layer.name for layer in report.layers):
        print(f"kept {len(experts)} tensors of experts, {format_bytes(sum(experts))}: they are no linears of the model")
    worst = min(report.layers, key=lambda layer: layer.sqnr_db)
    before, after = (sum(getattr(layer, f"bytes_{when}") for layer in report.layers) for when in ("before", "after"))
    print(
        f"{len(report.layers)} linears in {format}: {report.sqnr_db:.2f} dB, worst {worst.sqnr_db:.2f} ({worst.name})"
    )
    print(f"packed weights {format_bytes(before)} -> {format_bytes(after)}")
    if report.dtype != report.dtype_before:
        old, new = (str(dtype).removeprefix("torch.") for dtype in (report.dtype_before, report.dtype))
        print(f"all other tensors {old} -> {new}, in which compressed-tensors decodes {format}")
    if report.foreign:
        names = ", ".join(sorted(report.foreign))
        print(f"linears of the class {names} have no packed form in transformers and vLLM: vb alone opens the folder")
    print(f"model {format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)} in {out}")


def calibrate(
    folder: Path, data: Path | None, budget: float | None, device: torch.device | str = "cpu", **options: Any
) -> Assignment:
    """The cheapest assignment of precisions within ``budget``, a relative rise of the loss (None: 0.004), or as the
    ``options`` of `assign_precision` say: windows of the text ``data`` (None: the Python standard library's sources) go
    through the whole model twice for each linear, in nvfp4 and in two parts. Raises ConfigurationError: no tokenizer,
    too little text, or as `assign_precision`; FolderMismatch, CorruptData, Unsupported: the folder cannot be opened.
    """
    batches = calibration_batches(folder, data, device)
    model = load_model(folder, device)
    return assign_precision(model, batches, DEFAULT_BUDGET if budget is None else budget, **options)


def calibration_batches(
    folder: Path, data: Path | None, device: torch.device | str, rows: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets for the model in ``folder`` of the text ``data``, each of ``rows`` tokens at least; raises as
    `calibrate`."""
    import numpy as np

    from vblackwell.data.corpus import PackedDataset, prepare_data

    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{folder} has no tokenizer.json: calibration needs the model's own tokenizer")
    config = read_config(folder)
    limit = next((config[name] for name in LIMITS if isinstance(config.get(name), int)), _SEQ_LENGTH)
    corpus, length = prepare_data(data, folder), min(_SEQ_LENGTH, limit)
    size = max(_BATCH, -(-rows // length))
    needed = (length + 1) * (2 * size if rows else 2)  # some are held out
    if len(corpus.tokens) < needed:
        raise ConfigurationError(
            f"{corpus.name} has {len(corpus.tokens)} tokens: calibration needs at least {needed}; give more text"
        )
    windows = PackedDataset(corpus, length)
    count = min(max(_SEQUENCES, size), len(windows))
    count -= count % size if rows else 0
    drawn = [windows.batch(np.arange(start, min(start + size, count))) for start in range(0, count, size)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]


def _planned(
    module: nn.Module, weights: FolderWeights, form: Format, why: dict[str, str | None], assignment: Assignment | None
) -> QuantizeReport:
    """What becomes of the linears ``why`` (`find_linears`), and of everything else."""
    before, held = stored_dtype(weights.folder), set(weights.names)
    shapes = {name: sizes_of(module.get_submodule(name)) for name in why if f"{name}.weight" in held}
    two_parts = set[str]()
    if assignment is not None:
        assignment.check(shapes, "that of the folder")
        left = {name for name in why if assignment.precisions.get(name, "bf16") == "bf16"}
        assigned = "the assignment keeps it as it is"
        why = {name: reason or (assigned if name in left else None) for name, reason in why.items()}
        two_parts = set(assignment.names("two-part"))
    chosen = [name for name, reason in why.items() if reason is None]
    # transformers puts packed linears in the place of nn.Linear, and initializes a FalconLinear that lacks its weight.
    foreign = {type(module.get_submodule(name)).__name__ for name in chosen} - {"Linear"}
    if form.name in compressed_tensors.KINDS and not foreign:  # transformers opens such folders
        _refuse_what_transformers_cannot_run(module, form, before)
        reason = "transformers reads its weight when it opens a packed folder"
        why |= dict.fromkeys(needed_to_initialize(module, chosen), reason)
    kept, packed = dict[str, str](), dict[str, tuple[int, int]]()
    for name, reason in why.items():  # in the model's order
        if reason is None and name not in shapes:
            reason = "the folder stores it under another name"
        reason = reason or "; ".join(compressed_tensors.not_packable_reasons(form, *shapes[name]))
        if reason:
            kept[name] = reason
        else:
            packed[name] = shapes[name]
    if not packed:
        first = next(f"{name} ({reason})" for name, reason in kept.items())
        raise ConfigurationError(f"no linear of the model can be packed as {form.name}: {first}, ...")
    dtype = before if foreign else compressed_tensors.runs_in(form, before)
    specs, sources, size = list[TensorSpec](), dict[str, str](), 0
    for name in weights.names:
        own, shape, owner = weights.dtype_of(name), weights.shape_of(name), name.removesuffix(".weight")
        size += TensorSpec(name, shape, own).size_bytes
        if name.endswith(".weight") and owner in packed:
            entries = compressed_tensors.entry_specs(form, *packed[owner], fine=owner in two_parts)
            specs += [replace(entry, name=f"{owner}.{entry.name}") for entry in entries.values()]
            continue
        if own.is_floating_point and dtype != before and not stays_fp32(module, name, dtype):
            own = dtype
        specs.append(TensorSpec(weights.name_in_files(name), shape, own))
        sources[specs[-1].name] = name
    return QuantizeReport(packed, two_parts & set(packed), kept, specs, sources, size, before, dtype, foreign)


def _refuse_what_transformers_cannot_run(model: Any, form: Format, dtype: torch.dtype) -> None:
    """Raises Unsupported where transformers (5.23) runs no such folder of the architecture of ``model`` in ``form``."""
    if not hasattr(model, "base_model_prefix"):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    kind, dtype = type(model).__name__, compressed_tensors.runs_in(form, dtype)
    reasons = [
        f"it wants packed names of {entry.source_patterns[0]}, which it cuts up"
        for entry in get_model_conversion_mapping(model)
        if isinstance(entry, WeightConverter)
        and len(entry.target_patterns) > 1
        and all(pattern.endswith(".weight") for pattern in entry.source_patterns)
        # Operations that join and cut at once say so, since some version after 5.17.
        and not any(getattr(operation, "supports_many_to_many", False) for operation in entry.operations)
    ]
    if any(type(module).__name__ == "Llama4TextExperts" for module in model.modules()):
        reasons.append("it makes modules of the experts")
    if dtype != torch.float32 and kind in ("CTRLLMHeadModel", "XLNetLMHeadModel"):
        reasons.append(f"it runs the model in float32 alone, and {form.name} in {dtype}")
    if form.name in ("int4", "int8") and stays_fp32(model, "weight_scale", dtype):
        reasons.append(f"it keeps the scales of {form.name}, and so the weights, in float32")
    if reasons:
        raise Unsupported(
            f"transformers runs no folder of {kind} packed to {form.name}: {reasons[0]}. Give --format nf4, which this "
            "package alone reads, or pack while a model is opened: vb generate --use-fp4"
        )


@dataclass
class _Packer:
    """Produces the output's tensors in whatever order they are wanted, packing a linear when its first entry is."""

    report: QuantizeReport
    model: nn.Module
    weights: FolderWeights
    form: Format
    scale_search: str
    device: torch.device | str
    w4a8: bool
    on_layer: Callable[[PackedLayer, int, int], None] | None

    def __post_init__(self) -> None:
        self._dtypes = {spec.name: spec.dtype for spec in self.report.specs}  # of what is copied
        self._scales = self._tensor_scales() if self.form.name == "nvfp4" else {}
        self._waiting = {
            f"{name}.{compressed_tensors.GLOBAL}": scale.reciprocal().reshape(1) for name, scale in self._scales.items()
        }

    def tensor(self, name: str) -> Tensor:
        source = self.report.sources.get(name)
        if source is not None:
            return self.weights.read(source, self._dtypes[name])
        if name not in self._waiting:
            self._pack(name.rpartition(".")[0])
        return self._waiting.pop(name)

    def _weight(self, linear: str) -> Tensor:
        name = f"{linear}.weight"
        weight = self.weights.read(name, self.weights.dtype_of(name), self.device)
        return turned(weight, is_transposed(self.model.get_submodule(linear)))

    def _tensor_scales(self) -> dict[str, Tensor]:
        """nvfp4's tensor scale of each linear, one for each set that runtimes fuse."""
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        for number, name in enumerate(self.report.packed):
            matches = [(i, match[1] or "") for i, pattern in enumerate(_FUSED) if (match := pattern.match(name))]
            groups[matches[0] if matches else (-1 - number, name)].append(name)
        scales = {}
        for names in groups.values():
            own = [joint_tensor_scale([self._weight(name)], "nvfp4", self.scale_search, names=[name]) for name in names]
            scales.update(dict.fromkeys(names, torch.stack(own).amax()))  # the rule is monotone in the largest element
        return scales

    def _pack(self, linear: str) -> None:
        weight, report = self._weight(linear), self.report
        how: dict[str, Any] = {"tensor_scale": self._scales.get(linear), "name": f"{linear}.weight"}
        if linear in report.two_parts:
            packed = separate(weight, self.scale_search, **how)
        else:
            packed = quantize(weight, self.form.name, self.scale_search, block_size=self.form.block_size, **how)
        if self.w4a8:
            check_packed(packed, f"{linear}.weight")
        entries = {f"{linear}.{entry}": tensor for entry, tensor in compressed_tensors.to_entries(packed).items()}
        after = sum(tensor.nbytes for tensor in entries.values())
        entries.pop(f"{linear}.{compressed_tensors.GLOBAL}", None)  # written already, from the first pass
        self._waiting.update(entries)
        energies = noise_and_signal(weight, packed.dequantize(torch.float32))
        layer = PackedLayer(linear, report.packed[linear], *energies, weight.nbytes, after)
        report.layers.append(layer)
        if self.on_layer is not None:
            self.on_layer(layer, len(report.layers), len(report.packed))


def _written(target: Path) -> Iterable[str]:
    """Files that the manifest of ``target`` has; none where it cannot be read."""
    try:
        files = read_json(target / MANIFEST).get("files")
    except VBError:
        files = None
    return files if isinstance(files, dict) else ()


def _check_target(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        raise ConfigurationError(f"--out {target} is the model itself: choose another folder")
    if target.resolve() in source.resolve().parents:
        raise ConfigurationError(f"--out {target} holds the model, and would be replaced: choose another folder")
    committed = all((target / name).is_file() for name in (MANIFEST, "config.json"))
    ours = committed and read_config(target).get("quantization_config")  # else it may be the model of a run
    if target.exists() and not ours and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"--out {target} exists and was not written by this command: choose another folder")
    if ours:
        written = {MANIFEST} | {name.partition("/")[0] for name in _written(target)}
        if strange := sorted(each.name for each in target.iterdir() if each.name not in written):
            shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
            raise ConfigurationError(
                f"--out {target} is replaced as a whole, and holds what this command did not write ({shown}): move "
                "that away, or choose another folder"
            )
