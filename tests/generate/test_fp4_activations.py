"""`--fp4-activations`: what is computed is w4a4's, prompts alone reach it, and what has no FP4 is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.generate.test_streamed_generate import folder_of, saved_model, tokenizer  # noqa: F401 - fixtures
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.generate.generate import generate
from vblackwell.generate.load import load_model, open_streamed
from vblackwell.generate.quantized import Packing
from vblackwell.kernels.fp4 import w4a4
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.tools.quantize import quantize_folder

PROMPT = "There was a wolf who"


@pytest.fixture
def rounded(monkeypatch) -> list[int]:
    """Products that are rounded from eight rows on, as their numbers of rows."""
    rows, of = list[int](), w4a4.quantize_rows
    monkeypatch.setattr(w4a4, "MIN_ROWS", 8)
    monkeypatch.setattr(w4a4, "quantize_rows", lambda x_MK: rows.append(x_MK.shape[0]) or of(x_MK))
    return rows


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:  # noqa: F811
    """Of sizes that are multiples of 32."""
    folder = tmp_path_factory.mktemp("fp4") / "model"
    saved_model(folder, "llama", vocab_size=259, intermediate_size=64, num_hidden_layers=2)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def linears(model: torch.nn.Module) -> int:
    return sum(isinstance(layer, FusedFP4Linear) for layer in model.modules())


@pytest.mark.parametrize("format", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_a_packed_folder_resident_and_streamed(folder, format, rounded, make_stack, tokenizer, tmp_path):  # noqa: F811
    quantize_folder(folder, tmp_path / "packed", format)
    model = load_model(tmp_path / "packed", w4a4=True)
    text = generate(model, tokenizer, PROMPT, 5, temperature=0)
    assert rounded == [len(PROMPT)] * linears(model), "a prompt's products, and none of the steps'"
    streamed = open_streamed(tmp_path / "packed", make_stack(128 << 10), w4a4=True)
    assert generate(streamed, tokenizer, PROMPT, 5, temperature=0) == text and len(rounded) == 2 * linears(model)


@torch.no_grad()
def test_the_command_packs_to_nvfp4_and_says_so(folder, rounded, tokenizer, make_stack, capsys):  # noqa: F811
    model = load_model(folder, packing=Packing("nvfp4"), w4a4=True)
    assert {layer.layout for layer in model.modules() if isinstance(layer, FusedFP4Linear)} == {"nvfp4-tiled"}
    exact, ids = load_model(folder, packing=Packing("nvfp4")), torch.arange(3, 33)[None]
    assert not torch.allclose(model(ids), exact(ids), rtol=1e-2, atol=1e-2)
    text = generate(model, tokenizer, PROMPT, 5, temperature=0)
    rounded.clear()
    streamed = open_streamed(folder, make_stack(128 << 10), fp4="nvfp4", w4a4=True)
    assert generate(streamed, tokenizer, PROMPT, 5, temperature=0) == text
    common = ["generate", "--model", str(folder), "--temperature", "0", "--max-new-tokens", "5", "--device", "cpu"]
    assert main([*common, "--prompt", PROMPT, "--use-fp4", "--fp4-activations"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == (PROMPT + text).rstrip("\n") and rounded == [len(PROMPT)] * 2 * linears(model)
    said = "--fp4-activations: linears are packed to nvfp4, and inputs of 897 rows and more are rounded to FP4 (nvfp4)"
    assert said in err


def test_what_has_no_fp4_is_refused(folder, folder_of, make_stack, monkeypatch, tmp_path, capsys):  # noqa: F811
    common = ["generate", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu", "--fp4-activations", "--model"]
    quantize_folder(folder, tmp_path / "int8", "int8")
    folder_of("llama")
    capsys.readouterr()
    for words, part in (
        ([str(folder)], "add --use-fp4"),
        ([str(folder), "--use-fp4", "--fp8-activations"], "drop one"),
        ([str(folder), "--assignment", "none.json"], "drop one"),
        ([str(folder_of("llama")), "--use-fp4"], "FP4 activations take multiples of 16 and 32"),
        ([str(tmp_path / "int8")], "is int8: FP4 activations go with nvfp4 and mxfp4"),
        ([str(tmp_path / "int8"), "--fast-memory", "128KiB", "--host-memory", "1MiB"], "is int8: FP4 activations go"),
    ):
        assert main([*common, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line
    with pytest.raises(ConfigurationError, match="give one of them"):
        load_causal_lm(folder, make_stack(1 << 20), fp4="mxfp4", trainable=False, w4a8=True, w4a4=True)
    monkeypatch.setattr(w4a4, "capability", lambda device: (9, 0))
    assert main([*common, str(folder), "--use-fp4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--fp4-activations: cpu has compute capability 9.0, FP4 tensor cores begin with 10.0 (Blackwell)" in line
