"""Embeddings: how a folder in sentence-transformers' layout makes a vector of a text, and how clients get it. A folder
that asks for what is not computed here is refused with the reason.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vblackwell.errors import VBError
from vblackwell.folders.folder import read_json
from vblackwell.serve.http.refusal import parsed
from vblackwell.serve.pooling import Rows

_ROWS: dict[str, Rows] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


@dataclass(frozen=True)
class Embedding:
    """Which rows of a text become its vector; ``lengths``: to how many dimensions that may be cut."""

    rows: Rows
    normalize: bool
    lengths: frozenset[int]


def embedding_of(folder: Path | None) -> Embedding | str:
    """How the model of ``folder`` embeds, or why it does not."""
    if folder is None or not (folder / "modules.json").is_file():
        return "is a causal language model and has no embeddings: use a model made for them"
    try:
        modules = parsed((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            return f"embeds by {', '.join(kinds)}, of which only Transformer, Pooling and Normalize are known"
        place = Path(str(modules[1]["path"])).name  # inside of the folder, whatever it says
        pools, config = read_json(folder / place / "config.json"), read_json(folder / "config.json")
        stated = folder / "config_sentence_transformers.json"
        more = {name for name, value in (read_json(stated) if stated.is_file() else {}).items() if value is not None}
        cut = range(1, config["hidden_size"] + 1) if config.get("is_matryoshka") else ()
        lengths = frozenset(config.get("matryoshka_dimensions") or cut)
    except (OSError, ValueError, LookupError, TypeError, VBError) as error:
        return f"has files for embeddings that cannot be read: {type(error).__name__}: {error}"
    modes = {name.removeprefix("pooling_mode_") for name, on in pools.items() if name[:13] == "pooling_mode_" and on}
    modes |= {str(pools["pooling_mode"])} if "pooling_mode" in pools else set()
    if len(modes) != 1 or not modes <= _ROWS.keys():
        return f"pools by {', '.join(sorted(modes)) or 'nothing'}, and only the last token or the mean are known"
    if unknown := more & {"default_prompt_name", "truncate_dim"}:
        return f"has {' and '.join(sorted(unknown))} in {stated.name}, which is not done here"
    return Embedding(_ROWS[modes.pop()], "Normalize" in kinds, lengths)


def told(vector_D: Tensor, normalize: bool, dimensions: int | None, form: str) -> str | list[float]:
    """The first ``dimensions`` of a vector (D,), or all for None, in fp32: a list, or for the ``form`` 'base64' that of
    their little-endian bytes."""
    numbers_D = vector_D[:dimensions].double()
    if normalize:
        numbers_D /= torch.linalg.vector_norm(numbers_D).clamp_min(1e-12)
    numbers = numbers_D.float().numpy().astype("<f4")
    return base64.b64encode(numbers.tobytes()).decode() if form == "base64" else numbers.tolist()
