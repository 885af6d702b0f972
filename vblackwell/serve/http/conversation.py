"""The messages and tools of a chat, as OpenAI writes them, as chat templates take them. Text only; each field is known
by name, and another is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vblackwell.serve.http.refusal import invalid, only, parsed, typed, unsupported

MAX_TOOLS = 128
_NAMED = {"role", "content", "name"}
_ROLES = {
    "system": _NAMED, "developer": _NAMED, "user": _NAMED, "tool": _NAMED | {"tool_call_id"},
    "assistant": _NAMED | {"tool_calls", "refusal"},
}  # fmt: skip


def read_messages(messages: list[Any]) -> tuple[dict[str, Any], ...]:
    """Messages with their content as one text and the arguments of calls as objects; raises Refusal."""
    if not messages:
        raise invalid("messages", "at least one message is needed")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"an object with a role, one of {', '.join(_ROLES)}, is needed")
    given = {name: value for name, value in message.items() if value is not None}
    only(given, _ROLES[role], where)
    inner = f"{where}."
    told: dict[str, Any] = {
        name: typed(given, name, str, None, inner) for name in given.keys() - {"content", "tool_calls"}
    }
    content, calls = given.get("content", told.pop("refusal", None)), typed(given, "tool_calls", list, [], inner)
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str) and (content is not None or not calls):
        raise invalid(f"{where}.content", "a text or a list of texts is needed")
    if role == "tool" and "tool_call_id" not in told:
        raise invalid(f"{where}.tool_call_id", "the id of the call is needed")
    told["content"] = content or ""
    if calls:
        told["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return told


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, "an object with a type is needed")
    if kind not in ("text", "refusal"):
        raise unsupported(where, f"content of type {kind[:100]!r} is not supported: give text")
    only(part, {"type", kind}, where)
    if not isinstance(part.get(kind), str):
        raise invalid(where, f"{kind}, a string, is needed")
    return part[kind]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(where, "a call with id, type 'function' and a function is needed")
    only(call, {"id", "type", "function", "index"}, where)
    only(function, {"name", "arguments"}, where)
    name, text = (typed(function, part, str, "", f"{where}.function.") for part in ("name", "arguments"))
    try:
        arguments = parsed(text or "{}")
    except ValueError:
        arguments = None
    if not name or not isinstance(arguments, dict):
        raise invalid(f"{where}.function", "a name, and arguments as the text of a JSON object, are needed")
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


@dataclass(frozen=True)
class Tools:
    """``shown``: to the template, as given. ``callable``: schemas of arguments by name of what may be called; of
    these at least one must be where ``force`` says so, ``named`` if the request names which. ``several``: in one
    answer."""

    shown: tuple[dict[str, Any], ...] = ()
    callable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    force: Literal["required", "named"] | None = None
    several: bool = True


def read_tools(given: Mapping[str, Any]) -> Tools:
    """What ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a body say; raises Refusal."""
    tools, choice = typed(given, "tools", list, []), given.get("tool_choice", "auto")
    several = typed(given, "parallel_tool_calls", bool, True)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} are read")
    known = dict(_tool(tool, f"tools[{place}]", choice == "auto") for place, tool in enumerate(tools))
    if len(known) < len(tools):
        raise invalid("tools", "functions of different names are needed")
    if choice == "none":
        return Tools(several=several)
    if choice in ("auto", "required"):
        if choice == "required" and not known:
            raise invalid("tool_choice", "required without tools: give some")
        return Tools(tuple(tools), known, None if choice == "auto" else "required", several)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("allowed_tools", "custom"):
        raise unsupported("tool_choice", f"type {kind!r} is not supported")
    function = choice.get("function") if kind == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in known:
        raise invalid("tool_choice", "none, auto, required, or an object that names a function of tools, is needed")
    return Tools(tuple(tools), {name: known[name]}, "named", several)


def _tool(tool: Any, where: str, free: bool) -> tuple[str, dict[str, Any]]:
    """Name and schema of a tool; ``free``: the model decides whether it is called."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, "an object with a type is needed")
    if kind != "function":
        raise unsupported(where, f"tools of type {kind[:100]!r} are not supported: give functions")
    only(tool, {"type", "function"}, where)
    inner, function = f"{where}.function.", typed(tool, "function", dict, {}, f"{where}.")
    only(function, {"name", "description", "parameters", "strict"}, f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_.-]{1,64}", name):
        raise invalid(f"{inner}name", "1 to 64 letters, digits, '_', '-' or '.' are needed")
    typed({"description": function.get("description") or ""}, "description", str, None, inner)
    if function.get("strict") is not None and typed(function, "strict", bool, False, inner) and free:
        advice = "set tool_choice to 'required' or to the function, or leave strict out"
        raise unsupported(f"{inner}strict", f"it is not supported where the model decides: {advice}")
    parameters = function.get("parameters")
    return name, {} if parameters is None else typed(function, "parameters", dict, {}, inner)
