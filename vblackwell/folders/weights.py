"""A folder as a model: built on the meta device from ``config.json``, and its files matched with it before any is read.

Files name and cut tensors as their publishers did (Mixtral's hold a tensor for each expert's matrix, transformers'
model one for all; a folder may lack the head). transformers knows how the two correspond, and is asked with tensors
that have shapes and no bytes. Experts are read straight to their places in the parameter; rarer conversions are
computed from loaded tensors, one parameter at a time.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from vblackwell.errors import ConfigurationError, CorruptData, FolderMismatch, Unsupported
from vblackwell.folders.compressed_tensors import PackedLinears, not_trained
from vblackwell.folders.folder import GENERATION, read_config, read_json, some_names, tensor_files
from vblackwell.folders.tensor_file import StoredTensor, TensorFile, all_finite, refuse_not_finite
from vblackwell.units import MiB

MAX_PINNED_BYTES = 512 * MiB  # of a tensor on its way to a GPU: torch keeps what was pinned


def check_architecture(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises ConfigurationError where config.json names no architecture, Unsupported for an unknown one."""
    from transformers import CONFIG_MAPPING

    file, raw = folder / "config.json", read_config(folder)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ConfigurationError(f"{file} names no model_type: give the config.json that the model was published with")
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        brought = "the folder brings code for it, which is run with trust_remote_code alone"
        remedy = brought if "auto_map" in raw else "update transformers"
        raise Unsupported(f"{file}: transformers has no architecture {kind!r}; {remedy}")


def build_on_meta(
    folder: Path,
    dtype: torch.dtype | None,
    *,
    attention: str | None = None,
    trust_remote_code: bool = False,
    quantized: bool = False,
) -> nn.Module:
    """The model that ``folder``/config.json describes; no weight file is looked at, and no code of the folder is run.
    Buffers that no file holds are what the constructors compute on the CPU, with the bits of a model built there.

    ``dtype``: of its parameters, None: what config.json says; ``attention``: transformers' ``attn_implementation``, by
    default what it chooses, and 'sdpa' for 'flex_attention', which compiles for every length; ``trust_remote_code``: do
    run the folder's code, where the architecture is not transformers' own; ``quantized``: take a folder of quantised
    weights too, and give the model that they were made of. Raises ConfigurationError where no causal model can be
    built, CorruptData where the file is no JSON, Unsupported for quantised weights, or an architecture that is not
    known and not trusted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    file, raw = folder / "config.json", read_config(folder)
    if (stated := raw.get("quantization_config")) and not quantized:
        raise not_trained(folder, stated)
    check_architecture(folder, trust_remote_code)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        if attention is None and config._attn_implementation == "flex_attention":
            options["attn_implementation"] = "sdpa"
        config.__dict__.pop("quantization_config", None)  # of the weights, which the caller fills
        if dtype or config.dtype:
            options["dtype"] = dtype or config.dtype
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
        if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):  # from_config does not look at it
            file = folder / GENERATION
            read_json(file)  # says by name what is wrong with it
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except CorruptData:
        raise
    except Exception as error:  # each architecture raises what it likes at values that it cannot use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"{file}: transformers builds no causal model of it ({reason}); give the file that the weights were "
            "published with"
        ) from error
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        said = f"the code of {raw['model_type']!r} leaves the buffer {unknown[0]!r} without a value"
        raise Unsupported(f"{folder / 'config.json'}: {said}")
    return model.train()


def stays_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps the tensor ``name`` of a model in ``dtype`` in fp32, with which its code computes."""
    kinds = ["_strict"] * (dtype in (torch.float16, torch.bfloat16)) + [""] * (dtype == torch.float16)
    patterns = [pattern for kind in kinds for pattern in getattr(model, f"_keep_in_fp32_modules{kind}", None) or ()]
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)  # anywhere, as there


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Meanwhile, parameters of modules that this thread builds go to the meta device; buffers stay real."""
    thread, moved = threading.get_ident(), WeakIdKeyDictionary()

    def send(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != thread:
            return None
        if param not in moved:  # one that a constructor registers under two names stays one
            moved[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            moved[param].__dict__.update(param.__dict__)
        return moved[param]

    hook: Any = send  # typed as if it gave nothing back
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


_COMPUTED = r"rotary_emb\.inv_freq$"  # older folders hold it; every model computes it


@dataclass
class Recipe:
    """What one parameter, or several that are cut from the same tensors, are filled from."""

    target: str  # the first of them
    converter: Any  # of transformers; None if one tensor is taken as it is
    # By the converter's pattern ('' without one), in the order in which they are joined.
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[StoredTensor]:
        return [stored for tensors in self.sources.values() for stored in tensors]

    def convert(self, model: Any, *, meta: bool) -> dict[str, Tensor]:
        """The model's tensors by name; with ``meta`` their shapes alone."""
        converter = deepcopy(self.converter)
        for pattern, tensors in self.sources.items():
            for stored in tensors:
                value = torch.empty(stored.shape, dtype=stored.dtype, device="meta") if meta else stored.load()
                converter.add_tensor(self.target, stored.name, pattern, value)
        made = converter.convert(self.target, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def read_in_place(self, out: Tensor) -> bool:
        """Fill ``out`` without a copy if tensors are stacked along dimension 0, maybe joined along 1; whether so."""
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self.converter.operations]
        joins = operations[1:] == [("Concatenate", 1)]
        if operations[:1] != [("MergeModulelist", 0)] or len(self.converter.target_patterns) != 1:
            return False
        if not joins and (operations[1:] or len(self.sources) != 1):
            return False
        begin = 0
        for pattern in self.converter.source_patterns:
            tensors = self.sources.get(pattern, [])
            rows = tensors[0].shape[0] if joins and tensors else 0
            for index, stored in enumerate(tensors):
                stored.read_into(out[index, begin : begin + rows] if joins else out[index])
            begin += rows
        return True


class FolderWeights(AbstractContextManager["FolderWeights"]):
    """The open weight files of a folder, matched with a model on the meta device; a context manager, and the
    ``initialize`` of `enable_vgpu_stack_optimization`: called with a parameter's name and a CPU tensor, it fills it.

    ``model`` is one of transformers', or any module whose names are the files'. Raises FolderMismatch where tensors are
    missing, too many, or of another shape or kind (all are named), ConfigurationError where the folder holds no
    safetensors, CorruptData where a file is missing or cut short, its table is none, or tied parameters have different
    values.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.folder, self._model = folder, model
        self._ready: dict[str, Tensor] = {}  # converted and not asked for yet
        self._targets = dict(model.state_dict(keep_vars=True))
        self._recipes: dict[str, Recipe] = {}
        with ExitStack() as opened:
            self._files = _open_tables(folder, opened)
            self._check(*self._match(self._plain_names()))
            self._check_tied()
            self._opened = opened.pop_all()

    @property
    def names(self) -> list[str]:
        """The model's tensors by the names that the files have something for."""
        return list(self._recipes)

    @property
    def packing(self) -> PackedLinears | None:
        """The linears that the files hold packed; None where they hold none so."""
        return None

    def targets(self) -> dict[str, Tensor]:
        """The model's parameters and buffers that the files fill, by each of their names."""
        return {name: target for name, target in self._targets.items() if self._wants(name)}

    def name_in_files(self, name: str) -> str:
        """The files' name for the tensor ``name``; its own where it is not one whole tensor of theirs."""
        recipe = self._recipes[name]
        return name if recipe.converter is not None else recipe.tensors[0].name

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._targets[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which the files hold what the tensor ``name`` is filled from."""
        return self._recipes[name].tensors[0].dtype

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The model's tensor ``name`` in ``dtype`` on ``device``; raises as a call."""
        shape, device = self.shape_of(name), torch.device(device)
        pinned = device.type == "cuda" and prod(shape) * dtype.itemsize <= MAX_PINNED_BYTES
        value = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        self(name, value)
        return value.to(device)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        self._ready.clear()

    def __call__(self, name: str, out: Tensor) -> None:
        """Fill ``out`` with a parameter; raises ConfigurationError where it holds NaN or inf, or DiskError."""
        if name not in self._recipes:  # a tied parameter, which the files have under another name
            target = self._targets[name]
            name = next(alias for alias in self._recipes if self._targets[alias] is target)
        recipe = self._recipes[name]
        if recipe.converter is None:
            (stored,) = recipe.tensors
            stored.read_into(out)
        elif not recipe.read_in_place(out):
            if name not in self._ready:
                self._ready |= recipe.convert(self._model, meta=False)
            out.copy_(self._ready.pop(name))
        if isinstance(self._targets[name], nn.Parameter) and not all_finite(out):  # masks, which are buffers, hold -inf
            for stored in recipe.tensors:
                refuse_not_finite(stored.load(), stored.name, stored.file.path)
            raise ConfigurationError(
                f"{self.folder}: {name} has values beyond {out.dtype}: choose a wider type for the weights"
            )

    @torch.no_grad()
    def load_buffers(self) -> None:
        """Fill the model's buffers that the folder holds; they are real already."""
        for name, target in self._targets.items():
            if not isinstance(target, nn.Parameter):
                self(name, target)

    def _match(self, names: Iterable[str]) -> tuple[list[StoredTensor], list[str]]:
        """Recipes for the model's tensors; what nothing wants, and why some cannot be used."""
        extra, groups = list[StoredTensor](), dict[str, Recipe]()
        for name, target, converter, pattern in self._pairs(names):
            if target in self._targets:
                recipe = groups.setdefault(target, Recipe(target, converter))
                recipe.sources.setdefault(pattern, []).append(self._files[name])
            else:
                extra.append(self._files[name])
        return extra, [wrong for recipe in groups.values() for wrong in self._check_recipe(recipe)]

    def _pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str, Any, str]]:
        """Each name in the files with the model's for it, and the converter and its pattern if it needs one."""
        model: Any = self._model
        if not hasattr(model, "base_model_prefix"):  # its names are the files', and transformers is not imported for it
            yield from ((name, name, None, "") for name in sorted(names, key=_by_parts))
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping, prefix = get_model_conversion_mapping(model), model.base_model_prefix
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._targets)
            if target not in self._targets and name in self._targets:
                target, pattern = rename_source_key(name, [], [], prefix, self._targets)
            yield name, target, None if pattern is None else by_pattern[pattern], pattern or ""
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # saving reverts what loading did

    def _check_recipe(self, recipe: Recipe) -> Iterator[str]:
        """Enter the recipe for what it makes; yield what does not fit, and why."""
        target = recipe.target
        found = recipe.tensors
        where = some_names(sorted({stored.file.path.name for stored in found}))
        if recipe.converter is None and len(found) > 1:
            yield f"{target} is there {len(found)} times (as {some_names([stored.name for stored in found])})"
        try:
            made = {target: found[0]} if recipe.converter is None else recipe.convert(self._model, meta=True)
        except Exception as error:  # the library's operations raise what torch raises
            self._recipes[target] = recipe
            yield f"{target} cannot be put together from {where} ({' '.join(str(error).split())})"
            return
        for name, value in made.items():
            if (wanted := self._targets.get(name)) is None:
                continue
            self._recipes[name] = recipe
            if tuple(value.shape) != tuple(wanted.shape):
                yield f"{name} {tuple(value.shape)} in {where} instead of {tuple(wanted.shape)}"
            elif value.dtype != wanted.dtype and not (value.dtype.is_floating_point and wanted.is_floating_point()):
                yield f"{name} {value.dtype} in {where} instead of {wanted.dtype}"

    def _plain_names(self) -> Iterable[str]:
        """The files' tensors that stand for one tensor of the model, or a part of one."""
        return self._files

    def _wants(self, name: str) -> bool:
        return True

    def _check(self, extra: list[StoredTensor], misshapen: list[str]) -> None:
        have = {id(self._targets[name]) for name in self._recipes}
        missing = [name for name, target in self._targets.items() if id(target) not in have and self._wants(name)]
        ignored = [_COMPUTED, *(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        extra = [stored for stored in extra if not any(re.search(pattern, stored.name) for pattern in ignored)]
        if not (missing or extra or misshapen):
            return
        found = (
            ("lacks", missing),
            ("has in excess", [f"{stored.name} ({stored.file.path.name})" for stored in extra]),
            ("has otherwise", misshapen),
        )
        files = some_names([path.name for path in tensor_files(self.folder)])
        reasons = "; it ".join(f"{verb} {some_names(names)}" for verb, names in found if names)
        raise FolderMismatch(
            f"{self.folder} ({files}) does not fit the model of its config.json: it {reasons}. Fetch the folder again, "
            "or give the config.json that its weights were written with",
            missing=missing,
            extra=[stored.name for stored in extra],
            misshapen=[wrong.partition(" ")[0] for wrong in misshapen],
        )

    def _check_tied(self) -> None:
        held: dict[int, list[str]] = {}
        for name, target in self._targets.items():
            if name in self._recipes:
                held.setdefault(id(target), []).append(name)
        for first, other in ((first, other) for first, *others in held.values() for other in others):
            one, two = self._recipes[first].tensors[0], self._recipes[other].tensors[0]
            if not one.equals(two):
                raise CorruptData(
                    f"{self.folder / 'config.json'} ties {first} and {other}, and {one.file.path.name} and "
                    f"{two.file.path.name} hold different values for them: set tie_word_embeddings to false there, or "
                    "fetch the folder again"
                )


def _by_parts(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 10 after layer 9, as transformers sorts names: what is written keeps this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _open_tables(folder: Path, opened: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, its file open; raises CorruptData for one in two files, or in another."""
    stored: dict[str, StoredTensor] = {}
    for path in tensor_files(folder):
        for name, tensor in opened.enter_context(TensorFile(path)).tensors.items():
            if stored.setdefault(name, tensor) is not tensor:
                place = stored[name].file.path
                raise CorruptData(f"{name} is in {place} and in {path.name}: fetch or write the folder again")
    index = folder / "model.safetensors.index.json"
    if len({tensor.file.path for tensor in stored.values()}) > 1:
        there = {name: tensor.file.path.name for name, tensor in stored.items()}
        places = read_json(index)["weight_map"].items()
        wrong = [f"{name} into {place}" for name, place in places if there.get(name) != place]
        if wrong:
            raise CorruptData(f"{index} puts {some_names(wrong)}, where it is not: fetch or write the folder again")
    if not stored:
        raise ConfigurationError(f"{folder}: its safetensors hold no tensors; fetch or write the folder again")
    return stored
