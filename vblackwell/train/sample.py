"""``vb generate``: text from a run's model or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from vblackwell.artifacts.commit import newest_verified
from vblackwell.artifacts.folder import load_weights, read_config
from vblackwell.errors import ConfigurationError
from vblackwell.infer.generate import generate
from vblackwell.nn.decoder import Decoder
from vblackwell.nn.decoder_config import DecoderConfig
from vblackwell.train.machine import choose_device
from vblackwell.train.runfolder import CHECKPOINTS, FINAL
from vblackwell.train.tokenizer import load_tokenizer


def model_folder(path: Path) -> Path:
    """The Hugging Face folder that ``path`` means: itself, a run's final model, or its newest intact checkpoint.

    Raises:
        ConfigurationError: there is none.
    """
    if not path.is_dir():
        raise ConfigurationError(
            f"--model {path}: no such folder; give a run folder of vb train or a Hugging Face folder"
        )
    if (path / FINAL).is_dir():
        return path / FINAL
    if (path / CHECKPOINTS).is_dir():
        found, problems = newest_verified(path / CHECKPOINTS)
        if found is not None:
            return found
        reason = f": {problems[0]}" if problems else " yet"
        raise ConfigurationError(f"--model {path} is a run without an intact checkpoint{reason}")
    if not (path / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"--model {path} is neither a run folder of vb train nor a Hugging Face folder with tokenizer.json"
        )
    return path


def generate_command(model: str, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> int:
    """Run ``vb generate``: the text goes to standard output as it is written.

    Raises:
        VBError: no model there, one that `Decoder` does not compute, or options out of range.
    """
    folder = model_folder(Path(model))
    decoder = Decoder(DecoderConfig.from_hf(read_config(folder)), device="meta").to_empty(device="cpu")
    load_weights(decoder, folder)
    decoder.to(choose_device("auto", lambda text: None))
    print(prompt, end="", flush=True)
    generate(
        decoder, load_tokenizer(folder), prompt, max_new_tokens, temperature, top_k, seed=seed,
        on_token=lambda text: print(text, end="", flush=True),
    )  # fmt: skip
    print()
    return 0
