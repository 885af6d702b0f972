"""A conversation as the text that a model reads, and where in it the answers stand.

The text is what the tokenizer folder's chat template makes of the messages, rendered by transformers' own code. Where a folder has none,
`DEFAULT` is used, said, and written beside the trained model.

Answers are found in one of two ways. A template with ``{% generation %}`` says itself what the model writes. For any other, each
answer is put between two characters that stand nowhere else, inside whatever white space it begins and ends with, because templates
trim; the text without the marks must be the text without marking. What the model must learn to write is then the answer, and the special
token behind it that ends the turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vblackwell.data.chat import ANSWER, Conversation, Message
from vblackwell.data.tokenizer import end_of_text_id
from vblackwell.errors import ConfigurationError
from vblackwell.folders.bounded import bounded
from vblackwell.folders.chat_prompt import CHAT_TEMPLATE, check_written, open_tokenizer, reason_of, special_behind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT = """{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'assistant' %}### Assistant:
{{ message['content'] }}{{ eos_token }}
{% elif message['role'] == 'user' %}### User:
{{ message['content'] }}

{% else %}{{ message['content'] }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Assistant:
{% endif %}"""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = [chr(0xE000 + number) for number in range(64)]  # private use: no text of any language has them

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations are written down.

    Attributes:
        source: jinja.
        origin: where it is from, for people.
        is_default: whether the folder had none.
        special: texts of the special tokens by name ('bos_token', 'eos_token', ...), which templates refer to.
    """

    source: str
    origin: str
    is_default: bool
    special: dict[str, str] = field(default_factory=dict)

    @property
    def says_itself(self) -> bool:
        """Whether the template tells what the model writes."""
        return _GENERATION.search(self.source) is not None

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text, and the spans (from, to) of characters in it that are answers.

        Raises:
            ConfigurationError: the template refuses the conversation, or shows none of its answers as they are; with file and line.
        """
        if self.says_itself:
            return self._rendered(conversation.messages, conversation.place, spans=True)
        text, _ = self._rendered(conversation.messages, conversation.place)
        begin, end = self._marks(text)
        marked, _ = self._rendered(
            [_marked(message, begin, end) for message in conversation.messages], conversation.place
        )
        spans, at, shift = [], 0, 0
        while (start := marked.find(begin, at)) >= 0:
            stop = marked.find(end, start)
            if stop < 0:
                break
            spans.append((start - shift, stop - shift - 1))
            at, shift = stop + 1, shift + 2
        torn = any(marked.count(mark) != len(spans) for mark in (begin, end))
        if not spans or torn or marked.replace(begin, "").replace(end, "") != text:
            raise ConfigurationError(
                f"{conversation.place}: {self.origin} changes the answers, so what is to be learnt cannot be told from the rest: write "
                "{% generation %} around it in the template, or change the line"
            )
        return text, spans

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """The special token that ends an answer; None if the template writes none, or takes no plain question and answer."""
        mark = _MARKS[0]
        try:
            text, _ = self._rendered(
                [{"role": "user", "content": "?"}, {"role": ANSWER, "content": mark}], "a question"
            )
        except ConfigurationError:
            return None
        return special_behind(tokenizer, text.rpartition(mark)[2])

    def _marks(self, text: str) -> tuple[str, str]:
        free = [mark for mark in _MARKS if mark not in text]
        return free[0], free[1]

    def _rendered(self, messages: list[Message], place: str, spans: bool = False) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        special: dict[str, Any] = dict(self.special)
        try:
            with bounded():
                (text,), found = render_jinja_template(
                    conversations=[messages], chat_template=self.source, return_assistant_tokens_mask=spans, **special
                )
            check_written(text)
        except Exception as error:  # a template raises what Python does: it may divide by zero, or call itself
            raise ConfigurationError(
                f"{place}: {self.origin} refuses it ({reason_of(error)}); change the line or the template"
            ) from error
        return text, [(int(start), int(end)) for start, end in found[0]] if spans else []


def _marked(message: Message, begin: str, end: str) -> Message:
    if message["role"] != ANSWER:
        return message
    content = message["content"]
    core = content.strip()
    at = content.find(core)
    return message | {"content": f"{content[:at]}{begin}{core}{end}{content[at + len(core) :]}"}


def find_template(tokenizer: Tokenizer, path: Path) -> ChatTemplate:
    """The chat template of the tokenizer in ``path``, a folder or a tokenizer.json; `DEFAULT` if it has none.

    Raises:
        ConfigurationError: transformers cannot open the folder, or it has several templates and none is the default.
    """
    if path.is_dir() and any((path / name).is_file() for name in ("tokenizer_config.json", CHAT_TEMPLATE)):
        opened = open_tokenizer(path)
        try:
            found = opened.get_chat_template() if opened.chat_template else None
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"the chat template of {path} cannot be read ({reason}); write it again"
            ) from error
        named: dict[str, Any] = opened.special_tokens_map
        special = {name: text for name, text in named.items() if isinstance(text, str)}
        if found is not None:
            return ChatTemplate(found, f"the chat template of {path}", False, special)
    end, begin = end_of_text_id(tokenizer, path), tokenizer.encode("").ids[:1]
    numbers = {"bos_token": begin[0] if begin and begin[0] != end else None, "eos_token": end}
    special = {
        name: ("" if number is None else tokenizer.id_to_token(number)) or "" for name, number in numbers.items()
    }
    return ChatTemplate(DEFAULT, f"the default chat template ({path} has none)", True, special)
