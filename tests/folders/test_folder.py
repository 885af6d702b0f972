"""safetensors written as a stream, and model folders that do not fit."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tests.nn.decoder.test_decoder_equality import config, save
from vblackwell.errors import ConfigurationError, CorruptData, DiskError, Unsupported
from vblackwell.folders import tensor_file
from vblackwell.folders.commit import CommitFolder, verify_folder
from vblackwell.folders.folder import load_specs, tensor_files
from vblackwell.folders.tensor_file import DTYPES, SafetensorsShards, TensorFile, TensorSpec, plan_shards, spec_of
from vblackwell.folders.weights import FolderWeights
from vblackwell.generate.load import load_model
from vblackwell.nn.decoder.decoder import Decoder


def save_tensors(folder, prefix, tensors, max_shard_bytes=5 << 30):
    with SafetensorsShards(folder, prefix, (spec_of(*item) for item in tensors.items()), max_shard_bytes) as shards:
        for name in shards.names:
            shards.write(name, tensors[name])


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def read(folder, prefix="model"):
    """What the safetensors library itself reads."""
    found = {}
    for path in tensor_files(folder, prefix):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    made=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=8), limit=st.integers(1, 400)
)
def test_whatever_is_written_comes_back(tmp_path_factory, made, limit):
    tensors = {f"t{index}.ä": example(DTYPES[kind], shape) for index, (kind, shape) in enumerate(made)}
    parent = tmp_path_factory.mktemp("shards")
    with CommitFolder(parent, "x") as folder:
        save_tensors(folder, "model", tensors, limit)
    found = read(parent / "x")
    assert found.keys() == tensors.keys() and all(same(found[name], tensors[name]) for name in tensors)
    assert load_specs(parent / "x") == {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    verify_folder(parent / "x")
    for path in tensor_files(parent / "x"):
        specs = [spec_of(*item) for item in load_state_of(path)]
        assert len(specs) == 1 or sum(spec.size_bytes for spec in specs) <= limit


def load_state_of(path):
    with safe_open(path, framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


def test_one_shard_has_the_plain_name_and_several_an_index(tmp_path):
    tensors = {"a": torch.zeros(10), "b": torch.ones(10), "strided": torch.arange(12.0).reshape(3, 4).t()}
    for limit, names in (
        (1000, ["model.safetensors"]),
        (40, [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]),
    ):
        with CommitFolder(tmp_path, f"{limit}") as folder:
            save_tensors(folder, "model", tensors, limit)
        assert [path.name for path in tensor_files(tmp_path / f"{limit}")] == names
        assert all(same(tensor, tensors[name]) for name, tensor in read(tmp_path / f"{limit}").items())
    index = json.loads((tmp_path / "40" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 128 and set(index["weight_map"]) == set(tensors)


def test_order_is_kept(tmp_path):
    tensors = {"half": torch.ones(3, dtype=torch.bfloat16), "full": torch.ones(3)}
    with CommitFolder(tmp_path, "x") as folder:
        shards = SafetensorsShards(folder, "model", [spec_of(*item) for item in tensors.items()])
        assert shards.names == ["full", "half"]  # wider elements first: every tensor is aligned
        with shards:
            for name in shards.names:
                shards.write(name, tensors[name])
    with (
        pytest.raises(AssertionError, match="expected .*full"),
        CommitFolder(tmp_path, "y") as folder,
        SafetensorsShards(folder, "model", [spec_of(*item) for item in tensors.items()]) as shards,
    ):
        shards.write("half", tensors["half"])
    assert not (tmp_path / "y").exists()


def test_declarations_that_cannot_be_written_are_refused():
    with pytest.raises(ConfigurationError, match="'a' is declared twice"):
        plan_shards([TensorSpec("a", (1,), torch.float32), TensorSpec("a", (2,), torch.float32)], 100)
    with pytest.raises(ConfigurationError, match="complex64"):
        plan_shards([TensorSpec("a", (1,), torch.complex64)], 100)


def test_a_tensor_that_never_came_is_noticed(tmp_path):
    specs = [TensorSpec("a", (1,), torch.float32), TensorSpec("b", (1,), torch.float32)]
    with (
        pytest.raises(AssertionError, match="b was declared"),
        CommitFolder(tmp_path, "x") as folder,
        SafetensorsShards(folder, "model", specs) as shards,
    ):
        shards.write("a", torch.zeros(1))
    assert not list(tmp_path.iterdir())


def rewrite(folder, change):
    """Changes the tensors of a saved folder in place."""
    tensors = read(folder)
    change(tensors)
    with CommitFolder(folder.parent, folder.name) as fresh:
        fresh.add("config.json", (folder / "config.json").read_bytes())
        save_tensors(fresh, "model", tensors)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "has in excess extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(2, 3)}),
            r"lm_head.weight \(2, 3\) in model.safetensors instead of \(300, 64\)",
        ),
        (lambda t: [t.pop(name) for name in list(t)[1:]], r"and 24 more"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, change, words):
    folder = save(Decoder(config(), seed=1), tmp_path)
    rewrite(folder, change)
    with pytest.raises(ConfigurationError, match=words):
        load_model(folder)


def test_missing_shard_and_broken_file_are_named(tmp_path):
    folder = save(Decoder(config()), tmp_path, max_shard_bytes=200_000)
    first, *_ = tensor_files(folder)
    size = first.stat().st_size
    with first.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(CorruptData, match=first.name):
        load_model(folder)
    first.unlink()
    with pytest.raises(CorruptData, match=f"lacks {first.name}"):
        load_model(folder)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config().to_hf()))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin is pickled"):
        load_model(tmp_path)


def test_tied_parameters_need_one_name(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    source, target = Tied(), Tied()
    with CommitFolder(tmp_path, "x") as folder:
        save_tensors(folder, "model", {"embed.weight": source.embed.weight})
    with FolderWeights(target, tmp_path / "x") as weights:
        for name in weights.names:
            weights(name, target.get_parameter(name).data)
    assert torch.equal(target.head.weight, source.embed.weight)


def test_two_tensors_are_compared_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CONVERSION_BYTES", 16)
    tensors = {"a": torch.arange(9), "b": torch.arange(9), "c": torch.arange(9).roll(1), "d": torch.arange(9.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        read, sizes = TensorFile.read, []
        monkeypatch.setattr(TensorFile, "read", lambda self, out, at: (sizes.append(len(out)), read(self, out, at)))
        assert file.tensors["a"].equals(file.tensors["b"])
        assert not any(file.tensors["a"].equals(file.tensors[name]) for name in "cd")
    assert max(sizes) == 16


def test_a_file_that_is_not_whole_says_how_much_of_it_is_there(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    whole = path.read_bytes()
    for broken, said in (
        (whole[:-3], f"it has {len(whole) - 3} bytes, its table describes {len(whole)}"),
        (whole + b"x", f"it has {len(whole) + 1} bytes, its table describes {len(whole)}"),
        (b"version ht", "it has 10 bytes, its table alone ends at"),
    ):
        path.write_bytes(broken)
        with pytest.raises(CorruptData, match=said):
            TensorFile(path)
    path.write_bytes(whole.replace(b'"F32"', b'"Q99"'))
    with pytest.raises(Unsupported, match="Q99.*; convert it"):
        TensorFile(path)


def test_a_file_that_was_closed_reads_no_other_file(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as opened:
        (stored,) = opened.tensors.values()
    with (tmp_path / "x.safetensors").open("rb"):  # takes the number of the closed one
        with pytest.raises(DiskError):
            stored.load()
        opened.__exit__()
