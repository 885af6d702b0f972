"""The block formats: code books, block sizes and scale types, as published.

A decoded element is ``(value[code] * block_scale) * tensor_scale`` in fp32; the tensor scale is nvfp4's alone. E2M1 of
nvfp4 and mxfp4, and the scales E4M3 and E8M0, are those of the OCP Microscaling specification 1.0; nf4 is the table of
QLoRA (Dettmers et al. 2023); int4 stores ``q + 8`` as compressed-tensors files do.
"""

from dataclasses import dataclass, replace

import torch

from vblackwell.errors import ConfigurationError, check_known

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4_VALUES: tuple[float, ...] = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

E2M1_VALUES: tuple[float, ...] = _E2M1 + tuple(-value for value in _E2M1)
E4M3_MAX = 448.0
E4M3_MAX_CODE = 0x7E  # 0x7F is NaN
E8M0_MAX_CODE = 0xFE  # 0xFF is NaN


@dataclass(frozen=True)
class Format:
    name: str
    block_size: int | None  # elements of the last dimension that share a scale; None: the whole row
    bits: int  # an element takes; two 4-bit codes share a byte, low nibble first
    scale_dtype: torch.dtype  # how block scales are stored; uint8: the bits of E4M3 (nvfp4) or E8M0 (mxfp4)
    values: tuple[float, ...]  # what each 4-bit code means; empty for int8
    max_value: float  # largest magnitude of a code
    zero_code: int  # the code of 0, also what padding holds

    def padded(self, k: int) -> int:
        """Length of a stored row of ``k`` elements: the next multiple of the block."""
        block = self.block_of(k)
        return -(-k // block) * block

    def block_of(self, k: int) -> int:
        return self.block_size or k

    def codes_shape(self, n: int, k: int) -> tuple[int, int]:
        return n, self.padded(k) * self.bits // 8

    def scales_shape(self, n: int, k: int) -> tuple[int, int]:
        return n, self.padded(k) // self.block_of(k)

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.uint8


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("nvfp4", 16, 4, torch.uint8, E2M1_VALUES, 6.0, 0),
        Format("mxfp4", 32, 4, torch.uint8, E2M1_VALUES, 6.0, 0),
        Format("nf4", 64, 4, torch.float32, NF4_VALUES, 1.0, 7),
        Format("int4", 32, 4, torch.bfloat16, tuple(float(code - 8) for code in range(16)), 7.0, 8),
        Format("int8", None, 8, torch.float32, (), 127.0, 0),
    )
}


def format_named(name: str, block_size: int | None = None) -> Format:
    """The format called ``name``; ConfigurationError if there is none, or it has no such blocks."""
    check_known("format", name, FORMATS)
    form = FORMATS[name]
    if block_size is None or block_size == form.block_size:
        return form
    if (name == "int4" and block_size in (32, 128)) or (name == "int8" and block_size > 0 and block_size % 2 == 0):
        return replace(form, block_size=block_size)
    choices = {"int4": "32 or 128", "int8": "None (the row) or any even number"}.get(name, str(form.block_size))
    raise ConfigurationError(f"{name} has no blocks of {block_size}: its block size is {choices}")


def check_search(scale_search: str) -> str:
    check_known("scale_search", scale_search, ("mse", "max"))
    return scale_search
