"""A user's message as a chat model wants it written, and the token that ends its answer.

Both are asked of the chat template of the model's folder, rendered by transformers' code: the configuration of a base
model that was fine-tuned on conversations often names another end. A template is a stranger's text that we evaluate
(``{{ 'x' * 10**10 }}`` is one): jinja's sandbox keeps it from files and code, `bounded` bounds its memory and time.
"""

import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vblackwell.errors import ConfigurationError
from vblackwell.units import MiB, format_bytes

CHAT_TEMPLATE = "chat_template.jinja"
MAX_CHARACTERS = 16 << 20
MAX_SECONDS = 5.0  # of CPU time; a conversation takes milliseconds
MAX_BYTES = 256 * MiB
_MARK = chr(0xE000)  # private use: no template has it


@dataclass(frozen=True)
class ChatTemplate:
    source: str  # jinja
    origin: str  # where it is from, for people
    special: dict[str, Any]  # texts of special tokens by the name that templates use
    is_default: bool = False  # the folder had none

    def prompt(self, message: str) -> str:
        """The text after which the model answers ``message``; raises ConfigurationError where it is refused."""
        return self._asked([{"role": "user", "content": message}], {"add_generation_prompt": True})

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """The special token after an answer, white space aside; None if there is none. Raises as `prompt`."""
        text = self._asked([{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}])
        numbers = tokenizer.encode(text.rpartition(_MARK)[2].lstrip(), add_special_tokens=False).ids[:1]
        known = tokenizer.get_added_tokens_decoder()
        return next((number for number in numbers if number in known and known[number].special), None)

    def values(self) -> frozenset[str]:
        """Names of values that the template reads and that its folder does not give."""
        from jinja2 import Environment
        from jinja2.defaults import DEFAULT_NAMESPACE
        from jinja2.meta import find_undeclared_variables

        # transformers' tag for what the model writes, which jinja itself does not know
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", self.source)
        found = find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
        return frozenset(found - DEFAULT_NAMESPACE.keys() - self.special.keys() - {"raise_exception", "strftime_now"})

    def _asked(self, messages: list[dict[str, str]], values: Mapping[str, Any] | None = None) -> str:
        return self.write(messages, (f"{self.origin} refuses a user's message", ": leave --chat out"), values)[0]

    def write(
        self,
        messages: list[dict[str, Any]],
        refusal: tuple[str, str],
        values: Mapping[str, Any] | None = None,
        *,
        spans: bool = False,
        limited: bool = True,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of ``messages``, and with ``spans`` from where to where the template says that the model writes.
        ``refusal`` is what an error says before and after the reason; ``values`` are the template's, by name.
        ``limited``: False where other threads work, which `bounded` would bound too."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = self.special | dict(values or {}) | {"return_assistant_tokens_mask": spans}
        try:
            with bounded() if limited else nullcontext():
                (text,), found = render_jinja_template(conversations=[messages], chat_template=self.source, **names)
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"it writes {len(text)} characters")
        except Exception as error:  # a template raises what Python does: it may divide by zero, or call itself
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigurationError(f"{refusal[0]} ({reason}){refusal[1]}") from error
        return text, [(int(start), int(end)) for start, end in found[0]] if spans else []


def open_chat(folder: Path, adapter: Path | None = None) -> ChatTemplate:
    """`stored_template` for ``--chat``; raises ConfigurationError where there is none."""
    found = stored_template(folder, adapter)
    if found is None:
        raise ConfigurationError(
            f"--chat: {folder} has no chat template: leave the flag out, or give a model that was trained on "
            "conversations"
        )
    return found


def stored_template(folder: Path, adapter: Path | None = None) -> ChatTemplate | None:
    """The chat template of ``folder``, or of ``adapter`` where that brings the one it was trained with; None for none.
    Raises ConfigurationError where transformers cannot open tokenizer or template; no code of the folder is run."""
    from transformers import AutoTokenizer

    source, what = folder, "the tokenizer of"
    try:
        opened: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        what = "the chat template of"
        if adapter is not None and (adapter / CHAT_TEMPLATE).is_file():
            source = adapter
            text = (adapter / CHAT_TEMPLATE).read_text(encoding="utf-8")
        else:
            text = opened.get_chat_template() if opened.chat_template else None
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigurationError(
                f"the tokenizer of {folder} is code in that folder ('auto_map' in its JSON files), which is never run "
                "here: give a tokenizer that transformers knows"
            ) from error
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{what} {source} cannot be opened ({reason}): repair it") from error
    return None if text is None else ChatTemplate(text, f"{what} {source}", opened.special_tokens_map)


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the process while the block runs: in memory (what it holds and `MAX_BYTES` more), and in CPU time on the
    main thread, the only one that signals interrupt. Raises TimeoutError or MemoryError, with the bound in words."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack, as the limit counts them
    held = pages * resource.getpagesize() + MAX_BYTES
    with ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            undo.callback(signal.signal, signal.SIGPROF, signal.signal(signal.SIGPROF, expire))
            undo.callback(signal.setitimer, signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        undo.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        resource.setrlimit(resource.RLIMIT_DATA, (held if soft == resource.RLIM_INFINITY else min(soft, held), hard))
        try:
            yield
        except MemoryError as error:
            raise MemoryError(f"it takes more than {format_bytes(MAX_BYTES)}") from error
