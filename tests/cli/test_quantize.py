"""``vb quantize``: what it writes, that compressed-tensors and we read the same numbers, and what it refuses."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig, GPTJForCausalLM

from tests.sqnr import sqnr
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError, CorruptData, FolderMismatch, Unsupported
from vblackwell.folders.commit import MANIFEST, CommitFolder, verify_folder
from vblackwell.folders.compressed_tensors import format_of_config, from_entries, not_packable_reasons, to_entries
from vblackwell.folders.folder import load_specs, load_state, save_model
from vblackwell.folders.tensor_file import SafetensorsShards, spec_of
from vblackwell.generate.command import generate_command
from vblackwell.generate.generate import generate
from vblackwell.generate.load import load_model
from vblackwell.nn.convert.assignment import Assignment
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.two_part import VBOptimizedLinear
from vblackwell.numerics.formats import format_named
from vblackwell.numerics.fp4 import joint_tensor_scale, quantize
from vblackwell.numerics.separation import separate
from vblackwell.tools.quantize import calibrate, quantize_command, quantize_folder

FORMATS = ["nvfp4", "mxfp4", "nf4", "int4", "int8"]
CONFIG = DecoderConfig(64, 64, 96, 2, 4, num_kv_heads=2, max_position=64, eos_token_id=0)


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {chr(97 + i) if i < 26 else f"<{i}>": i for i in range(64)}
    made = Tokenizer(BPE(letters, [], unk_token="<63>"))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small Llama folder in bf16, in two shards, with a tokenizer."""
    parent = tmp_path_factory.mktemp("models")
    model = Decoder(CONFIG, seed=1, dtype=torch.bfloat16)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("q_proj.weight"):
            parameter.data.mul_(2.0 + number)  # so that q, k and v have separate tensor scales
    state = model.state_dict()
    with CommitFolder(parent, "source") as folder:
        specs = [spec_of(*item) for item in state.items()]
        save_model(folder, CONFIG.to_hf(), specs, iter(state.items()), tokenizer(), max_shard_bytes=60_000)
    return parent / "source"


def expected_weights(source, format, search="mse"):
    """What each linear must decode to, from the codec alone;
    q/k/v and gate/up in one tensor, hence one tensor scale.
    """
    state = dict(load_state(source))
    expected = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for names in (["q", "k", "v"], ["o"], ["gate", "up"], ["down"]):
            part = "self_attn" if names[0] in "qo" else "mlp"
            names = [f"{at}.{part}.{name}_proj" for name in names]
            weights = [state[f"{name}.weight"] for name in names]
            decoded = quantize(torch.cat(weights), format, search).dequantize(torch.float32)
            parts = decoded.split([len(weight) for weight in weights])
            expected.update(zip(names, parts, strict=True))
    return expected


def decompressed(folder):
    """Every packed linear as the compressed-tensors package decompresses it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    state = dict(load_state(folder))
    names = [name.removesuffix(".weight_packed") for name in state if name.endswith(".weight_packed")]
    for name in names:
        local = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        yield name, compressor.decompress(local, scheme)["weight"]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4", "int8"])
def test_compressed_tensors_decompresses_to_the_same_values(source, tmp_path, format):
    out = tmp_path / "out"
    quantize_folder(source, out, format)
    expected = expected_weights(source, format)
    found = dict(decompressed(out))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name


def test_max_scales_decompress_within_one_rounding(source, tmp_path):
    """There the package divides by 1 / ts: its value is one more fp32 rounding away,
    and bf16 of it may differ by an ulp.
    """
    quantize_folder(source, tmp_path / "out", "nvfp4", "max")
    expected = expected_weights(source, "nvfp4", "max")
    for name, weight in decompressed(tmp_path / "out"):
        torch.testing.assert_close(weight.float(), expected[name].to(weight.dtype).float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_it_loads_back_with_the_exact_weights_and_generates(source, tmp_path, format):
    out = tmp_path / "out"
    quantize_folder(source, out, format)
    verify_folder(out)
    model = load_model(out)
    expected = expected_weights(source, format)
    packed = {name: child for name, child in model.named_modules() if isinstance(child, FusedFP4Linear)}
    assert packed.keys() == expected.keys()
    for name, layer in packed.items():
        assert torch.equal(layer.packed.dequantize(torch.float32), expected[name]), name
    original = dict(load_state(source))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(model.state_dict()[name], original[name]), "embedding, head and norms are copied"
    text = generate(model, tokenizer(), "abc", max_new_tokens=8, temperature=0)
    reference = Decoder(CONFIG, dtype=torch.bfloat16)
    reference.load_state_dict(
        original | {f"{name}.weight": weight.to(torch.bfloat16) for name, weight in expected.items()}
    )
    assert len(text) > 0
    tokens = torch.arange(12).view(1, 12)
    # bf16 activations; our layer keeps fp32 weights and sums, the reference bf16 weights: 2^-8 relative per layer
    torch.testing.assert_close(model(tokens), reference(tokens), rtol=0.05, atol=0.05)


def test_transformers_opens_it(source, tmp_path):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    out = tmp_path / "out"
    quantize_folder(source, out, "nvfp4")
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = AutoModelForCausalLM.from_pretrained(
            out, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
        )
    expected = expected_weights(source, "nvfp4")
    state = model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(state[f"{name}.weight"], weight.to(torch.bfloat16)), name


def test_report_and_sizes(source, tmp_path):
    seen = []
    report = quantize_folder(
        source, tmp_path / "out", "nvfp4", on_layer=lambda layer, number, count: seen.append((number, count))
    )
    assert seen == [(number, 14) for number in range(1, 15)]
    assert report.kept == {"lm_head": "its name is among those to keep"}
    assert all(20.5 < layer.sqnr_db < 23 for layer in report.layers)  # 21.8 on a Gaussian, small matrices scatter
    assert report.bytes_before == sum(spec.size_bytes for spec in load_specs(source).values())
    assert report.bytes_after == sum(spec.size_bytes for spec in load_specs(tmp_path / "out").values())
    layer = next(layer for layer in report.layers if layer.name.endswith("0.mlp.down_proj"))
    assert (layer.shape, layer.bytes_before, layer.bytes_after) == ((64, 96), 64 * 96 * 2, 64 * 96 * 9 // 16 + 4)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_rows_that_are_no_multiple_of_the_block_are_kept(tmp_path):
    config = DecoderConfig(32, 40, 64, 1, 2, head_dim=16)
    model = Decoder(config)
    with CommitFolder(tmp_path, "source") as folder:
        specs = [spec_of(*item) for item in model.state_dict().items()]
        save_model(folder, config.to_hf(), specs, iter(model.state_dict().items()))
    report = quantize_folder(tmp_path / "source", tmp_path / "out", "mxfp4")
    assert {layer.name.split(".")[-1] for layer in report.layers} == {"o_proj", "down_proj"}
    assert "rows of 40 are no multiple of the block of 32" in report.kept["model.layers.0.mlp.up_proj"]
    ignore = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.up_proj" in ignore and "lm_head" in ignore
    loaded = load_model(tmp_path / "out")
    assert isinstance(loaded.get_submodule("model.layers.0.mlp.up_proj"), torch.nn.Linear)
    assert loaded(torch.arange(6).view(1, 6)).isfinite().all()


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
def test_models_of_transformers_with_biases_and_ties(tmp_path, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model(kind, vocab_size=50, max_position_embeddings=32, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)  # biases that are not zero
    model.save_pretrained(tmp_path / "source")
    report = quantize_folder(tmp_path / "source", tmp_path / "out", "int8")
    loaded = load_model(tmp_path / "out")
    tokens = torch.arange(10).view(1, 10)
    with torch.no_grad():
        ours, theirs = loaded(tokens).logits, model(tokens).logits
    assert report.sqnr_db > 38
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # int8 weights: 40 dB a layer
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight


def test_experts_are_kept_told_and_read_back(tmp_path, capsys):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "num_local_experts": 3}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, hidden_size=32, intermediate_size=64, **sizes)).eval()
    model.save_pretrained(tmp_path / "source")
    assert quantize_command(str(tmp_path / "source"), str(tmp_path / "out"), "int8") == 0
    assert "kept 9 tensors of experts, 72.0 KiB" in capsys.readouterr().out
    loaded, tokens = load_model(tmp_path / "out"), torch.arange(10).view(1, 10)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(loaded.get_parameter(experts), model.get_parameter(experts))
    with torch.no_grad():
        ours, theirs = loaded(tokens).logits, model(tokens).logits
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # int8 weights: 40 dB a layer


def test_refusals(source, tmp_path):
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        quantize_folder(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="the model itself"):
        quantize_folder(source, source)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="was not written by this command"):
        quantize_folder(source, tmp_path / "used")
    shutil.copytree(source, tmp_path / "run")
    with pytest.raises(ConfigurationError, match="was not written by this command"):  # but by a run, whose model it is
        quantize_folder(source, tmp_path / "run")
    quantize_folder(source, tmp_path / "packed")
    (tmp_path / "packed" / "eval").mkdir()
    with pytest.raises(ConfigurationError, match=r"what this command did not write \(eval\): move that away"):
        quantize_folder(source, tmp_path / "packed", "int8")
    (tmp_path / "packed" / "eval").rmdir()
    manifest = (tmp_path / "packed" / "manifest.json").read_bytes()
    (tmp_path / "packed" / "manifest.json").write_text('{"files": null}')
    with pytest.raises(ConfigurationError, match="what this command did not write"):
        quantize_folder(source, tmp_path / "packed", "int8")
    (tmp_path / "packed" / "manifest.json").write_bytes(manifest)
    assert quantize_folder(source, tmp_path / "packed", "int8").layers
    shutil.rmtree(tmp_path / "packed")
    with pytest.raises(ConfigurationError, match="holds the model"):
        quantize_folder(source, source.parent)
    with pytest.raises(ConfigurationError, match="selects no linear"):
        quantize_folder(source, tmp_path / "out", pattern="nothing_like_it")
    with pytest.raises(ConfigurationError, match="choose one of nvfp4"):
        quantize_folder(source, tmp_path / "out", "fp3")
    quantize_folder(source, tmp_path / "out", "nvfp4")
    with pytest.raises(Unsupported, match="quantised already"):
        quantize_folder(tmp_path / "out", tmp_path / "again")
    quantize_folder(source, tmp_path / "out", "mxfp4")  # what this wrote may be replaced
    foreign = tmp_path / "foreign"
    shutil.copytree(source, foreign)
    (foreign / MANIFEST).unlink()
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(FolderMismatch, match=r"embed_tokens\.weight"):
        quantize_folder(foreign, tmp_path / "new")
    assert (
        format_of_config(json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]).name == "mxfp4"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "out", "run", "used"]


@pytest.mark.parametrize(
    ("format", "name", "bad"),
    [
        ("nvfp4", "model.layers.1.mlp.up_proj.weight", torch.nan),
        ("nf4", "model.layers.1.mlp.up_proj.weight", torch.inf),
        ("nvfp4", "model.embed_tokens.weight", torch.nan),
        ("int8", "model.norm.weight", -torch.inf),
        ("mxfp4", "lm_head.weight", torch.nan),
    ],
)
def test_bad_weights_leave_no_files(source, tmp_path, format, name, bad):
    """Those that are packed, and those that are kept as they are."""
    broken = tmp_path / "broken"
    broken.mkdir()
    state = dict(load_state(source))
    state[name].view(-1)[5] = bad
    save_file(state, broken / "model.safetensors")
    (broken / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(
        ConfigurationError, match=rf"{re.escape(name.removesuffix('.weight'))}[.a-z]* has 1 (inf or NaN|NaN or inf)"
    ):
        quantize_folder(broken, tmp_path / "out", format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_damaged_quantised_folders_are_refused(source, tmp_path):
    quantize_folder(source, tmp_path / "out", "nvfp4")
    config, path = json.loads((tmp_path / "out/config.json").read_text()), tmp_path / "out/model.safetensors"
    state = load_file(path)

    def load_with(changed, settings=config):
        save_file(changed, path)
        (tmp_path / "out/config.json").write_text(json.dumps(settings))
        return load_model(tmp_path / "out")

    at = "model.layers.0.mlp.up_proj"
    with pytest.raises(CorruptData, match=r"up_proj lacks.*weight_scale"):
        load_with({name: tensor for name, tensor in state.items() if name != f"{at}.weight_scale"})
    with pytest.raises(CorruptData, match="block_scales is"):
        load_with(state | {f"{at}.weight_scale": state[f"{at}.weight_scale"][:, :1].contiguous()})
    packed, scale = state[f"{at}.weight_packed"], state[f"{at}.weight_global_scale"]
    for entry, wrong in (("packed", packed.int()), ("packed", packed[0]), ("global_scale", scale.repeat(2))):
        with pytest.raises(CorruptData, match=f"up_proj.weight_{entry} is .* instead of"):
            load_with(state | {f"{at}.weight_{entry}": wrong})
    with pytest.raises(ConfigurationError, match=r"lacks model\.norm\.weight"):
        load_with({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    with pytest.raises(ConfigurationError, match="extra"):
        load_with(state | {"extra.weight": torch.zeros(1)})
    for change in ({"quant_method": "gptq"}, {"config_groups": {}}, {"format": "float-quantized"}):
        with pytest.raises(Unsupported, match="vLLM|the tool that wrote it"):
            load_with(state, config | {"quantization_config": config["quantization_config"] | change})


@pytest.mark.parametrize("format", FORMATS)
def test_entries_round_trip(format):
    torch.manual_seed(0)
    for n, k in ((3, 128), (5, 192), (2, 7)):
        form = format_named(format)
        if not_packable_reasons(form, n, k):
            assert k == 7
            continue
        packed = quantize(torch.randn(n, k), format)
        again = from_entries(to_entries(packed), form, torch.float32, "layer")
        assert torch.equal(again.dequantize(), packed.dequantize())


def test_command_line(source, tmp_path, capsys):
    from vblackwell.cli import main

    assert main(["quantize", "--model", str(source), "--format", "nvfp4", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(" dB") for line in lines) == 14
    assert any("kept lm_head" in line for line in lines) and lines[-1].endswith(f"in {tmp_path / 'out'}")
    words = ["--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", "--model", str(tmp_path / "out"), "--prompt", "abc", *words]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert main(["quantize", "--model", str(source), "--format", "fp3", "--out", str(tmp_path / "x")]) == 2
    assert "choose one of nvfp4" in capsys.readouterr().err and not Path(tmp_path / "x").exists()


def test_names_to_keep_may_begin_with_flags(source, tmp_path, capsys):
    out = ["--model", str(source), "--out", str(tmp_path / "out")]
    assert main(["quantize", *out, "--keep", "(?i)MLP"]) == 0
    packed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.endswith(" dB")]
    assert len(packed) == 8 and all(name.split(".")[3] == "self_attn" for name in packed)


def test_an_assignment_says_what_is_packed(source, tmp_path):
    named = {"up": (96, 64), "down": (64, 96), "gate": (96, 64)}
    shapes = {f"model.layers.0.mlp.{name}_proj": shape for name, shape in named.items()}
    up, down, gate = shapes
    assignment = Assignment({up: "nvfp4", down: "bf16", gate: "two-part"}, shapes)
    report = quantize_folder(source, tmp_path / "out", assignment=assignment)
    found = {layer.name: layer for layer in report.layers}
    assert set(found) == {up, gate} and "assignment" in report.kept[down]
    assert 8 * found[gate].bytes_after == 8.5 * 96 * 64 + 32 and found[gate].sqnr_db > 40 > found[up].sqnr_db
    model = load_model(tmp_path / "out")
    assert isinstance(model.get_submodule(up), FusedFP4Linear) and type(model.get_submodule(down)) is torch.nn.Linear
    both, state = model.get_submodule(gate), dict(load_state(source))
    # What gate and up share is a tensor scale: the parts are those of that one.
    scale = joint_tensor_scale([state[f"{name}.weight"] for name in (gate, up)])
    separated = separate(state[f"{gate}.weight"], tensor_scale=scale)
    assert torch.equal(both.packed.fine, separated.fine) and torch.equal(
        both.packed.dequantize(), separated.dequantize()
    )
    ids = torch.arange(9)[None]
    plain = load_model(source)
    plain.get_submodule(gate).weight.data.copy_(separated.dequantize())
    plain.get_submodule(up).weight.data.copy_(model.get_submodule(up).packed.dequantize())
    assert sqnr(plain(ids), model(ids)) > 30  # bf16 sums in other orders
    path = tmp_path / "out/model.safetensors"
    held = load_file(path)
    for name, tensor in {"a.weight_fine": None, "lost": None, "short": held[f"{gate}.weight_fine"][1:]}.items():
        changed = {key: value for key, value in held.items() if key != f"{gate}.weight_fine"}
        if name != "lost":
            changed |= {f"{gate}.weight_fine": held[f"{gate}.weight_fine"] if tensor is None else tensor}
            changed |= {name: torch.zeros(1)} if tensor is None else {}
        save_file(changed, path)
        with pytest.raises((ConfigurationError, CorruptData), match="fine"):
            load_model(tmp_path / "out")
    with pytest.raises(ConfigurationError, match="another model"):
        quantize_folder(source, tmp_path / "refused", assignment=Assignment({up: "nvfp4"}, {up: (64, 64)}))
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigurationError, match="nvfp4, not int8"):
        quantize_folder(source, tmp_path / "refused", "int8", assignment=assignment)


def test_generate_takes_the_same_file(source, tmp_path, capsys):
    """Packed while it is opened: what the folder made by it writes."""
    shapes = {f"model.layers.1.mlp.{name}_proj": (96, 64) for name in ("up", "gate")}
    up, gate = shapes
    path = tmp_path / "precision.json"
    Assignment({up: "nvfp4", gate: "two-part"}, shapes).save(path)
    written = []  # in a folder up and gate share a tensor scale, which may change a last bit and decides no token here
    quantize_folder(source, tmp_path / "out", assignment=Assignment.load(path))
    for folder, places in ((source, {"assignment": str(path)}), (tmp_path / "out", {})):
        assert generate_command(str(folder), "a", 12, temperature=0, **places) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] and len(written[0]) > 12
    for wrong in ({"use_fp4": True}, {"fast_memory": "1MiB"}):
        with pytest.raises(ConfigurationError, match="--assignment packs a model that is all on the device"):
            generate_command(str(source), "a", 3, assignment=str(path), **wrong)
    Assignment({up: "nvfp4"}, {up: (64, 64)}).save(path)
    with pytest.raises(ConfigurationError, match="another model"):
        generate_command(str(source), "a", 3, assignment=str(path))


@pytest.mark.parametrize("interrupted", [0, 3, 14, None])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_interrupt_says_what_is_left(is_there, interrupted, source, tmp_path, monkeypatch, capsys):
    """Ctrl-C after so many tensors, or when the folder has its name."""
    monkeypatch.chdir(tmp_path)
    words = ["quantize", "--model", str(source), "--device", "cpu", "--out", "out"]
    if is_there:
        assert main([*words, "--format", "int8"]) == 0
        capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("out").rglob("*")}
    written, write = 0, SafetensorsShards.write

    def interrupting(*given):
        nonlocal written
        if written == interrupted:
            signal.raise_signal(signal.SIGINT)
        written += 1
        return write(*given)

    if interrupted is None:
        monkeypatch.setattr("vblackwell.tools.quantize.load_specs", lambda _: signal.raise_signal(signal.SIGINT))
    else:
        monkeypatch.setattr(SafetensorsShards, "write", interrupting)
    assert main(words) == 130
    left = "is complete" if interrupted is None else "is as it was" if is_there else "was not written"
    assert capsys.readouterr().err == f"vb: interrupted: out {left}\n"
    assert os.listdir() == ["out"] * (is_there or interrupted is None)
    if interrupted is None:
        verify_folder(Path("out"))
    else:
        assert {path: path.read_bytes() for path in Path("out").rglob("*")} == before


def test_an_interrupt_keeps_what_was_measured(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, measured = "model.layers.1.mlp.up_proj", {"loss": 1.0, "loss_after": 1.0}
    made = Assignment({name: "nvfp4"}, {name: (96, 64)}, measured)
    monkeypatch.setattr("vblackwell.tools.quantize.calibrate", lambda *_, **__: made)
    monkeypatch.setattr(SafetensorsShards, "write", lambda *_: signal.raise_signal(signal.SIGINT))
    assert main(["quantize", "--model", str(source), "--device", "cpu", "--out", "out/", "--budget", "1"]) == 130
    kept = "what was measured is kept: --assignment out.assignment.json packs by it"
    assert capsys.readouterr().err == f"vb: interrupted: out was not written; {kept}\n"
    assert os.listdir() == ["out.assignment.json"] and Assignment.load("out.assignment.json") == made


def test_a_budget_is_measured_kept_and_packed_by(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("abc bca cab " * 400)
    monkeypatch.setattr("vblackwell.tools.quantize._SEQUENCES", 4)
    options = {"max_bits": 8.0, "calibration": str(tmp_path / "text.txt")}
    assert quantize_command(str(source), str(tmp_path / "new/out"), **options) == 0
    said, chosen = capsys.readouterr().out, Assignment.load(tmp_path / "new/out.assignment.json")
    assert "calibration loss" in said and 4.5 < chosen.bits <= 8 and len(chosen.names("two-part")) > 0
    model, kinds = load_model(tmp_path / "new/out"), {"nvfp4": FusedFP4Linear, "two-part": VBOptimizedLinear}
    for precision, kind in kinds.items():
        packed = [name for name, module in model.named_modules() if isinstance(module, kind)]
        assert packed == chosen.names(precision)
    for wrong in (
        {"budget": 0.1, "format": "int8"},
        {"budget": -1.0, **options},
        {"calibration": "x"},
        {"budget": 0.1, "assignment": str(tmp_path / "new/out.assignment.json")},
    ):
        with pytest.raises(ConfigurationError):
            quantize_command(str(source), str(tmp_path / "refused"), **wrong)
        assert not (tmp_path / "refused").exists()


def test_what_is_measured_is_the_model_of_the_files(source, tmp_path, monkeypatch):
    """An architecture whose limit has another name;
    and a layer that no file has, which transformers would draw at random.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("abc bca cab " * 400)
    shape = GPTJConfig(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, bos_token_id=0, eos_token_id=0
    )
    GPTJForCausalLM(shape).save_pretrained(tmp_path / "model")
    shutil.copy(source / "tokenizer.json", tmp_path / "model")
    monkeypatch.setattr("vblackwell.tools.quantize._SEQUENCES", 4)
    chosen = calibrate(tmp_path / "model", tmp_path / "text.txt", 1.0, pattern="q_proj")
    assert [*chosen.shapes] == ["transformer.h.0.attn.q_proj"]
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 2}))
    with pytest.raises(FolderMismatch, match=r"lacks transformer\.h\.1\."):
        calibrate(tmp_path / "model", tmp_path / "text.txt", 1.0)
