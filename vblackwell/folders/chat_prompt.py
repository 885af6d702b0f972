"""A user's message as a chat model wants it written, and the token that ends its answer.

Both are asked of the chat template of the model's folder, rendered by transformers' code: the configuration of a base
model that was fine-tuned on conversations often names another end. A template is a stranger's text that we evaluate
(``{{ 'x' * 10**10 }}`` is one): jinja's sandbox keeps it from files and code, `bounded` bounds its memory and time.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vblackwell.errors import ConfigurationError
from vblackwell.units import MiB, format_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
MAX_CHARACTERS = 16 << 20
MAX_SECONDS = 5.0  # of CPU time; a conversation takes milliseconds
MAX_BYTES = 256 * MiB
_MARK = chr(0xE000)  # private use: no template has it


@dataclass(frozen=True)
class Chat:
    """How a folder's model is talked to; see `open_chat`."""

    folder: Path
    _special: dict[str, Any]  # texts of special tokens by name
    _template: str

    def prompt(self, message: str) -> str:
        """The text after which the model answers ``message``; raises ConfigurationError where it is refused."""
        return self._written([{"role": "user", "content": message}], add_generation_prompt=True)

    def ends(self, tokenizer: Tokenizer) -> set[int]:
        """The special token that the template writes after an answer, if it writes one."""
        found = turn_end(tokenizer, self._written)
        return set() if found is None else {found}

    def _written(self, messages: list[dict[str, str]], **options: Any) -> str:
        refusal = (f"the chat template of {self.folder} refuses a user's message", ": leave --chat out")
        return render(self._template, messages, self._special | options, refusal)[0]


def open_chat(folder: Path, adapter: Path | None = None) -> Chat:
    """The chat template of ``folder``; of ``adapter``'s where that brings the one it was trained with. Raises
    ConfigurationError where there is none, or transformers cannot open the tokenizer."""
    opened = open_tokenizer(folder)
    try:
        if adapter is not None and (adapter / CHAT_TEMPLATE).is_file():
            return Chat(adapter, opened.special_tokens_map, (adapter / CHAT_TEMPLATE).read_text(encoding="utf-8"))
        template = opened.get_chat_template() if opened.chat_template else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--chat: the chat template of {folder} cannot be read ({reason})") from error
    if template is None:
        raise ConfigurationError(
            f"--chat: {folder} has no chat template: leave the flag out, or give a model that was trained on "
            "conversations"
        )
    return Chat(folder, opened.special_tokens_map, template)


def render(
    template: str,
    messages: list[dict[str, str]],
    names: dict[str, Any],
    refusal: tuple[str, str],
    *,
    spans: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """What a template, which may refer to ``names``, writes of ``messages``, and with ``spans`` from where to where it
    says that the model writes. ``refusal`` is what an error says before and after the reason."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with bounded():
            (text,), found = render_jinja_template(
                conversations=[messages], chat_template=template, return_assistant_tokens_mask=spans, **names
            )
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it writes {len(text)} characters")
    except Exception as error:  # a template raises what Python does: it may divide by zero, or call itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{refusal[0]} ({reason}){refusal[1]}") from error
    return text, [(int(start), int(end)) for start, end in found[0]] if spans else []


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of ``folder`` as transformers opens it; raises ConfigurationError. No code of the folder is run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigurationError(
                f"the tokenizer of {folder} is code in that folder ('auto_map' in its JSON files), which is never run "
                "here: give a tokenizer that transformers knows"
            ) from error
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"the tokenizer of {folder} cannot be opened ({reason})") from error


def turn_end(tokenizer: Tokenizer, write: Callable[[list[dict[str, str]]], str]) -> int | None:
    """The special token that comes, white space aside, after an answer as ``write`` writes it; None: another one."""
    text = write([{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}])
    numbers = tokenizer.encode(text.rpartition(_MARK)[2].lstrip(), add_special_tokens=False).ids[:1]
    known = tokenizer.get_added_tokens_decoder()
    return next((number for number in numbers if number in known and known[number].special), None)


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
