"""What a client is told instead of an answer, and the fields of a body that are read or refused one by one."""

import json
import math
from collections.abc import Mapping
from typing import Any

from vblackwell.errors import VBError

_WORDS = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


class Refusal(VBError):
    """A request that gets an error: HTTP's ``status`` and ``headers``, and as ``body`` OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.headers = status, dict[str, str]()
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(param: str | None, needed: str, code: str | None = None) -> Refusal:
    """For a value of the wrong type or range: what of it is ``needed``."""
    return Refusal(400, needed if param is None else f"{param}: {needed}", param, code)


def unsupported(param: str, said: str) -> Refusal:
    """For a field or value that asks for what is not here."""
    return Refusal(422, f"{param}: {said}", param, "unsupported_parameter")


def typed(given: Mapping[str, Any], name: str, kind: type, default: Any = None, where: str = "") -> Any:
    """Field ``name`` of an object that lies at ``where``; raises Refusal where it is none of ``kind``."""
    value = given.get(name, default)
    if value is not default and type(value) is not kind:
        raise invalid(where + name, f"{_WORDS[kind]} is needed")
    return value


def number(
    given: Mapping[str, Any], name: str, low: float, high: float, default: Any, whole: bool = False, where: str = ""
) -> Any:
    """The same for a number from ``low`` to ``high``."""
    value = given.get(name, default)
    if value is default:
        return value
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if is_number and value > high:
        raise invalid(where + name, f"at most {high} is needed")
    if not is_number or value < low:
        most = f" to {high:g}" if math.isfinite(high) and high < 1 << 30 else " on"
        raise invalid(where + name, f"a {'whole ' * whole}number from {low}{most} is needed")
    return value


def parsed(text: str) -> Any:
    """The value that ``text`` is as JSON. Raises ValueError, also for numbers that are not finite and for halves of
    characters, which other programs would not read."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    def finite(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"the number {digits[:50]} is too large")
        return value

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates is no character
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises Refusal for a field at ``where`` that is not ``known``."""
    for name in given.keys() - known:
        raise unsupported(where, f"{name[:100]!r} is not supported there: leave it out")
