"""What was found of one layer, for all layers that are like it: a probe of each of eighty equal layers takes a second.

Modules are alike if they have the same class, the same numbers and texts, the very same other objects, parameters of
the same form, and parts that are alike, but for what a part has as its place among the layers. That a probe does not go
by the place is seen: it is done with a number that notes whether anybody asks for it (`AnyLayer`).
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from vblackwell.errors import Unsupported
from vblackwell.nn.linear.one_input import hooked

PLACE = "layer_idx"
_PLACES = {PLACE, "target_name"}  # the second: what peft remembers of where a linear was
_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class AnyLayer:
    """In place of a layer's number in what is done for all layers of a kind: who asks for it is refused; ``asked``:
    whether anybody has."""

    asked = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self._refuse()

    def _refuse(self, *args: Any) -> Any:
        object.__setattr__(self, "asked", True)
        raise Unsupported("attention that goes by the number of its layer")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
    __class__ = property(_refuse)  # type: ignore[assignment] - what `isinstance` asks


class Answers:
    """Asks once for all modules that are alike, while nobody changes but what was asked about, all in the same way."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[bool, Any]] = {}  # whether the place is of no account, and the answer
        self._forms: dict[nn.Module, Hashable] = {}

    def of(self, question: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        """What ``question`` answers about ``module``."""
        form = self._form(module)
        if form is None:
            return question(module)
        key = question, form
        if key not in self._found:
            number = AnyLayer()
            found = question(_with_place(module, number))
            self._found[key] = not number.asked, found
        for_all, found = self._found[key]
        return found if for_all else question(module)

    def _form(self, module: nn.Module) -> Hashable | None:
        """Equal for modules that are alike; None: nobody can tell."""
        if module not in self._forms:
            self._forms[module] = None if hooked(module) or module._buffers else self._form_of(module)
        return self._forms[module]

    def _form_of(self, module: nn.Module) -> Hashable | None:
        values = vars(module)
        parts = [(name, self._form(each)) for name, each in module._modules.items() if each is not None]
        if any(form is None for _, form in parts):
            return None
        own = [(name, *_value(values[name])) for name in values.keys() - _OF_MODULES if name not in _PLACES]
        params = [(name, _shape(each)) for name, each in module._parameters.items()]
        places = [(name, type(values[name])) for name in _PLACES & values.keys()]
        return type(module), module.training, frozenset(places), frozenset(own), tuple(params), tuple(parts)


def _value(value: Any) -> tuple[type, Hashable]:
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value, value))
    if isinstance(value, dict):
        return type(value), tuple((name, _value(each)) for name, each in value.items())
    return type(value), value if type(value) in _PLAIN else id(value)


def _shape(parameter: nn.Parameter | None) -> Hashable:
    if parameter is None:
        return None
    return type(parameter), parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad


def _with_place(module: nn.Module, number: AnyLayer) -> nn.Module:
    """A module that shares everything with ``module`` but its parts' places."""
    if not any(vars(each).keys() & _PLACES for each in module.modules()):
        return module
    parts = {name: None if each is None else _with_place(each, number) for name, each in module._modules.items()}
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module), _modules=parts, **dict.fromkeys(vars(module).keys() & _PLACES, number))
    return twin
