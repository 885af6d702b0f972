"""Which linears of any model may be replaced by packed ones, and their replacement on the same parameters.

A forward that multiplies by ``self.dt_proj.weight`` (Mamba) cannot be run on a model without values, so the source of
transformers' module is searched for that (`reads_weight`). transformers' ``_init_weights`` can: it runs when a packed
folder is opened there, for modules that lack a weight, and fails where it reads one (`needed_to_initialize`).
"""

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import hooked
from vblackwell.nn.linear.packed_linear import is_transposed, rounding, sizes_of
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.nn.linear.two_part import BITS, Settings, VBOptimizedLinear
from vblackwell.numerics.formats import Format, format_named
from vblackwell.numerics.packed import PackedTensor
from vblackwell.units import columns, format_bytes

HEAD = r"(^|\.)(lm_head|embed_out|output_projection|classifier|score|head)$"
LARGE_ELEMENTS, NAMED_ELEMENTS = 1 << 20, 1 << 24  # layers of the latter are named when they are replaced
# Bloom reads it to repeat what several GPUs once summed, the others for the type of flash attention in fp32.
_HARMLESS_READERS = ("modeling_bloom", "modeling_falcon", "modeling_gptj", "modeling_gpt_neo")
_INIT = re.compile(r"^    def _init_weights\(.*?(?=^    def |^\S|\Z)", re.MULTILINE | re.DOTALL)


def find_linears(
    model: nn.Module, pattern: str = "all", keep: str | Sequence[str] = HEAD, *, transposed: bool = False
) -> dict[str, str | None]:
    """Every module of ``model`` that is a linear: why it is not replaced, or None if it may be. ``pattern`` is 'all',
    'large' or a regular expression searched for in names, ``keep`` one or several for names that stay; ``transposed``:
    the caller takes transformers' `Conv1D`, whose weight is stored as (inputs, outputs). Raises ConfigurationError: one
    of them is no regular expression.
    """
    wanted, kept = _compiled(pattern), [_compiled(each) for each in ([keep] if isinstance(keep, str) else keep)]
    owners: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(f"{prefix}.{name}" if prefix else name)
    head, found = head_of(model), dict[str, str | None]()
    for name, module in model.named_modules():
        if isinstance(module, FusedFP4Linear):
            found[name] = "it is a FusedFP4Linear already"
            continue
        turned_over = is_transposed(module)
        if not (isinstance(module, nn.Linear) or turned_over):
            continue
        own = f"{name}.weight" if name else "weight"
        weight: Any = module._parameters.get("weight")
        others = [other for other in owners[id(weight)] if other != own]
        # The only other class known to compute as nn.Linear does and to be only called.
        read, kind, plain = reads_weight(model, name), type(module).__name__, type(module) is nn.Linear
        plain = plain or turned_over or f"{type(module).__module__}.{kind}".endswith(".modeling_falcon.FalconLinear")
        small = pattern == "large" and plain and weight is not None and weight.numel() < LARGE_ELEMENTS
        reasons = {
            "the output head: its error reaches the logits directly": module is head,
            f"its weight is shared with {''.join(others[:1])}: packing one would untie them": others,
            "its name is among those to keep": any(each.search(name) for each in kept),
            "it is the model itself, which cannot be replaced in place": not name,
            "its weight is stored as (inputs, outputs), which this does not take": turned_over and not transposed,
            "an adapter's own matrix, which is trained as it is": name and _in_adapter(model, name),
            f"{read}": read,
            f"{kind} is another class than nn.Linear: its owner may read the weight without calling it": not plain,
            "it has hooks, which would be lost": hooked(module),
            f"smaller than {LARGE_ELEMENTS} elements": small,
            f"its name does not match {pattern!r}": pattern not in ("all", "large") and not wanted.search(name),
        }
        found[name] = next((reason for reason, holds in reasons.items() if holds), None)
    return found


def head_of(model: nn.Module) -> nn.Module | None:
    """The output head that a model of transformers names."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def _in_adapter(model: nn.Module, name: str) -> bool:
    """Whether the module belongs to what an adapter adds around its ``base_layer``, as peft's layers have it."""
    owner: Any = model
    for part in name.split("."):
        if "base_layer" in owner._modules and part != "base_layer":
            return True
        owner = owner._modules[part]
    return False


def head_and(keep: str | None) -> tuple[str, ...]:
    """The expressions for names that stay: the output head's, and ``keep``, which may begin with flags and so is not
    joined to it. Raises ConfigurationError: that is no regular expression."""
    return (HEAD,) if keep is None else (HEAD, _compiled(keep).pattern)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigurationError(f"{expression!r} is no regular expression: {error}") from error


def select_linears(
    model: nn.Module, pattern: str = "all", keep: str | Sequence[str] = HEAD, *, transposed: bool = False
) -> dict[str, nn.Linear]:
    """The linears that `find_linears` lets be packed, by module name; ConfigurationError for none."""
    return _selected(model, pattern, find_linears(model, pattern, keep, transposed=transposed))


def _selected(model: nn.Module, pattern: str, found: Mapping[str, str | None]) -> dict[str, nn.Linear]:
    selected: dict[str, Any] = {name: model.get_submodule(name) for name, reason in found.items() if reason is None}
    if not selected:
        raise nothing_selected(model, pattern, found)
    return selected


def nothing_selected(model: nn.Module, pattern: str, found: Mapping[str, str | None]) -> ConfigurationError:
    """What to say where no linear is selected: an example for each reason."""
    by_reason = defaultdict[str | None, list[str]](list)
    for name, reason in found.items():
        by_reason[reason].append(name)
    examples = ((reason, name, len(others)) for reason, (name, *others) in by_reason.items())
    left = [f"{name}{f' and {more} more' if more else ''} ({reason})" for reason, name, more in examples]
    said = ", ".join(left) or "it has none"
    return ConfigurationError(f"{pattern!r} selects no linear of {type(model).__name__}: {said}")


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is in ``model``, under every name, in one walk."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def replace_linears(model: nn.Module, linears: Mapping[str, nn.Linear], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put ``make(linear)`` in the place of each; where one cannot be made, nothing has changed."""
    replace_modules(model, {linear: make(linear).train(linear.training) for linear in linears.values()})


def store_linears(
    model: nn.Module, pattern: str = "all", keep: str | None = None, format: str = "nvfp4", **how: bool
) -> dict[str, str | None]:
    """Put a `StoredFP4Linear`, bytes on the meta device, in the place of the selected linears; ``how``: its ``tiled``
    and ``w4a8`` or ``w4a4``. Returns every linear: why it was left, or None; ConfigurationError if nothing is selected,
    or one of them has a shape or format that these do not take.
    """
    found = find_linears(model, pattern, head_and(keep), transposed=True)
    _store(model, _selected(model, pattern, found), format_named(format), (), **how)
    return found


def store_packed(
    model: nn.Module, linears: Mapping[str, bool], form: Format, *, tiled: bool = False, **rounds: bool
) -> None:
    """The same for the linears that are packed to ``form`` already, by their names in the folder (also where adapters
    are around them), in two parts where the value is True; ``tiled`` where the form has tiles. ConfigurationError for
    one that the model does not have, or of a shape that ``rounds`` does not take."""
    inside = {name: f"{name}.base_layer" for name in linears}
    held = dict(model.named_modules())
    chosen = {name: linear_of(model, inside[name] if inside[name] in held else name) for name in linears}
    tiled = tiled and form.name in ("nvfp4", "mxfp4")
    _store(model, chosen, form, [name for name, fine in linears.items() if fine], tiled=tiled, **rounds)


def _store(model: nn.Module, chosen: Mapping[str, nn.Linear], form: Format, fine: Collection[str], **how: bool) -> None:
    checks = rounding(how.get("w4a8", False), how.get("w4a4", False))
    made: dict[nn.Module, nn.Module] = {}
    for name, linear in chosen.items():
        if checks is not None:
            precision = "two-part" if name in fine else form.name
            checks.check_shape(precision, *sizes_of(linear), f"{name}.weight")
        made[linear] = StoredFP4Linear(linear, form, fine=name in fine, **how)
    replace_modules(model, made)


def install_packed(model: nn.Module, name: str, packed: PackedTensor, **rounds: bool) -> None:
    """Puts a packed weight where the linear ``name`` is, maybe on the meta device; its bias stays. ``rounds``: ``w4a8``
    or ``w4a4``. See `linear_of`, and with these their `check_packed`."""
    linear, checks = linear_of(model, name, packed.shape), rounding(**rounds)
    if checks:
        checks.check_packed(packed, f"{name}.weight")
    kind = FusedFP4Linear if packed.fine is None else VBOptimizedLinear
    made = kind.from_packed(packed, linear.bias, **(rounds if checks else {}))
    replace_modules(model, {linear: made.train(linear.training)})


def linear_of(model: nn.Module, name: str, shape: tuple[int, ...] | None = None) -> nn.Linear:
    """The linear ``name``, which a packed weight of this shape, or any, may replace, or ConfigurationError."""
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise ConfigurationError(f"the model has no module {name!r}: the packed file belongs to another") from error
    known: Any = linear if isinstance(linear, nn.Linear) or is_transposed(linear) else None
    if known is None or shape not in (None, sizes_of(known)):
        packed = "there is a packed weight" if shape is None else f"the packed weight has shape {shape}"
        raise ConfigurationError(f"{name} is {linear}, {packed}: the file belongs to another model")
    return known


def enable_vb_optimization(
    model: nn.Module,
    mode: str = "auto",
    enable_quantization: bool = True,
    enable_fp4: bool = True,
    replace_pattern: str = "all",
    *,
    verbose: bool = False,
    **renewal: Any,
) -> nn.Module:
    """Put weights in two parts into ``model``, in place, and return it.

    Every chosen linear becomes a `VBOptimizedLinear` on the very same parameters: dtypes, ties and optimizers stay.

    Args:
        mode: 'training' multiplies by rounded weights and trains the parameters straight through; 'inference' packs
            each layer at its first forward, or at ``quantize()``, and lets the parameter go; 'auto' trains where
            gradients are on, and packs in addition to the parameter where not.
        enable_quantization, enable_fp4: both: coarse + fine, 8.5 bits. FP4 alone: nvfp4, 4.5 bits. Quantisation alone:
            int8 by rows, 8 bits.
        replace_pattern: 'all', 'large' (2^20 elements and more) or a regular expression searched for in names.
        verbose: say on standard error how many layers were replaced, and name large ones with their sizes.
        renewal: ``refresh_every`` and ``drift_threshold`` of `Settings`: when kept scales are renewed.

    Raises ConfigurationError, the model as it was, for a value out of range, both switches off, or nothing selected.
    """
    settings = Settings.of(mode, enable_quantization, enable_fp4, **renewal)
    chosen = select_linears(model, replace_pattern)
    if verbose:
        weights = sum(linear.weight.numel() for linear in chosen.values())
        held = format_bytes(sum(linear.weight.nbytes for linear in chosen.values()))
        packed = format_bytes(int(weights * BITS[settings.precision] / 8))
        counted = f"{len(chosen)} linears of {weights / 1e6:.1f} M weights"
        lines = [f"{settings.precision}: {counted}, {held} now, {packed} packed"]
        for number, (name, linear) in enumerate(chosen.items(), 1):
            if linear.weight.numel() >= NAMED_ELEMENTS:
                shape = "x".join(map(str, linear.weight.shape))
                lines.append(f"  {number} of {len(chosen)}: {name} {shape}, {format_bytes(linear.weight.nbytes)}")
        print(*lines, sep="\n", file=sys.stderr)
    replace_linears(model, chosen, lambda linear: VBOptimizedLinear.from_linear(linear, **asdict(settings)))
    return model


class VBModelWrapper(nn.Module):
    """A model with weights in two parts, and what became of it. Calls and unknown attributes go to the model.

    Arguments and errors are those of `enable_vb_optimization`, which changes ``model`` in place.
    """

    model: nn.Module

    def __init__(
        self, model: nn.Module, mode: str = "auto", replace_pattern: str = "all", verbose: bool = False, **options: Any
    ) -> None:
        super().__init__()
        options |= {"replace_pattern": replace_pattern, "verbose": verbose}
        self.model = enable_vb_optimization(model, mode, **options)
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def replaced_modules(self) -> dict[str, VBOptimizedLinear]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, VBOptimizedLinear)}

    def get_all_stats(self) -> dict[str, dict[str, Any]]:
        """`VBOptimizedLinear.stats` by name: a few numbers a replaced layer. Waits for the device."""
        return {name: layer.stats() for name, layer in self.replaced_modules.items()}

    def print_all_stats(self) -> None:
        stats, table = self.get_all_stats(), [("name", "shape", "weight", "cached", "steps", "renewals", "drift")]
        for name, row in stats.items():
            sizes = (format_bytes(row["weight_bytes"]), format_bytes(row["cached_bytes"]))
            shape, drift = "x".join(map(str, row["shape"])), "" if row["drift"] is None else f"{row['drift']:.3f}"
            table.append((name, shape, *sizes, str(row["steps"]), str(row["renewals"]), drift))
        weight, cached = (sum(row[f"{what}_bytes"] for row in stats.values()) for what in ("weight", "cached"))
        said = f"{len(stats)} layers, {format_bytes(weight)} of weights, {format_bytes(cached)} of caches"
        print(*columns(table, range(1, 7)), said, sep="\n")


def reads_weight(model: nn.Module, name: str) -> str | None:
    """Where the code of transformers that owns the linear ``name`` reads its weight; None if it only calls it."""
    path, _, leaf = name.rpartition(".")
    for owner in {type(model), type(model.get_submodule(path))}:
        file = owner.__module__.rpartition(".")[2]
        if not owner.__module__.startswith("transformers.models.") or file in _HARMLESS_READERS:
            continue
        if leaf in _leaves_read(owner.__module__):
            return f"{file} reads its weight without calling it"
    return None


@functools.cache
def _leaves_read(module: str) -> frozenset[str]:
    file = sys.modules[module].__file__
    source = _INIT.sub("", Path(file or "").read_text(encoding="utf-8"))
    return frozenset(re.findall(r"\.(\w+)\.weight\b(?!_)", source))


def needed_to_initialize(model: Any, names: Collection[str]) -> list[str]:
    """Those of the linears ``names`` whose weight the ``_init_weights`` of a model of transformers, on meta, reads."""
    if not hasattr(model, "_init_weights"):
        return []
    linears, needed = {model.get_submodule(name): name for name in names}, list[str]()
    without = {linear: linear._parameters.pop("weight") for linear in linears}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for module, initialize in _initialized(model, model._init_weights):
                while True:
                    try:
                        initialize(module)
                        break
                    except AttributeError as error:
                        lacking: Any = error.obj
                        if error.name != "weight" or lacking not in without:
                            raise
                        lacking._parameters["weight"] = without.pop(lacking)
                        needed.append(linears[lacking])
    finally:
        for linear, weight in without.items():
            linear._parameters["weight"] = weight
    return needed


def _initialized(module: Any, initialize: Any) -> Any:
    """Modules, each with what initializes it: that of the nearest model of transformers around it."""
    for child in module.children():
        yield from _initialized(child, getattr(child, "_init_weights", initialize))
    yield module, initialize
