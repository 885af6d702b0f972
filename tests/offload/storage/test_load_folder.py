"""A folder into a stack: what is cast, tied and computed; what does not fit is named before anything is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.offload.test_round_trip_models import CONFIGS, LIKE_LLAMA, tokens, written  # noqa: F401 (a fixture)
from vblackwell.errors import ConfigurationError, CorruptData, FolderMismatch, Unsupported
from vblackwell.folders.folder import find_folder, read_config, tensor_files
from vblackwell.folders.tensor_file import TensorFile, all_finite
from vblackwell.folders.weights import FolderWeights, build_on_meta
from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
from vblackwell.generate.generate import end_tokens
from vblackwell.generate.load import load_model, model_on_meta
from vblackwell.offload.api import enable_vgpu_stack_optimization, release

ROOM = 1 << 20


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) >= 2
    return found


def edit(path: Path, change) -> None:
    """Write the tensors of ``path`` again as ``change`` leaves them."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def open_weights(folder: Path) -> FolderWeights:
    return FolderWeights(build_on_meta(folder, torch.float32), folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_folders_become_fp32_masters(written, make_stack, tmp_path, dtype):  # noqa: F811
    folder = written("llama", dtype)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    placed = {"placement": "streamed", "compute_dtype": torch.bfloat16}
    copied = enable_vgpu_stack_optimization(plain, make_stack(ROOM), **placed)
    model = load_causal_lm(folder, make_stack(ROOM), **placed)
    with torch.no_grad():
        logits = model.eval()(tokens()).logits
        assert torch.equal(logits, copied.eval()(tokens()).logits)
        if dtype == torch.bfloat16:  # fp16 has ties, which masters round away from zero, torch's conversion to even
            narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            assert torch.equal(logits, narrow.eval()(tokens()).logits)
    save_causal_lm(model, tmp_path / "narrow", dtype=dtype)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype="auto").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict().items():
        assert kept[name].dtype == dtype and torch.equal(kept[name], tensor), name


def test_frozen_weights_keep_no_masters(written, make_stack):  # noqa: F811
    folder = written("mixtral", torch.bfloat16)
    stack = make_stack(ROOM)
    model = load_causal_lm(folder, stack, dtype=torch.bfloat16, trainable=False, placement="streamed")
    held = sum(level["used_bytes"] for level in stack.get_stats()["levels"][1:])
    weights = sum(2 * param.numel() for param in model.parameters())
    assert weights <= held < 1.5 * weights, "more than the weights, and what rounds ranges up, is held"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    released = release(model)
    for name, param in plain.named_parameters():
        assert torch.equal(param, released.get_parameter(name)), name


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LIKE_LLAMA)) for kind in CONFIGS]
)
def test_buffers_are_those_of_a_model_that_transformers_loads(kind, written):  # noqa: F811
    folder = written(kind)
    plain, made = AutoModelForCausalLM.from_pretrained(folder), build_on_meta(folder, torch.float32)
    assert all(param.is_meta for param in made.parameters())
    wanted, found = dict(plain.named_buffers()), dict(made.named_buffers())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and not found[name].is_meta for name in wanted)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_what_a_module_registers_after_building_stays_real(written):  # noqa: F811
    build_on_meta(written("llama"), torch.float32)
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_folder_that_asks_for_flex_attention_is_opened_with_sdpa(written):  # noqa: F811
    folder = written("llama")
    edit_json(folder / "config.json", attn_implementation="flex_attention")
    assert build_on_meta(folder, torch.float32).config._attn_implementation == "sdpa"


def test_missing_extra_and_misshapen_are_all_named_with_their_files(written):  # noqa: F811
    folder = written("llama")
    last = shards(folder)[-1]
    lost, bent = sorted(load_file(last))[:2]

    def change(tensors):
        del tensors[lost]
        tensors[bent] = torch.zeros(3, 5)
        tensors["model.stranger"] = torch.zeros(2)
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)  # computed, never read

    edit(last, change)
    index = folder / "model.safetensors.index.json"
    places = {name: place for name, place in json.loads(index.read_text())["weight_map"].items() if name != lost}
    edit_json(index, weight_map=places)
    with pytest.raises(FolderMismatch) as caught:
        open_weights(folder)
    said = (
        f"it lacks {lost}; it has in excess model.stranger ({last.name}); it has otherwise {bent} (3, 5) in",
        folder,
    )
    assert all(str(part) in str(caught.value) for part in said)
    wrong = caught.value
    assert (wrong.missing, wrong.extra, wrong.misshapen) == ((lost,), ("model.stranger",), (bent,))


def test_a_lost_expert_is_named(written):  # noqa: F811
    folder = written("mixtral")
    for path in shards(folder):
        gone = [name for name in load_file(path) if name.endswith("layers.1.block_sparse_moe.experts.2.w1.weight")]
        if gone:
            edit(path, lambda tensors, gone=gone: tensors.pop(gone[0]))
            index = folder / "model.safetensors.index.json"
            places = json.loads(index.read_text())["weight_map"]
            del places[gone[0]]
            edit_json(index, weight_map=places)
    with pytest.raises(FolderMismatch) as caught:
        open_weights(folder)
    assert "it has otherwise model.layers.1.mlp.experts.gate_up_proj" in str(caught.value)


def test_an_index_that_is_wrong_is_named(written):  # noqa: F811
    folder = written("llama")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = next(iter(places))
    first, last = shards(folder)[0].name, shards(folder)[-1].name
    edit_json(index, weight_map=places | {name: last if places[name] == first else first})
    with pytest.raises(CorruptData, match=f"index.json puts {name}"):
        open_weights(folder)
    (folder.parent / "x.safetensors").write_bytes(shards(folder)[0].read_bytes())
    for outside in ("../x.safetensors", str(folder.parent / "x.safetensors"), "..", ".", "", "a/b.safetensors"):
        edit_json(index, weight_map=places | {name: outside})
        with pytest.raises(CorruptData, match="not a file of the folder"):
            open_weights(folder)
    edit_json(index, weight_map=places | {name: ["list"]})
    with pytest.raises(CorruptData, match="no weight_map of file names"):
        open_weights(folder)


def test_truncated_and_damaged_shards_are_named(written, tmp_path):  # noqa: F811
    folder = written("llama")
    path = shards(folder)[1]
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")

    def table(change) -> bytes:
        entries = json.loads(whole[8 : 8 + length])
        change(entries)
        raw = json.dumps(entries).encode()
        return len(raw).to_bytes(8, "little") + raw + whole[8 + length :]

    def first(entries):
        return entries[next(name for name in entries if name != "__metadata__")]

    damaged = [
        (whole[:7], "header too small"),
        (whole[:-5], "not fully covered"),
        (whole + b"xx", "not fully covered"),
        (whole[: 8 + length // 2], "invalid header length"),
        (b"\xff" * 8 + whole[8:], "header too large"),
        (whole[:8] + b"\x00" * length + whole[8 + length :], "invalid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "invalid JSON"),
        (table(lambda entries: first(entries).update(shape=[1])), "invalid shape"),
        (table(lambda entries: first(entries).update(shape=[-1])), "invalid JSON"),
        (table(lambda entries: first(entries).update(data_offsets=[4, 8])), "invalid offset"),
    ]
    for data, reason in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptData) as caught:
            open_weights(folder)
        assert str(path) in str(caught.value) and reason in str(caught.value)
    save_file({"x": torch.zeros(8, dtype=torch.float8_e8m0fnu)}, path)
    with pytest.raises(Unsupported, match=f"{path.name}: x is F8_E8M0"):
        open_weights(folder)
    path.unlink()
    with pytest.raises(CorruptData, match=path.name):
        open_weights(folder)


def test_a_shard_that_shrinks_while_it_is_read_is_named(written, make_stack):  # noqa: F811
    folder = written("llama")
    path = shards(folder)[-1]
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 8)
        last = max(file.tensors.values(), key=lambda tensor: tensor.begin)
        with pytest.raises(CorruptData, match=path.name):
            last.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_is_read_to_any_type_and_strides(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("vblackwell.folders.tensor_file.CONVERSION_BYTES", 64)  # several pieces
    values = torch.randn(7, 11).to(dtype)
    save_file({"a": values, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        for out_type in (torch.float32, torch.bfloat16):
            for out in (torch.empty(7, 11, dtype=out_type), torch.empty(11, 7, dtype=out_type).t()):
                file.tensors["a"].read_into(out)
                assert torch.equal(out, values.to(out_type))
        assert file.tensors["scalar"].load() == 3 and file.tensors["empty"].load().shape == (0, 4)


def test_tied_parameters_that_differ_are_refused(written):  # noqa: F811
    folder = written("llama")  # not tied: head and embedding differ
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(CorruptData, match=r"ties .*embed_tokens.* and lm_head.weight.*tie_word_embeddings"):
        open_weights(folder)
    stored = {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
    for path in shards(folder):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    open_weights(folder)
    del stored["model.embed_tokens.weight"]  # one name is enough, whichever it is
    save_file(stored, folder / "model.safetensors")
    with open_weights(folder) as weights:
        out = torch.empty(96, 32)
        weights("model.embed_tokens.weight", out)
        assert torch.equal(out, stored["lm_head.weight"])


def test_a_folder_without_prefix_and_with_masks_is_read(written):  # noqa: F811
    """The published gpt2 folder has neither 'transformer.' nor a head, and holds the causal masks."""
    folder = written("gpt2")
    stored = {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    published = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    published["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(published, folder / "model.safetensors")
    with open_weights(folder) as weights:
        for name, tensor in stored.items():
            out = torch.empty_like(tensor)
            weights(name, out)
            assert torch.equal(out, tensor), name


@pytest.mark.parametrize(
    ("changes", "kind", "part"),
    [
        ({"model_type": "lama"}, Unsupported, "no architecture 'lama'"),
        ({"model_type": "lama", "auto_map": {"AutoConfig": "code.C"}}, Unsupported, "trust_remote_code"),
        ({"model_type": None}, ConfigurationError, "no model_type"),
        ({"model_type": "vit"}, ConfigurationError, "no causal model"),
        ({"hidden_size": "wide"}, ConfigurationError, "hidden_size"),
        ({"hidden_size": -4}, ConfigurationError, "builds no causal model"),
        ({"quantization_config": {"quant_method": "x"}}, Unsupported, "quantised"),
    ],
)
def test_a_wrong_config_is_named(written, changes, kind, part):  # noqa: F811
    folder = written("llama")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(kind) as caught:
        build_on_meta(folder, torch.float32)
    where = folder if part == "quantised" else folder / "config.json"
    assert str(where) in str(caught.value) and part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "bfloat16"], ids=str)
def test_weights_are_never_written_as_integers(dtype, written, tmp_path):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(written("llama"))
    with pytest.raises(ConfigurationError, match=r"dtype=.* is no floating-point type of torch: give torch\.float32"):
        save_causal_lm(model, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dtype": "fp32"}, "dtype='fp32' is no floating-point type of torch: give torch.float32"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is no floating-point type"),
        ({"lora": "16"}, r"lora='16' is no Lora: give lora=Lora\(rank\)"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_before_the_folder_is_opened(options, part, make_stack, tmp_path):
    with pytest.raises(ConfigurationError, match=part):
        load_causal_lm(tmp_path / "none", make_stack(ROOM), **options)


def test_settings_for_writing_come_along(written):  # noqa: F811
    folder = written("llama")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [3, 2], "do_sample": True, "top_k": 7}))
    settings = build_on_meta(folder, torch.float32).generation_config
    assert settings.eos_token_id == [3, 2] and settings.top_k == 7
    for text, kind in (("{", CorruptData), ('{"max_new_tokens": -1}', ConfigurationError)):
        file.write_text(text)
        with pytest.raises(kind, match="generation_config.json"):
            build_on_meta(folder, torch.float32)


def test_a_config_of_another_size_names_what_differs(written, make_stack):  # noqa: F811
    folder = written("llama")
    edit_json(folder / "config.json", num_hidden_layers=5, vocab_size=100)
    stack = make_stack(ROOM)
    with pytest.raises(FolderMismatch) as caught:
        load_causal_lm(folder, stack)
    lacks, otherwise = str(caught.value).split("; it has otherwise ")
    assert "model.embed_tokens.weight (" in otherwise and "lm_head.weight (" in otherwise
    assert lacks.count("layers.4.") == 5 and lacks.endswith(" and 4 more")
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])
    edit_json(folder / "config.json", num_hidden_layers=4, vocab_size=96)
    load_causal_lm(folder, stack)  # the stack is as it was


@pytest.mark.parametrize("kind", ["llama", "mixtral"])  # as it is, and joined to a parameter with other experts'
@pytest.mark.parametrize(("bad", "dtype"), [(float("nan"), torch.float32), (float("-inf"), torch.bfloat16)])
def test_a_weight_that_is_not_finite_is_named(kind, bad, dtype, written):  # noqa: F811
    folder = written(kind, dtype)
    path = shards(folder)[-1]
    name = max(name for name, tensor in load_file(path).items() if tensor.dim() == 2)
    edit(path, lambda tensors: tensors[name][1, 2].fill_(bad))
    with open_weights(folder) as weights:
        found = []
        for target, param in build_on_meta(folder, torch.float32).named_parameters():
            try:
                weights(target, torch.empty(param.shape))
            except ConfigurationError as error:
                found.append(str(error))
    assert len(found) == 1 and found[0].startswith(f"{path}: {name} has 1 NaN or inf of "), found


def test_code_and_pickles_in_a_folder_are_never_run(written, monkeypatch):  # noqa: F811
    """An architecture that transformers has is its own, whatever the folder brings for it; any other is refused."""
    folder = written("llama")
    canary = folder / "canary"
    code = (
        f"open({str(canary)!r}, 'w')\nfrom transformers import *\n"
        "class M(LlamaForCausalLM): pass\nclass C(LlamaConfig): pass\n"
    )
    (folder / "strange.py").write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    mapped = {"AutoConfig": "strange.C", "AutoModelForCausalLM": "strange.M"}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    edit_json(folder / "config.json", auto_map=mapped)
    expected = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    opened = load_model(folder)
    assert all(map(torch.equal, opened.parameters(), expected.parameters()))
    with open_weights(folder):
        pass
    edit_json(folder / "config.json", model_type="strange")
    (folder / "manifest.json").write_text("{}")  # as if we had written it, and checked its tables
    for opener in (load_model, open_weights, model_on_meta):
        with pytest.raises((ConfigurationError, Unsupported)):
            opener(folder)
    assert not canary.exists()


def test_every_opener_ends_texts_where_the_folder_says(written):  # noqa: F811
    folder = written("gpt2")
    edit_json(folder / "config.json", eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    for opener in (load_model, model_on_meta, lambda folder: build_on_meta(folder, torch.float32)):
        assert end_tokens(opener(folder)) == {5, 7}


def test_nested_tables_and_devices_are_refused(written):  # noqa: F811
    folder, nested = written("llama"), b"[" * 100_000  # Python 3.12 reads lists 10,000 deep
    shards(folder)[0].write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(CorruptData, match="invalid JSON"):
        open_weights(folder)
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    index.write_bytes(nested)
    with pytest.raises(CorruptData, match="is not JSON .*recursion"):
        tensor_files(folder)
    config.unlink()
    config.symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match="config.json is no file"):
        read_config(folder)


def test_large_weights_are_finite_and_masks_may_hold_infinity(written, tmp_path):  # noqa: F811
    huge = torch.full((64,), 3e38)  # whose sum is not
    assert all_finite(huge) and all_finite(torch.zeros(0)) and all_finite(torch.ones(2, dtype=torch.int64))
    assert not all_finite(torch.tensor([1.0, float("inf"), float("-inf")]))
    folder = written("gpt2")
    model = build_on_meta(folder, torch.float32)
    model.transformer.h[0].register_buffer("mask", torch.zeros(4))
    path = shards(folder)[0]
    edit(path, lambda tensors: tensors.update({"transformer.h.0.mask": torch.full((4,), float("-inf"))}))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | {"transformer.h.0.mask": path.name}
    edit_json(index, weight_map=places)
    with FolderWeights(model, folder) as weights:
        weights.load_buffers()
    assert bool((model.transformer.h[0].mask == float("-inf")).all())


def test_pickles_are_refused(written):  # noqa: F811
    folder = written("llama")
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"pytorch_model.bin is pickled"):
        open_weights(folder)


def test_a_hub_id_comes_from_the_cache_or_says_what_to_do(written, tmp_path, monkeypatch):  # noqa: F811
    folder = written("llama")
    assert find_folder(folder) == folder
    for wrong in ("gone", "/gone/away", "a/b/c", Path("some/folder")):
        with pytest.raises(ConfigurationError, match="no such folder"):
            find_folder(wrong)
    commit = "0" * 40
    cached = tmp_path / "cache/models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    shutil.copytree(folder, cached / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    whole = find_folder("owner/name")
    with pytest.raises(ConfigurationError) as other:
        find_folder("owner/other")
    (cached / "snapshots" / commit / shards(folder)[0].name).unlink()
    with pytest.raises(ConfigurationError) as cut:
        find_folder("owner/name")
    assert whole == cached / "snapshots" / commit
    assert "not to be downloaded" in str(other.value) and "hf download owner/other --local-dir" in str(other.value)
    assert shards(folder)[0].name in str(cut.value) and "hf download owner/name --local-dir" in str(cut.value)


def test_of_a_repository_only_the_files_that_are_read_are_fetched(monkeypatch, tmp_path):
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    there += ["chat_template.jinja", "merges.txt"]
    others = [
        "consolidated.safetensors",
        "consolidated-00001.safetensors",
        "original/model.safetensors",
        "onnx/config.json",
        "a.bin",
    ]
    fetched = []

    def download(name, *, local_files_only=False, allow_patterns=None, ignore_patterns=None, **rest):
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        files = filter_repo_objects(there + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.extend(files)
        for file in fetched:
            (tmp_path / file).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("vblackwell.folders.hub._offline", lambda: None)
    assert find_folder("owner/name") == tmp_path and sorted(fetched) == sorted(there)
