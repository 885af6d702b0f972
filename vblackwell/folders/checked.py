"""What is wrong with a model's tokenizer or the prompts for it, said before anything large is opened."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from vblackwell.errors import ConfigurationError
from vblackwell.folders.folder import read_config
from vblackwell.units import format_bytes

MAX_PROMPTS_BYTES = 256 << 20
LIMITS = ("max_position_embeddings", "n_positions")


def check_lengths(folder: Path, lengths: Iterable[tuple[str, int]], max_new_tokens: int) -> None:
    """Whether prompts, by where they stand and their number of tokens, and so many new tokens each, are within the
    limit that config.json states; raises ConfigurationError with the place of one that is not."""
    config = read_config(folder)
    name = next((name for name in LIMITS if isinstance(config.get(name), int)), None)
    if name is None:
        return
    for place, length in lengths:
        check_length(length, max_new_tokens, config[name], f"{place}: ", f" ({name} in {folder / 'config.json'})")


def check_length(length: int, new: int, limit: int, place: str = "", stated: str = "") -> None:
    """Raises ConfigurationError where a prompt of ``length`` and ``new`` tokens, or one, are more than ``limit``."""
    if length + max(new, 1) > limit:
        known, advice = f"{place}the prompt has {length} tokens", f"shorten it to at most {limit - 1}"
        if length < limit:
            known, advice = f"{known}, with {new} new ones {length + new}", f"ask for at most {limit - length}"
        raise ConfigurationError(f"{known}, the model's limit is {limit}{stated}: {advice}")


def check_tokenizer(folder: Path, tokenizer: Tokenizer, source: Path | None = None, *, remedy: str = "") -> None:
    """Whether every token of ``tokenizer``, from ``source`` if not ``folder``, has a row in the model's embedding;
    raises ConfigurationError, with ``remedy`` (how another is given) at its end."""
    path = source or folder
    file = path / "tokenizer.json" if path.is_dir() else path
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    rows = read_config(folder).get("vocab_size")
    if isinstance(rows, int) and size > rows:
        raise ConfigurationError(
            f"{file} has {size} tokens, {folder / 'config.json'} a vocab_size of {rows}: give the tokenizer that the "
            f"model was trained with{remedy}"
        )


def check_utf8(what: str, text: str) -> None:
    """Raises ConfigurationError where ``text`` came from bytes that are no UTF-8, as from a terminal of another
    encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{what} is not UTF-8 text (character {error.start + 1}): give it in UTF-8") from error


def prompt_lines(path: Path) -> tuple[list[tuple[str, str]], int]:
    """(file and line, text) of each prompt in a file that has one a line, and how many lines have none; a line ends at
    a line feed alone, with or without a carriage return before it. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROMPTS_BYTES + 1)  # a device may have no end
        if len(data) > MAX_PROMPTS_BYTES:
            raise ValueError(f"it has more than {format_bytes(MAX_PROMPTS_BYTES)}")
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"--prompts {path} cannot be read ({why}): give a text file, a prompt a line"
        ) from error
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]  # splitlines: U+2028 ends one too
    found = [(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigurationError(f"--prompts {path} holds no prompt: write one a line")
    return found, len(lines) - len(found)
