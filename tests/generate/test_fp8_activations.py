"""`--fp8-activations`: what is computed is w4a8's, prompts alone reach it, what it costs is printed, and what has no
FP8 is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.generate.test_streamed_generate import folder_of, saved_model, tokenizer  # noqa: F401 - fixtures
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.cli import main, make_parser
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.generate.generate import generate
from vblackwell.generate.load import load_model, open_resident, open_streamed
from vblackwell.generate.quantized import Packing
from vblackwell.kernels.fp4 import w4a8
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.tools.quantize import quantize_command, quantize_folder
from vblackwell.train.config import field_help

LINEARS, PACKED = 4 * 7, 4 * 6  # of the small models; rows of 48 are none of the folder's blocks of 32
PROMPT = "There was a wolf who"


@pytest.fixture
def rounded(monkeypatch) -> list[int]:
    """Products that are rounded from eight rows on, as their numbers of rows."""
    rows, of = list[int](), w4a8.quantize_rows
    monkeypatch.setattr(w4a8, "MIN_ROWS", 8)
    monkeypatch.setattr(w4a8, "quantize_rows", lambda x_MK: rows.append(x_MK.shape[0]) or of(x_MK))
    return rows


@pytest.fixture(scope="module")
def packed(folder_of, tmp_path_factory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("mxfp4") / "packed"
    quantize_folder(folder_of("llama"), folder, "mxfp4")
    return folder


@torch.no_grad()
def test_logits_are_those_of_rounded_inputs(packed, rounded):
    fast, exact = (load_model(packed, dtype=torch.float32, w4a8=each) for each in (True, False))
    ids = torch.arange(3, 33)[None]
    few, many = ids[:, :7], ids
    plain = exact(many)
    assert torch.equal(fast(few), exact(few)) and not rounded
    for layer in exact.modules():
        if isinstance(layer, FusedFP4Linear):
            layer.register_forward_pre_hook(lambda _, args: (rounded_rows(args[0]),))
    # sums of fp32 products over 32 and 48 columns, in two layouts, through four layers
    torch.testing.assert_close(fast(many), exact(many), rtol=1e-4, atol=1e-4)
    assert rounded == [30] * 2 * PACKED and not torch.allclose(exact(many), plain, rtol=1e-3, atol=1e-3)


def test_the_flags_name_the_rows_from_which_on_it_rounds():
    """Help must not import torch, so it repeats the number."""
    texts = [field_help()["fp8_activations"], *(action.help for action in make_parser("generate")._actions)]
    assert [str(w4a8.MIN_ROWS) in text for text in texts if "FP8" in text] == [True, True]


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    q_MK, scale_M1 = w4a8.quantize_rows(x.flatten(0, -2))
    return (q_MK.float() * scale_M1).view_as(x)


@pytest.mark.parametrize("where", [pytest.param("resident", marks=pytest.mark.slow), "streamed"])
def test_the_command_rounds_prompts_alone_and_says_so(where, packed, rounded, tokenizer, capsys):  # noqa: F811
    common = ["generate", "--model", str(packed), "--temperature", "0", "--max-new-tokens", "5", "--device", "cpu"]
    levels = ["--fast-memory", "128KiB", "--host-memory", "1MiB"] if where == "streamed" else []
    assert main([*common, *levels, "--prompt", PROMPT, "--fp8-activations"]) == 0
    out, err = capsys.readouterr()
    assert rounded == [len(PROMPT)] * PACKED, "a prompt's products, and none of the steps'"
    assert "--fp8-activations: inputs of 897 rows and more are rounded to FP8" in err
    model = load_model(packed, w4a8=True)
    assert out.rstrip("\n") == (PROMPT + generate(model, tokenizer, PROMPT, 5, temperature=0)).rstrip("\n")


def test_linears_are_packed_to_mxfp4_for_it(folder_of, rounded, tokenizer, make_stack, capsys):  # noqa: F811
    folder = folder_of("llama")
    model = load_model(folder, packing=Packing("mxfp4"), w4a8=True)
    assert {layer.layout for layer in model.modules() if isinstance(layer, FusedFP4Linear)} == {"mxfp4-tiled"}
    text = generate(model, tokenizer, PROMPT, 5, temperature=0)
    streamed = open_streamed(folder, make_stack(96 << 10), fp4="mxfp4", w4a8=True)
    assert generate(streamed, tokenizer, PROMPT, 5, temperature=0) == text
    assert rounded == [len(PROMPT)] * 2 * LINEARS
    common = ["generate", "--model", str(folder), "--temperature", "0", "--max-new-tokens", "5", "--device", "cpu"]
    assert main([*common, "--prompt", PROMPT, "--use-fp4", "--fp8-activations"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == (PROMPT + text).rstrip("\n") and "linears are packed to mxfp4" in err
    assert len(rounded) == 3 * LINEARS


def test_its_loss_is_printed(folder_of, rounded, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, text = str(folder_of("llama")), tmp_path / "text.txt"
    text.write_text("There was a wolf who said that there was a sheep. " * 60)
    options = {"calibration": str(text), "fp8_activations": True}
    assert quantize_command(source, str(tmp_path / "out"), "mxfp4", **options) == 0
    *_, packed, both = capsys.readouterr().out.splitlines()
    assert packed.startswith("calibration loss ") and ", packed " in packed
    assert both.startswith("with --fp8-activations")
    assert len(rounded) % PACKED == 0 and min(rounded) >= 897
    exact, fast = (float(line.split()[-2]) for line in (packed, both))
    assert exact != fast
    for wrong in ({"format": "nvfp4"}, {"assignment": str(tmp_path / "none.json")}):
        with pytest.raises(ConfigurationError):
            quantize_command(source, str(tmp_path / "more"), **{"format": "mxfp4"} | options | wrong)
    text.write_text("short")
    with pytest.raises(ConfigurationError, match="calibration needs at least"):
        quantize_command(source, str(tmp_path / "more"), "mxfp4", **options)
    assert not (tmp_path / "more").exists()


def test_what_has_no_fp8_is_refused(folder_of, packed, tmp_path, make_stack, monkeypatch, capsys):  # noqa: F811
    source, nvfp4 = folder_of("llama"), tmp_path / "nvfp4"
    quantize_folder(source, nvfp4)
    common = ["generate", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu", "--fp8-activations", "--model"]
    levels = ["--fast-memory", "128KiB", "--host-memory", "1MiB"]
    for words, part in (
        ([str(nvfp4)], "_proj.weight is nvfp4: FP8 activations go with mxfp4"),
        ([str(nvfp4), *levels], "_proj.weight is nvfp4: FP8 activations go with mxfp4"),
        ([str(source)], "add --use-fp4"),
        ([str(source), *levels], "add --use-fp4"),
    ):
        assert main([*common, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line
    odd = tmp_path / "odd"
    saved_model(odd, "llama", vocab_size=259, intermediate_size=40)
    with pytest.raises(ConfigurationError, match=r"layers\.0\.mlp\.gate_proj\.weight is 40 x 32.*--keep"):
        open_streamed(odd, make_stack(1 << 20), fp4="mxfp4", w4a8=True)
    with pytest.raises(ConfigurationError, match=r"layers\.0\.mlp\..*_proj\.weight is .*40.*--keep"):
        load_model(odd, packing=Packing("mxfp4"), w4a8=True)
    with pytest.raises(ConfigurationError, match="has none"):
        load_causal_lm(source, make_stack(1 << 20), w4a8=True)
    capsys.readouterr()
    for capability, folder, part in (((8, 6), packed, "8.6"), ((9, 0), source, "bf16 or fp16")):
        monkeypatch.setattr(w4a8, "capability", lambda device, found=capability: found)
        assert main([*common, str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line


def test_blocks_too_far_apart_are_named(folder_of, tmp_path, make_stack):  # noqa: F811
    folder = tmp_path / "wide"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, :32] *= 2.0**-15
    model.save_pretrained(folder)
    with pytest.raises(Unsupported, match=r"layers\.2\.mlp\.down_proj\.weight: block exponents .*--keep"):
        open_streamed(folder, make_stack(1 << 20), fp4="mxfp4", w4a8=True)
    with pytest.raises(Unsupported, match=r"layers\.2\.mlp\.down_proj\.weight: block exponents .*--keep"):
        load_model(folder, packing=Packing("mxfp4"), w4a8=True)
    load_model(folder, packing=Packing("mxfp4", keep=r"2\.mlp\.down_proj"), w4a8=True)


def test_quantize_refuses_such_a_layer_when_it_meets_it(folder_of, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Blocks of layer 1 are too far apart: no layer after it is packed, and nothing is left. Of a wrong shape, which is
    known before, none is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, odd, text = tmp_path / "wide", tmp_path / "odd", tmp_path / "text.txt"
    text.write_text("There was a wolf who said that there was a sheep. " * 60)
    saved_model(odd, "llama", vocab_size=259, intermediate_size=40)
    saved_model(folder, "llama", vocab_size=259, intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, :32] *= 2.0**-17
    model.save_pretrained(folder)
    for each in (folder, odd):
        shutil.copy(folder_of("llama") / "tokenizer.json", each)
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    words = ["--format", "mxfp4", "--fp8-activations", "--calibration", str(text), "--device", "cpu"]
    for source, part, packed in (
        (folder, "layers.1.mlp.down_proj.weight: block exponents of a row span", True),
        (odd, "is 40 x 32: FP8 activations take multiples of 16", False),
    ):
        assert main(["quantize", "--model", str(source), "--out", str(tmp_path / "out"), *words]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert part in line and "--keep" in line
        assert ("layers.0." in out) == packed and "layers.1." not in out and "layers.2." not in out
    assert sorted(tmp_path.iterdir()) in (before, sorted([*before, tmp_path / "cache"]))
    quantize_folder(folder, tmp_path / "out", "mxfp4", keep=r"lm_head|1\.mlp\.down_proj", w4a8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["resident", "streamed"])
@torch.no_grad()
def test_prompts_reach_the_kernel(where, tokenizer, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A prompt's products are those of w4a8 layers, bit for bit, by the backend that the registry names; a step's are
    not rounded; and the command writes what the model does."""
    if torch.cuda.get_device_capability() < w4a8.FP8_CAPABILITY:
        pytest.skip("no FP8 tensor cores")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=259, max_position_embeddings=2048, initializer_range=0.1)
    torch.manual_seed(0)
    plain, folder = tmp_path / "plain", tmp_path / "packed"
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(plain)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(plain)
    quantize_folder(plain, folder, "mxfp4", device="cuda")
    ran, run_rows = list[tuple[str, int]](), w4a8.run_rows

    def counted(op, table, x, *rest):
        ran.append((op, x.numel() // x.shape[-1]))
        return run_rows(op, table, x, *rest)

    monkeypatch.setattr(w4a8, "run_rows", counted)
    if where == "resident":
        model = open_resident(folder, "cuda", w4a8=True)
        layers = [layer for layer in model.modules() if isinstance(layer, FusedFP4Linear)]
        ids, seen = torch.randint(3, 259, (1, 1000), device="cuda"), []
        hooks = [
            layer.register_forward_hook(lambda layer, args, y: seen.append((layer, args[0], y))) for layer in layers
        ]
        model(ids)
        assert len(seen) == len(layers) == 14 and ran == [("fp4_linear_w4a8", 1000)] * 14
        for layer, x, y in seen:
            alone = FusedFP4Linear.from_packed(layer.packed, w4a8=True)
            assert torch.equal(alone(x), y)
            exact = FusedFP4Linear.from_packed(layer.packed)(x)
            # E4M3 rounds rows to 31 dB; a bf16 output adds little to that
            assert 0 < float((exact - y).float().norm() / exact.float().norm()) < 10 ** (-27 / 20)
        for hook in hooks:
            hook.remove()
    ran.clear()
    prompt = "".join(chr(97 + number % 26) for number in range(1000))
    if where == "resident":
        words = ["--temperature", "0", "--max-new-tokens", "8", "--device", "cuda", "--fp8-activations"]
        assert main(["generate", "--model", str(folder), *words, "--prompt", prompt]) == 0
        assert len(capsys.readouterr().out) > 1000
    else:
        levels = [{"device": "cuda:0", "capacity_mb": 1024}, {"device": "cpu", "capacity_mb": 256}]
        with VGPUStack({"levels": levels}) as stack:
            streamed = open_streamed(folder, stack, tokens=1008, w4a8=True)
            assert generate(streamed, tokenizer, prompt, 8, temperature=0)
    rounded = [rows for op, rows in ran if op == "fp4_linear_w4a8"]
    assert rounded == [1000] * 14, "a prompt's products, and none of the steps'"
