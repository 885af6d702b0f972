"""The decoders that ``--config`` and ``vb estimate`` know by name.

Llama-style and untied; the vocabulary is the tokenizer's, so a preset fixes everything else. Widths are multiples of 64
so that every block format divides them. Parameters, in millions, by vocabulary:

    =======  ======  ======  =====  =======  ========  ========  ========
    preset   hidden  layers  heads  feed-f.     4,096    32,000    50,257
    =======  ======  ======  =====  =======  ========  ========  ========
    tiny        128       9      4      384      2.97      10.1      14.8
    small       512      12      8     1536      45.1      73.7      92.4
    medium      768      12     12     2048      91.2     134.1     162.1
    large      1024      24     16     2752     312.0     369.1     406.5
    xl         2048      22     16     5632      1147      1261      1336
    7b         4096      32     32    11008      6510      6738      6888
    =======  ======  ======  =====  =======  ========  ========  ========

``7b`` is Llama 2's shape (6.74 G with its 32,000 tokens). ``tiny`` is deep and narrow: its embedding, the largest
single group, is under a fifth of the model, so it streams through a fast memory of a third of its training state.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.config import DecoderConfig

GPT2_VOCAB_SIZE = 50257


@dataclass(frozen=True)
class Preset:
    """A decoder's shape without its vocabulary.

    Args:
        name: as written after ``--config``.
        hidden_size, intermediate_size, num_layers, num_heads: as in ``DecoderConfig``.
        max_position: longest sequence unless another is asked for.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int

    def decoder_config(
        self,
        vocab_size: int,
        max_position: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> DecoderConfig:
        """The decoder for a tokenizer of ``vocab_size`` tokens and sequences of up to ``max_position``."""
        return DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_position=max_position or self.max_position,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
        )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("tiny", 128, 384, 9, 4, 256),
        Preset("small", 512, 1536, 12, 8, 1024),
        Preset("medium", 768, 2048, 12, 12, 1024),
        Preset("large", 1024, 2752, 24, 16, 1024),
        Preset("xl", 2048, 5632, 22, 16, 2048),
        Preset("7b", 4096, 11008, 32, 32, 4096),
    )
}


def find_preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        ConfigurationError: there is none; with the nearest name.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigurationError(f"preset {name!r} is not known; {hint}There are {', '.join(PRESETS)}")
