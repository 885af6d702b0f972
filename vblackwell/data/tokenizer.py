"""Byte-level byte-pair tokenizers, with which every text can be written: trained on the data, or read from a file.

Training runs in a process, this module as a script: merging is one call of Rust, which takes seconds (40 for 13 MiB of
random words) and during which no signal is answered; a process can be killed. A thread could be abandoned, but one that
comes back from Rust while the interpreter ends aborts the process.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vblackwell.data.documents import TextFiles
from vblackwell.errors import ConfigurationError, VBError
from vblackwell.units import MiB

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of a document
HEARD_S = 0.5  # after which a signal is heard that came just before a wait
SAMPLE_BYTES = 64 * MiB  # more hardly changes the merges of a small vocabulary, but costs time and memory


def train_tokenizer(source: TextFiles, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens (fewer where text has no more pairs), the same for the same text.
    ConfigurationError for a size below 257, VBError where the process that trains has ended without one.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        advice = f"give at least {MIN_VOCAB_SIZE}, for 256 bytes and the end of text"
        raise ConfigurationError(f"vocabulary size {vocab_size} is too small: {advice}")
    command, pipe = [sys.executable, "-P", "-m", __name__, str(vocab_size), str(os.getpid())], subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile() as text:  # no pipe: `communicate` that is called again sends nothing more
        text.write(json.dumps(list(_sample(source)), ensure_ascii=False).encode())
        text.seek(0)
        # In a separate session: a signal to the group is for this process, which ends the other.
        with subprocess.Popen(
            command, stdin=text, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        ) as process:
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        trained, complaint = process.communicate(timeout=HEARD_S)
                        break
            finally:
                process.kill()
    if process.returncode:
        last = (complaint.decode(errors="replace").splitlines() or ["no message"])[-1]
        said = f"exit code {process.returncode}: {last}; give --tokenizer, or less text or more RAM"
        raise VBError(f"the process that trains the tokenizer ended with {said}")
    return Tokenizer.from_str(trained.decode())


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer: Any = Tokenizer(models.BPE())  # whose stubs have no setters
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _end_with(parent: int) -> None:
    """End this process when its ``parent`` has gone."""
    while os.getppid() == parent:
        time.sleep(HEARD_S)
    os._exit(1)


def _sample(source: TextFiles) -> Iterator[str]:
    """All pieces, or of a large corpus as many as keep step with an even spread of ``SAMPLE_BYTES``."""
    share = min(1.0, SAMPLE_BYTES / max(1, source.size_bytes))
    seen = taken = 0
    for piece in source.pieces():
        seen += len(piece.text)
        if taken <= share * seen:
            taken += len(piece.text)
            yield piece.text


def end_of_text_id(tokenizer: Tokenizer, path: Path | None) -> int | None:
    """The token that ends a document, by the ``tokenizer_config.json`` next to ``path`` or a known name; None: none."""
    names = [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]"]
    if path is not None:
        config = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
        if config.is_file():
            try:
                stated = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, RecursionError, AttributeError) as error:
                raise ConfigurationError(f"{config} is not a JSON object: {error}; repair or remove it") from error
            name = stated.get("content") if isinstance(stated, dict) else stated
            names = [name, *names] if name else names
    found = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in found if number is not None), None)


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest token number; a tokenizer may leave some below unused."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    sys.stdout.buffer.write(_train(json.load(sys.stdin.buffer), int(sys.argv[1])).to_str().encode())
