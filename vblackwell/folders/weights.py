"""A folder as a model: built on the meta device from ``config.json``, and its files matched with it before any is read.

`transformers` writes the model's code; nothing of the folder is run. Parameters go to the meta device as each is
registered; buffers that no file holds are what the constructors compute on the CPU, with the bits of a model built
there.

Files name and cut tensors as their publishers did: Mixtral's hold a tensor for each expert's matrix, transformers'
model one for all; a folder may lack the head. transformers knows how the two correspond (its conversion mapping), and
is asked with tensors that have shapes and no bytes. Experts are read straight to their places in the parameter; rarer
conversions are computed from loaded tensors, one parameter at a time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from vblackwell.errors import ConfigurationError, CorruptData, FolderMismatch, Unsupported
from vblackwell.folders.folder import GENERATION, read_config, read_json, some_names, tensor_files
from vblackwell.folders.tensor_file import StoredTensor, TensorFile, all_finite, refuse_not_finite


def build_on_meta(
    folder: Path, dtype: torch.dtype | None, *, attention: str | None = None, trust_remote_code: bool = False,
    quantized: bool = False,
) -> nn.Module:  # fmt: skip
    """The model that ``folder``/config.json describes; no weight file is looked at.

    Args:
        dtype: of its parameters; None: what config.json says.
        attention: transformers' ``attn_implementation``; by default what it chooses, and 'sdpa' for 'flex_attention' in
            the file, which compiles for every length.
        trust_remote_code: let transformers run code that lies in the folder, where the architecture is not its own.
        quantized: take a folder of quantised weights too; the model is the one that they were made of.

    Raises:
        ConfigurationError: the file is missing, or describes no causal model that can be built.
        CorruptData: it is not JSON.
        Unsupported: its weights are quantised, or the architecture is not transformers' and its code is not trusted.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    file, raw = folder / "config.json", read_config(folder)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ConfigurationError(f"{file} names no model_type: give the config.json that the model was published with")
    if raw.get("quantization_config") and not quantized:
        raise Unsupported(f"{file}: the weights are quantised; training starts from the folder they were made of")
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        remote = "auto_map" in raw
        raise Unsupported(
            f"{file}: transformers has no architecture {kind!r}; "
            + (
                "the folder brings code for it, which is run with trust_remote_code alone"
                if remote
                else "update transformers"
            )
        )
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        if attention is None and config._attn_implementation == "flex_attention":
            options["attn_implementation"] = "sdpa"
        config.__dict__.pop("quantization_config", None)  # of the weights, which the caller fills
        if (chosen := dtype or config.dtype) is not None:
            options["dtype"] = chosen
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # each architecture raises what it likes at values that it cannot use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"{file}: transformers builds no causal model of it ({reason}); give the config.json that the weights were "
            "published with"
        ) from error
    if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):  # from_config does not look at it
        model.generation_config = _generation_config(folder)
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        raise Unsupported(f"{file}: the code of {kind!r} leaves the buffer {unknown[0]!r} without a value")
    return model.train()


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    read_json(folder / GENERATION)  # says by name what is wrong with it
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{folder / GENERATION}: transformers does not take it ({' '.join(str(error).split())}); mend or remove it"
        ) from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While this lasts, parameters of modules that this thread builds go to the meta device; tensors and buffers stay
    real."""
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
    """What one parameter, or several that are cut from the same tensors, are filled from.

    ``target`` is the first of them; ``converter`` of transformers, None if one tensor is taken as it is; ``sources``
    the tensors by the converter's pattern ('' without one), in the order in which they are joined.
    """

    target: str
    converter: Any = None
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    def tensors(self) -> Iterator[StoredTensor]:
        """All of ``sources``."""
        for stored in self.sources.values():
            yield from stored

    def convert(self, model: Any, *, meta: bool) -> dict[str, Tensor]:
        """The model's tensors by name; with ``meta`` their shapes alone."""
        converter = deepcopy(self.converter)
        for pattern, tensors in self.sources.items():
            for stored in tensors:
                value = torch.empty(stored.shape, dtype=stored.dtype, device="meta") if meta else stored.load()
                converter.add_tensor(self.target, stored.name, pattern, value)
        made = converter.convert(self.target, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def joined_along(self) -> int | None:
        """0 or 1 if tensors are stacked along a new first dimension and then joined along this one; else None."""
        operations = [
            (type(operation).__name__, getattr(operation, "dim", None)) for operation in self.converter.operations
        ]
        if operations[:1] != [("MergeModulelist", 0)] or len(self.converter.target_patterns) != 1:
            return None
        if operations[1:] == [("Concatenate", 1)]:
            return 1
        return 0 if not operations[1:] and len(self.sources) == 1 else None


class FolderWeights:
    """The open weight files of a folder, matched with a model on the meta device; a context manager.

    It is the ``initialize`` of `enable_vgpu_stack_optimization`: called with a parameter's name and a CPU tensor,
    it fills it.

    Args:
        model: one of transformers' (`build_on_meta`), or any module whose names are the files'.
        only: names of tensors; the others of the folder are not looked at, nor what else the model wants.

    Raises:
        FolderMismatch: tensors are missing, too many, or of another shape or kind; all are named.
        ConfigurationError: the folder holds no safetensors.
        CorruptData: a file is missing or cut short, or its table is none; or tied parameters have different values.
    """

    def __init__(self, model: nn.Module, folder: Path, only: Collection[str] | None = None) -> None:
        self.folder = folder
        self._model, self._whole = model, only is None
        self._ready: dict[str, Tensor] = {}
        with ExitStack() as opened:
            stored = _open_tables(folder, opened)
            self._files = stored
            self._stored = stored if only is None else {name: stored[name] for name in only}
            self._targets = dict(model.state_dict(keep_vars=True))
            self._recipes: dict[str, Recipe] = {}
            extra, misshapen = self._match()
            self._check(extra, misshapen)
            self._check_tied()
            self._opened = opened.pop_all()

    @property
    def names(self) -> list[str]:
        """The model's tensors that can be filled."""
        return list(self._recipes)

    def name_in_files(self, name: str) -> str:
        """The files' name for the model's tensor ``name``; its own where it is computed, of several tensors or a part
        of one."""
        recipe = self._recipes[name]
        return name if recipe.converter is not None else next(recipe.tensors()).name

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._targets[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which the files hold what the tensor ``name`` is filled from."""
        return next(self._recipes[name].tensors()).dtype

    def load(self, name: str) -> Tensor:
        """The folder's tensor ``name``, matched or not, as it is stored; raises DiskError."""
        return self._files[name].load()

    def __enter__(self) -> FolderWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        self._ready.clear()

    def __call__(self, name: str, out: Tensor) -> None:
        """Fill ``out`` with the parameter ``name``, cast to ``out``'s type; raises ConfigurationError, with the file,
        where it holds NaN or inf, or DiskError."""
        if name not in self._recipes:
            name = next(alias for alias in self._aliases(name) if alias in self._recipes)
        recipe = self._recipes[name]
        self._read(name, recipe, out)
        if isinstance(self._targets[name], nn.Parameter) and not all_finite(out):  # masks, which are buffers, hold -inf
            for stored in recipe.tensors():
                refuse_not_finite(stored.load(), stored.name, stored.file.path)
            raise ConfigurationError(
                f"{self.folder}: {name} has values beyond {out.dtype}: choose a wider type for the weights"
            )

    def _read(self, name: str, recipe: Recipe, out: Tensor) -> None:
        if recipe.converter is None:
            ((stored,),) = recipe.sources.values()
            stored.read_into(out)
            return
        dim = recipe.joined_along()
        if dim is not None:
            _join(recipe, out, dim)
            return
        if name not in self._ready:
            self._ready |= recipe.convert(self._model, meta=False)
        out.copy_(self._ready.pop(name))

    @torch.no_grad()
    def load_buffers(self) -> None:
        """Fill the model's buffers that the folder holds; they are real already."""
        for name, target in self._targets.items():
            if not isinstance(target, nn.Parameter):
                self(name, target)

    def _match(self) -> tuple[list[StoredTensor], list[tuple[str, str]]]:
        """Recipes for the model's tensors; what nothing wants, and (name, why) of what cannot be used."""
        model: Any = self._model
        extra, groups = list[StoredTensor](), dict[str, Recipe]()
        if not hasattr(model, "base_model_prefix"):  # its names are the files', and transformers is not imported for it
            extra = [stored for name, stored in self._stored.items() if name not in self._targets]
            known = sorted(self._targets.keys() & self._stored.keys(), key=_by_parts)
            groups = {name: Recipe(name, None, {"": [self._stored[name]]}) for name in known}
            return extra, [wrong for recipe in groups.values() for wrong in self._check_recipe(recipe)]
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping, prefix = get_model_conversion_mapping(model), model.base_model_prefix
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for name in sorted(self._stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._targets)
            if target not in self._targets and name in self._targets:
                target, pattern = rename_source_key(name, [], [], prefix, self._targets)
            if target not in self._targets:
                extra.append(self._stored[name])
                continue
            recipe = groups.setdefault(target, Recipe(target, None if pattern is None else by_pattern[pattern]))
            recipe.sources.setdefault(pattern or "", []).append(self._stored[name])
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # saving reverts what loading did
        return extra, [wrong for recipe in groups.values() for wrong in self._check_recipe(recipe)]

    def _check_recipe(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Enter the recipe for what it makes; yield (name, why) of what does not fit."""
        target = recipe.target
        where = some_names(sorted({stored.file.path.name for stored in recipe.tensors()}))
        try:
            if recipe.converter is None:
                stored, *more = recipe.tensors()
                if more:
                    yield (
                        target,
                        f"is there {1 + len(more)} times (as {some_names([stored.name] + [one.name for one in more])})",
                    )
                made = {target: torch.empty(stored.shape, dtype=stored.dtype, device="meta")}
            else:
                made = recipe.convert(self._model, meta=True)
        except Exception as error:  # the library's operations raise what torch raises
            self._recipes[target] = recipe
            yield target, f"cannot be put together from {where} ({' '.join(str(error).split())})"
            return
        for name, value in made.items():
            wanted = self._targets.get(name)
            if wanted is None:
                continue
            self._recipes[name] = recipe
            if value.shape != wanted.shape:
                yield name, f"{tuple(value.shape)} in {where} instead of {tuple(wanted.shape)}"
            elif value.dtype != wanted.dtype and not (value.is_floating_point() and wanted.is_floating_point()):
                yield name, f"{value.dtype} in {where} instead of {wanted.dtype}"

    def _wants(self, name: str) -> bool:
        """Whether the files must fill the model's tensor ``name``."""
        return self._whole

    def _aliases(self, name: str) -> list[str]:
        """The names of what ``name`` names: several where parameters are tied."""
        target = self._targets[name]
        return [alias for alias, other in self._targets.items() if other is target]

    def _check(self, extra: list[StoredTensor], misshapen: list[tuple[str, str]]) -> None:
        model: Any = self._model
        have = {id(self._targets[name]) for name in self._recipes}
        missing = [name for name, target in self._targets.items() if id(target) not in have and self._wants(name)]
        ignored = [_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        extra = [stored for stored in extra if not any(re.search(pattern, stored.name) for pattern in ignored)]
        if not (missing or extra or misshapen):
            return
        found = (
            ("lacks", missing),
            ("has in excess", [f"{stored.name} ({stored.file.path.name})" for stored in extra]),
            ("has otherwise", [f"{name} {why}" for name, why in misshapen]),
        )
        files = some_names([path.name for path in tensor_files(self.folder)])
        reasons = "; it ".join(f"{verb} {some_names(names)}" for verb, names in found if names)
        raise FolderMismatch(
            f"{self.folder} ({files}) does not fit the model of its config.json: it {reasons}. Fetch the folder again, "
            "or give the config.json that its weights were written with",
            missing=missing,
            extra=[stored.name for stored in extra],
            misshapen=[name for name, _ in misshapen],
        )

    def _check_tied(self) -> None:
        """Where the files hold a tied parameter under several names, the values must be one."""
        held: dict[int, list[str]] = {}
        for name in (name for name in self._targets if name in self._recipes):
            held.setdefault(id(self._targets[name]), []).append(name)
        for first, *others in held.values():
            for other in others:
                one, two = next(self._recipes[first].tensors()), next(self._recipes[other].tensors())
                if not one.equals(two):
                    raise CorruptData(
                        f"{self.folder / 'config.json'} ties {first} and {other}, and {one.file.path.name} and "
                        f"{two.file.path.name} hold different values for them: set tie_word_embeddings to false there, "
                        "or fetch the folder again"
                    )


@torch.no_grad()
def _by_parts(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 10 after layer 9, as transformers sorts names: what is written keeps this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _join(recipe: Recipe, out: Tensor, dim: int) -> None:
    """Read what is stacked along ``out``'s first dimension, and joined along its dimension 1 where ``dim`` says so."""
    begin = 0
    for pattern in recipe.converter.source_patterns:
        tensors = recipe.sources.get(pattern, [])
        rows = tensors[0].shape[0] if dim == 1 and tensors else None
        for index, stored in enumerate(tensors):
            stored.read_into(out[index] if rows is None else out[index, begin : begin + rows])
        begin += rows or 0


def _open_tables(folder: Path, opened: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, its file open; raises CorruptData where a name is in two files, or not in the
    one that the index says."""
    stored: dict[str, StoredTensor] = {}
    for path in tensor_files(folder):
        file = opened.enter_context(TensorFile(path))
        for name, tensor in file.tensors.items():
            if name in stored:
                raise CorruptData(
                    f"{name} is in {stored[name].file.path} and in {path.name}: fetch or write the folder again"
                )
            stored[name] = tensor
    index = folder / "model.safetensors.index.json"
    if len({tensor.file.path for tensor in stored.values()}) > 1:
        wrong = [
            f"{name} into {place}"
            for name, place in read_json(index)["weight_map"].items()
            if name not in stored or stored[name].file.path.name != place
        ]
        if wrong:
            raise CorruptData(f"{index} puts {some_names(wrong)}, where it is not: fetch or write the folder again")
    if not stored:
        raise ConfigurationError(f"{folder}: its safetensors hold no tensors; fetch or write the folder again")
    return stored
