"""What a run trains on, as its settings say: plain text or conversations, found by looking at the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.data.chat import chat_kind
from vblackwell.data.chat_data import ChatCorpus, ChatDataset, prepare_chat
from vblackwell.data.chat_template import ChatTemplate
from vblackwell.data.corpus import Corpus, prepare_data
from vblackwell.data.dataset import Dataset, PackedDataset
from vblackwell.data.documents import find_source
from vblackwell.errors import Unsupported
from vblackwell.train.config import TrainConfig
from vblackwell.train.progress import Progress

_PROBE = 8  # tokens of a document


@dataclass(frozen=True)
class RunData:
    """Tokens and what is cut of them.

    Attributes:
        template: of conversations; None for plain text.
    """

    corpus: Corpus
    train: Dataset
    validation: Dataset
    template: ChatTemplate | None = None

    @property
    def packs_documents(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        return isinstance(self.train, ChatDataset) and self.train.packing


def open_data(config: TrainConfig, tokenizer_path: Path | None, progress: Progress) -> RunData:
    """The data of ``--data``; of conversations it is said what they are.

    Raises:
        ConfigurationError: files that cannot be used, with the place.
        DiskError: the cache cannot be written.
    """
    path = None if config.data is None else Path(config.data)
    source = find_source(path)
    if source.left_out:
        names = ", ".join(str(found.relative_to(source.root)) for found in source.left_out)
        progress.say(f"data: {source.name}: left out, being no data: {names}")
    kind = chat_kind(source)
    splits = ("train", "validation")
    if kind is None:
        corpus = prepare_data(path, tokenizer_path, config.vocab_size, progress.phase)
        plain = [PackedDataset(corpus, config.seq_length, split, config.seed) for split in splits]
        return RunData(corpus, plain[0], plain[1])
    chat = prepare_chat(source, kind, tokenizer_path, progress.phase)
    train, validation = (
        ChatDataset(chat, config.seq_length, split, config.seed, packing=config.packing) for split in splits
    )
    _describe(chat, train, validation, progress)
    return RunData(chat, train, validation, chat.template)


def _describe(corpus: ChatCorpus, train: ChatDataset, validation: ChatDataset, progress: Progress) -> None:
    how = (
        "several share a row, positions begin again at 0 with each and none sees another"
        if train.packing
        else "each has a row of its own"
    )
    progress.say(
        f"data: {corpus.name}: {len(corpus.lengths)} conversations ({corpus.kind}), written with {corpus.template.origin}; learnt are the "
        f"answers, {train.learnt_share():.0%} of the tokens; {train.conversations} to train on in {len(train)} rows of "
        f"{train.seq_length} ({train.filled:.0%} filled): {how}"
    )
    cut, left_out = train.cut + validation.cut, train.left_out + validation.left_out
    if cut:
        progress.say(
            f"data: {cut} conversations are longer than --seq-length {train.seq_length} and are cut there"
            + (f"; {left_out} of them have no answer before the cut and are left out" if left_out else "")
        )


@torch.no_grad()
def check_packing(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    """Look whether ``model``, one of transformers', keeps packed documents apart: three short rows through it.

    Two rows end in the same document behind different ones, a third begins with it; its logits must be the same in all.

    Raises:
        Unsupported: they are not.
    """
    made: Any = model
    generator = torch.Generator().manual_seed(0)
    first, other, same = torch.randint(vocab_size, (3, _PROBE), generator=generator)
    rows = torch.stack((torch.cat((first, same)), torch.cat((other, same)), torch.cat((same, first))))
    positions = torch.arange(_PROBE).repeat(3, 2)
    training = model.training
    model.eval()
    try:
        logits_BSV = made(input_ids=rows.to(device), position_ids=positions.to(device), use_cache=False).logits.float()
    finally:
        model.train(training)
    behind, again, alone = logits_BSV[0, _PROBE:], logits_BSV[1, _PROBE:], logits_BSV[2, :_PROBE]
    # What is masked adds exact zeros; sums of other lengths may round otherwise, by a few units of the compute type.
    tolerance = (2e-2 if next(model.parameters()).dtype != torch.float32 else 1e-4) * float(alone.norm())
    apart = max(float((alone - found).norm()) for found in (behind, again))
    if not apart <= tolerance:
        raise Unsupported(
            f"--packing: {type(model).__name__} lets a document see what is before it in its row (its logits differ by "
            f"{apart / max(float(alone.norm()), 1e-30):.2g} of their norm): add --no-packing: each conversation gets a row of its own"
        )
