"""Conversations: out of files of records, written down by a chat template, and as rows of tokens with masked targets.

The first record tells the kind of all (`vb docs models`). A template with ``{% generation %}`` says what the model
writes. For any other, each answer is put between two characters that stand nowhere else, inside the white space it
begins and ends with, because templates trim; the text without the marks must be the text without marking. Learnt is the
answer, and the special token after it that ends the turn. A prompt and its completion, both plain text, follow each
other as they are, and the completion is learnt with the end of the text.

With packing several conversations share a row: positions begin again at 0 with each, and no token attends to another
or is predicted from one. Without, each has a row, filled up with tokens that nothing attends to and nothing learns.
B batch, S sequence.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.data.corpus import HELD_OUT_SHARE, Corpus, Progress, cached, content_hash, pack_rows, permute
from vblackwell.data.documents import TextFiles
from vblackwell.data.records import RECORDS, kind_of_value, records
from vblackwell.data.tokenizer import end_of_text_id, vocab_size_of
from vblackwell.errors import ConfigurationError, nearest
from vblackwell.folders.chat_prompt import CHAT_TEMPLATE, ChatTemplate, stored_template
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.folder import read_tokenizer
from vblackwell.nn.attention.documents import document_starts
from vblackwell.nn.decoder.decoder import IGNORED_TARGET

COMPLETION, TALKED = "prompt-completion", "prompt-completion of messages"
KINDS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca", "prompt": COMPLETION}
_PREFERENCE = (("chosen", "rejected"), ("prompt", "completion", "label"))  # of DPO and such; of KTO
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ANSWER = "assistant"

Message = dict[str, str]


class Conversation(NamedTuple):
    messages: list[Message]  # at least one of those to learn from an answer
    place: str  # where they stand, for errors
    prompt: int = 0  # how many messages come before those to learn from


def chat_kind(source: TextFiles) -> str | None:
    """'messages', 'sharegpt', 'alpaca', 'prompt-completion' or 'prompt-completion of messages', by the first record of
    the first file that has one; None where it is plain text. Raises ConfigurationError, with the place, where that
    record cannot be read, or is one of preferences."""
    for path in source.files:
        if path.suffix.lower() not in RECORDS:
            return None
        for place, record in records(path):
            return _kind_of(record, place)
    return None


def _kind_of(record: dict[str, Any], place: str) -> str | None:
    given = {key for key, value in record.items() if value is not None}  # tables have null where there is nothing
    keys = next((keys for keys in _PREFERENCE if given.issuperset(keys)), None)
    if keys is not None:
        whole = next((key for key in ("messages", "conversations", "text") if key in given), None)
        remedy = "write 'chosen' as 'completion', or as 'messages' where it is a list of them, and drop 'rejected'"
        if "label" in keys:
            remedy = "keep prompt and completion of the records whose label is true"
        elif whole:
            remedy = f"keep {whole!r} and drop 'chosen' and 'rejected'"
        what = f"a preference ({', '.join(keys)}), and this trains next-token loss"
        raise ConfigurationError(f"{place} is {what}: {remedy}")
    found = next((kind for key, kind in KINDS.items() if key in given), None)
    if found is COMPLETION and "completion" not in given:
        found = None
    return TALKED if found is COMPLETION and isinstance(record["prompt"], list) else found


def conversations(source: TextFiles, kind: str) -> Iterator[Conversation]:
    """Every record, in order; ConfigurationError, with file and place, where one cannot be used."""
    for path in source.files:
        if path.suffix.lower() not in RECORDS:
            first = source.files[0]
            raise ConfigurationError(f"{path} holds plain text, and {first} {kind}: give files of one kind")
        for place, record in records(path):
            yield _conversation(record, kind, place)


def _conversation(record: dict[str, Any], kind: str, place: str) -> Conversation:
    found = _kind_of(record, place)
    if found != kind:
        keys = ", ".join(map(repr, list(record)[:5])) or "nothing"
        what = f"is of kind {found}" if found else f"holds {keys}"
        raise ConfigurationError(f"{place} {what}, the first record is of kind {kind}: give records of one kind")
    # What other trainers put into the prompt.
    if unread := [name for name in ("tools", "functions", "history") if record.get(name)]:
        raise ConfigurationError(f"{place} has {unread[0]!r}, which is not read: write it into messages or remove it")
    prompt = list[Message]()
    if kind == "messages":
        learnt = _listed(record, "messages", "role", "content", place)
        return Conversation(_answered(learnt, place), place)
    if kind == TALKED:
        prompt = _listed(record, "prompt", "role", "content", place)
        learnt = _listed(record, "completion", "role", "content", place)
    elif kind == COMPLETION:
        asked, answer = _texts(record, ("prompt", "completion"), place)
        prompt, learnt = [{"role": "user", "content": asked}], [{"role": ANSWER, "content": answer}]
        return Conversation([*prompt, *learnt], place, 1)
    elif kind == "alpaca":
        asked, answer, more = _texts(record, ("instruction", "output", "input"), place)
        question = {"role": "user", "content": f"{asked}\n\n{more}" if more else asked}
        learnt = [question, {"role": ANSWER, "content": answer}]
    else:
        learnt = _listed(record, "conversations", "from", "value", place)
    messages, system = [*prompt, *_answered(learnt, place)], record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        prompt, messages = prompt and [*prompt, prompt[0]], [{"role": "system", "content": system}, *messages]
    return Conversation(messages, place, len(prompt))


def _texts(record: dict[str, Any], keys: Sequence[str], place: str) -> Iterator[str]:
    for key in keys:
        value = "" if key == "input" and record.get(key) is None else record.get(key)
        if not isinstance(value, str):
            advice = f"write {' and '.join(key for key in keys if key != 'input')}"
            raise ConfigurationError(f"{place} has no text under {key!r}, but {kind_of_value(value)}: {advice}")
        yield value


def _answered(messages: list[Message], place: str) -> list[Message]:
    if not any(message["role"] == ANSWER for message in messages):
        raise ConfigurationError(f"{place} has no message of the {ANSWER}: there is nothing to learn; remove it")
    return messages


def _listed(record: dict[str, Any], key: str, role_key: str, text_key: str, place: str) -> list[Message]:
    listed = record.get(key)
    if not isinstance(listed, list) or not listed:
        raise ConfigurationError(f"{place}: {key!r} is no list of messages; write [{{{role_key!r}: ...}}, ...]")
    messages = list[Message]()
    for index, item in enumerate(listed, 1):
        at = f"{place}, message {index}"
        if not isinstance(item, dict) or not isinstance(item.get(role_key), str):
            raise ConfigurationError(f"{at} has no {role_key!r}: say who speaks ({', '.join(_ROLES)})")
        role = _NAMES.get(item[role_key], item[role_key])
        if role not in _ROLES:
            known = f"{', '.join((*_ROLES, *_NAMES))}{nearest(str(role), _ROLES)}"
            raise ConfigurationError(f"{at} has the {role_key} {item[role_key]!r}, which is none of {known}")
        # By a weight others leave answers out; null is what writers of tables put where other lines have one.
        off = [name for name in ("weight", "train", "training") if item.get(name) is not None and not item[name]]
        if off and role == ANSWER:
            raise ConfigurationError(f"{at} has {off[0]} {item[off[0]]!r}, and every answer is learnt: leave it out")
        if not isinstance(item.get(text_key), str):
            raise ConfigurationError(f"{at} has no text under {text_key!r}: images, tools and lists are not read")
        messages.append({"role": role, "content": item[text_key]})
    return messages


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


def write_down(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the spans (from, to) of its answers; ConfigurationError where the template does not show them."""
    messages, place, prompt = conversation
    answers = sum(message["role"] == ANSWER for message in messages[prompt:])
    refusal = (f"{place}: {template.origin} refuses it", "; change the line or the template")
    if _GENERATION.search(template.source):
        text, spans = template.write(messages, refusal, spans=True)
        return text, spans[-answers:] if prompt else spans
    text, _ = template.write(messages, refusal)
    begin, end = [mark for mark in _MARKS if mark not in text][:2]
    asked, learnt = messages[:prompt], [_marked(message, begin, end) for message in messages[prompt:]]
    marked, _ = template.write([*asked, *learnt], refusal)
    found = enumerate(re.finditer(f"{begin}.*?{end}", marked, re.DOTALL))
    spans = [(match.start() - 2 * index, match.end() - 2 * index - 2) for index, match in found]
    torn = any(marked.count(mark) != len(spans) for mark in (begin, end))
    if not spans or torn or marked.replace(begin, "").replace(end, "") != text:
        remedy = "write {% generation %} around what is to be learnt in the template, or change the line"
        raise ConfigurationError(f"{place}: {template.origin} changes the answers: {remedy}")
    return text, spans


def _marked(message: Message, begin: str, end: str) -> Message:
    if message["role"] != ANSWER:
        return message
    content = message["content"]
    core = content.strip()
    at = content.find(core)
    return message | {"content": f"{content[:at]}{begin}{core}{end}{content[at + len(core) :]}"}


def find_template(tokenizer: Tokenizer, path: Path) -> ChatTemplate:
    """The chat template of the tokenizer in ``path``, a folder or a tokenizer.json; `DEFAULT` if it has none."""
    if path.is_dir() and any((path / name).is_file() for name in ("tokenizer_config.json", CHAT_TEMPLATE)):
        found = stored_template(path)
        if found is not None:
            return found
    origin = f"the default chat template ({path} has none)"
    return ChatTemplate(DEFAULT, origin, special_texts(tokenizer, path), is_default=True)


def special_texts(tokenizer: Tokenizer, path: Path) -> dict[str, str]:
    """What a text begins and ends with, by the names that templates use; empty where the tokenizer has nothing."""
    end, begin = end_of_text_id(tokenizer, path), tokenizer.encode("").ids[:1]
    numbers = {"bos_token": begin[0] if begin and begin[0] != end else None, "eos_token": end}
    return {name: "" if at is None else tokenizer.id_to_token(at) or "" for name, at in numbers.items()}


FORMAT = 2  # of the cache, and of which conversations are held out; part of every key
LEARNT = np.uint32(1 << 31)
_BATCH = 512  # conversations encoded at a time


@dataclass(frozen=True)
class ChatCorpus(Corpus):
    """Encoded conversations; ``tokens`` have the highest bit set where they are to be learnt."""

    lengths: np.ndarray  # tokens of each conversation, int64
    kind: str  # of the records, as of `chat_kind`
    template: ChatTemplate | None  # None: as they are, a completion after its prompt


def prepare_chat(source: TextFiles, kind: str, tokenizer_path: Path | None, report: Progress) -> ChatCorpus:
    """The tokens of the conversations of ``source``; ConfigurationError without a tokenizer, or for unusable lines."""
    if tokenizer_path is None:
        remedy = "give --model, or --tokenizer with a chat template, to encode them"
        raise ConfigurationError(f"{source.name} holds conversations ({kind}): {remedy}")
    tokenizer = read_tokenizer(tokenizer_path)
    template = None if kind == COMPLETION else find_template(tokenizer, tokenizer_path)
    texts = special_texts(tokenizer, tokenizer_path) if template is None else template.special
    content = content_hash(source, report)
    special = sorted(item for item in texts.items() if isinstance(item[1], str))
    parts = (FORMAT, content, kind, template and template.source, special, tokenizer.to_str())
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    def build(folder: CommitFolder) -> None:
        report(f"encoding {source.name}", None)
        lengths = array("q")
        with folder.open("tokens.bin") as file:
            write = partial(_join, texts) if template is None else partial(write_down, template)
            says = template is None or _GENERATION.search(template.source) is not None
            for numbers in _encoded(source, kind, tokenizer, write, says):
                file.write(numbers.tobytes())
                lengths.append(len(numbers))
        folder.add("lengths.bin", lengths.tobytes())

    folder = cached("chat", fingerprint, build, report, "encoding again")
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r")
    lengths = np.fromfile(folder / "lengths.bin", dtype=np.int64)
    end = end_of_text_id(tokenizer, tokenizer_path)
    packed = (tokens, tokenizer, vocab_size_of(tokenizer), end, fingerprint, source.name)
    return ChatCorpus(*packed, lengths, kind, template)


def _join(special: dict[str, str], conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
    """A prompt and its completion as they are, between what a text begins and ends with; the span to learn."""
    asked, answer = (message["content"] for message in conversation.messages)
    if not answer:
        raise ConfigurationError(f"{conversation.place} has an empty completion: there is nothing to learn; remove it")
    begin = special["bos_token"] + asked
    text = begin + answer + special["eos_token"]
    return text, [(len(begin), len(text))]


def _encoded(
    source: TextFiles, kind: str, tokenizer: Tokenizer, write: Callable[..., Any], says: bool
) -> Iterator[np.ndarray]:
    """The tokens of each conversation; ``says``: the spans that ``write`` gives hold the ends of turns, too."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = conversations(source, kind)
    while batch := list(islice(found, _BATCH)):
        rendered = [write(conversation) for conversation in batch]
        encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for conversation, (text, spans), encoding in zip(batch, rendered, encodings, strict=True):
            learnt = _learnt(text, spans, encoding, set() if says else special)
            if not learnt[1:].any():
                place = conversation.place
                raise ConfigurationError(f"{place} has answers without a token: there is nothing to learn; remove it")
            numbers = np.asarray(encoding.ids, dtype=np.uint32)
            numbers[learnt] |= LEARNT
            yield numbers


def _learnt(text: str, spans: list[tuple[int, int]], encoding: Any, special: set[int]) -> np.ndarray:
    """Which tokens have characters of a span, and the special token right after each."""
    starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    learnt = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        learnt |= (starts < end) & (ends > start) & (ends > starts)
        after = int(np.searchsorted(starts, end))
        following = next((at for at in range(after, len(starts)) if text[starts[at] : ends[at]].strip()), None)
        if following is not None and encoding.ids[following] in special and not text[end : starts[following]].strip():
            learnt[after : following + 1] = True
    return learnt


class ChatDataset:
    """Rows of conversations, a `Dataset`; ConfigurationError where there are too few. Those of more than ``seq_length``
    inputs are ``cut`` there; those whose answers all lie after it are ``left_out``. Split 'validation' is 2 % of them
    (at least one), drawn, and always the same ones.
    """

    def __init__(
        self, corpus: ChatCorpus, seq_length: int, split: str = "train", seed: int = 0, *, packing: bool = True
    ) -> None:
        self.seq_length, self.seed, self.packing, self.shuffled = seq_length, seed, packing, split == "train"
        self._tokens = np.asarray(corpus.tokens)  # of the map, without its class
        count = len(corpus.lengths)
        if count < 2:
            raise ConfigurationError(f"{corpus.name} holds {count} conversations: give at least two, one is held out")
        starts = np.concatenate(([0], np.cumsum(corpus.lengths)))[:-1]
        held_out = max(1, int(count * HELD_OUT_SHARE))
        is_held_out = np.zeros(count, dtype=bool)
        is_held_out[permute(np.arange(held_out), count, seed=0, epoch=0)] = True
        part = np.flatnonzero(is_held_out != self.shuffled)
        starts, lengths = starts[part], np.minimum(corpus.lengths[part], seq_length + 1)
        targets = (self._tokens[at + 1 : at + length] for at, length in zip(starts, lengths, strict=True))
        learnt = np.asarray([np.count_nonzero(each & LEARNT) for each in targets])
        kept = learnt > 0
        self.cut, self.left_out = int((corpus.lengths[part] > seq_length + 1).sum()), int((~kept).sum())
        if not kept.any():
            what = f"{'training' if self.shuffled else 'held-out'} conversation has an answer"
            raise ConfigurationError(f"{corpus.name}: no {what} in its first {seq_length} tokens: raise --seq-length")
        self._starts, self._lengths = starts[kept], lengths[kept]
        inputs = self._lengths - 1
        self.conversations, self.learnt_share = len(inputs), float(learnt.sum() / max(1, inputs.sum()))
        self._rows = pack_rows(inputs, seq_length) if packing else [[index] for index in range(len(inputs))]
        self.filled = float(inputs.sum()) / (len(self._rows) * seq_length)  # the share of positions that hold a token

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Inputs and targets, (B, S) int64, of the rows at ``positions``; with packing, places in conversations and
        `document_starts` too."""
        shape = (len(positions), self.seq_length)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        places = np.zeros(shape, np.int64)
        epochs, indices = np.divmod(positions, len(self))
        for row, (epoch, index) in enumerate(zip(epochs, indices, strict=True)):
            chosen = int(permute(np.asarray([index]), len(self), self.seed, int(epoch))[0]) if self.shuffled else index
            at = 0
            for one in self._rows[chosen]:
                numbers = self._tokens[self._starts[one] : self._starts[one] + self._lengths[one]]
                plain, stop = (numbers & ~LEARNT).astype(np.int64), at + len(numbers) - 1
                inputs[row, at:stop] = plain[:-1]
                targets[row, at:stop] = np.where(numbers[1:] & LEARNT, plain[1:], IGNORED_TARGET)
                places[row, at:stop] = np.arange(stop - at)
                at = stop
            places[row, at:] = np.arange(self.seq_length - at)
        made = tuple(torch.from_numpy(array) for array in (inputs, targets, places))
        return (*made, document_starts(made[2] == 0)) if self.packing else made[:2]

    def example(self) -> tuple[list[int], list[int]]:
        """The first conversation's tokens up to its first answer, and those of that answer."""
        numbers = self._tokens[self._starts[0] : self._starts[0] + self._lengths[0]]
        learnt, plain = (numbers & LEARNT) != 0, (numbers & ~LEARNT).tolist()
        begin = max(1, int(learnt.argmax()))
        rest = np.flatnonzero(~learnt[begin:])
        return plain[:begin], plain[begin : begin + int(rest[0]) if len(rest) else None]
