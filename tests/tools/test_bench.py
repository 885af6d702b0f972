"""`vb bench` on a miniature: what its rows hold, what is refused, what a rung that does not fit does to the others."""

import json
import math

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests.nn.decoder.test_decoder_equality import config, save
from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.folders.folder import load_state
from vblackwell.generate.load import load_model
from vblackwell.nn.decoder.config import PRESETS
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.tools import bench
from vblackwell.tools.bench import LADDER, Case, bench_command, climb, zipf_tokens
from vblackwell.tools.quantize import quantize_folder
from vblackwell.train.config import resolve

SMALL = {"batch_size": 2, "seq_length": 16, "steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(Decoder(config(), seed=3), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def measured(folder):
    """The whole ladder, once."""
    path = folder.parent / "bench.json"
    assert bench_command(str(folder), json=str(path), learning_rate=1e-2, **SMALL) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_rung_is_measured(measured):
    rungs = {row["name"]: row for row in measured["rungs"]}
    assert list(rungs) == ["fp32", "bf16", "fp4", "flash", "checkpointing"]
    assert all(not row["refused"] for row in rungs.values())
    assert measured["batch_size"] == 2 and measured["seq_length"] == 16 and measured["device"] == "cpu"
    for name, row in rungs.items():
        training, inference = row["training"], row["inference"]
        assert training["milliseconds"] > 0 and math.isfinite(training["loss"])
        assert sum(training["bottleneck"]["shares"].values()) == pytest.approx(1)
        assert (inference is None) == (name == "checkpointing"), "it changes nothing there"
    assert rungs["flash"]["flags"] == "--mixed-precision --use-fp4 --use-flash-attn"


@pytest.mark.slow
def test_what_must_follow_from_the_settings(measured):
    rungs = {row["name"]: row for row in measured["rungs"]}
    parameters = measured["parameters"]
    fp32, bf16, fp4 = (rungs[name]["inference"] for name in ("fp32", "bf16", "fp4"))
    assert fp32["weight_bytes"] == 4 * parameters and bf16["weight_bytes"] == 2 * parameters > fp4["weight_bytes"]
    assert all(row["peak_bytes"] > row["weight_bytes"] for row in (fp32, bf16, fp4))
    # weight, gradient, two moments; the gradient of a bf16 weight is fp32 where micro-batches add up
    assert rungs["fp32"]["training"]["peak_bytes"] > 16 * parameters
    # bf16 has 8 bits of mantissa, FP4 two (with the leading one): both must be seen, neither may be nonsense
    assert fp32["output_change"] is None and rungs["fp32"]["training"]["loss_change"] is None
    assert 1e-4 < bf16["output_change"]["relative"] < 0.02 < fp4["output_change"]["relative"] < 0.5
    losses = {name: row["training"]["loss"] for name, row in rungs.items()}
    for name in ("bf16", "fp4", "flash", "checkpointing"):
        assert rungs[name]["training"]["loss_change"] == pytest.approx(losses[name] - losses["fp32"])
    assert losses["fp32"] < math.log(300) - 0.2, "it learns the tokens' frequencies"
    assert losses["checkpointing"] == pytest.approx(losses["flash"], abs=1e-4), "the same arithmetic, recomputed"


def test_the_table(folder, capsys):
    assert bench_command(str(folder), rungs="bf16", phases="inference", **SMALL) == 0
    said = capsys.readouterr().out
    assert "ms a token" in said and "bf16" in said and "most time in" in said and "fp32" not in said
    assert bench_command(str(folder), rungs="fp32", phases="training", json="-", **SMALL) == 0
    assert json.loads(capsys.readouterr().out)["rungs"][0]["inference"] is None


def test_the_attention_of_a_model_of_transformers(tmp_path, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = GPTNeoXConfig(vocab_size=300, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, **sizes)
    GPTNeoXForCausalLM(shape).save_pretrained(tmp_path)
    assert bench_command(str(tmp_path), rungs="fp32,flash", phases="inference", json="-", **SMALL) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    assert [row["refused"] for row in rungs] == [{}, {}]
    assert rungs[1]["attention"] == "auto: flash" and rungs[1]["inference"]["output_change"]["relative"] < 0.5


def test_a_rung_without_room_leaves_the_others(monkeypatch, capsys):
    def full(case, rung, first):
        if rung == "fp32":
            raise torch.OutOfMemoryError("no room")
        if rung == "bf16":
            raise InsufficientMemory("level 0 is full", needed_bytes=2, available_bytes=1)
        return {}

    monkeypatch.setattr(bench, "_train", full)
    model = Decoder(config(), seed=3)
    case = Case(model, zipf_tokens(300, (3, 1, 9), 0), torch.device("cpu"), 1e-3)
    rows = list(climb(case, LADDER[:3], ("training",)))
    assert [row["refused"] for row in rows] == [{"training": "out of memory"}, {"training": "level 0 is full"}, {}]
    assert capsys.readouterr().err.splitlines() == ["1/3 fp32: training", "2/3 bf16: training", "3/3 fp4: training"]


def test_tokens_fall_off_as_words_do():
    tokens = zipf_tokens(1000, (20, 10, 100), 1)
    counts = torch.bincount(tokens.flatten(), minlength=1000)
    assert tokens.shape == (20, 10, 100) and tokens.min() == 0 and tokens.max() < 1000
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.1)  # 3 sigma of some 3,700 and 1,700
    assert torch.equal(tokens, zipf_tokens(1000, (20, 10, 100), 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "tinny"}, "did you mean.*tiny"),
        ({"rungs": "bf17"}, "bf17.*bf16"),
        ({"phases": "both"}, "both"),
        ({"steps": 2}, "at least 3"),
        ({"batch_size": 0}, "batch size 0"),
        ({"seq_length": 60}, "limit is 64.*at most 48"),
        ({"learning_rate": 0.0}, "learning-rate"),
        ({"json": "gone/bench.json"}, "gone/bench.json"),
        ({"model": "tiny", "vocab_size": 1}, "vocab-size 1"),
    ],
    ids=str,
)
def test_what_is_refused(folder, options, words):
    with pytest.raises(ConfigurationError, match=words):
        bench_command(**{"model": str(folder), **SMALL, **options})


@pytest.mark.gpu
def test_the_ladder_on_a_gpu(tmp_path):
    shape = config(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_heads=8, max_position=600)
    path = save(Decoder(shape, seed=3), tmp_path)
    file = tmp_path / "bench.json"
    assert bench_command(str(path), batch_size=2, seq_length=512, steps=4, device="cuda", json=str(file)) == 0
    rungs = {row["name"]: row for row in json.loads(file.read_text())["rungs"]}
    assert all(not row["refused"] for row in rungs.values()), {name: row["refused"] for name, row in rungs.items()}
    for row in rungs.values():
        for phase in filter(None, (row["training"], row["inference"])):
            shares = phase["bottleneck"]["shares"]
            assert (
                sum(shares.values()) == pytest.approx(1) and shares["matrix products"] + shares.get("FP4 layers", 0) > 0
            )
    assert rungs["fp4"]["inference"]["weight_bytes"] < rungs["bf16"]["inference"]["weight_bytes"]
    assert rungs["flash"]["attention"] in ("cudnn", "flash", "efficient", "triton")
    assert rungs["checkpointing"]["training"]["peak_bytes"] <= rungs["flash"]["training"]["peak_bytes"]


def test_a_preset_is_the_model_that_is_trained_by_that_name(capsys, monkeypatch):
    monkeypatch.setattr(bench, "climb", lambda case, *_: [list(case.tokens_NBS.shape[1:])])
    assert bench_command("tiny", json="-") == 0
    found = json.loads(capsys.readouterr().out)
    config = resolve({"config": "tiny"})
    assert found["rungs"] == [[config.batch_size, config.seq_length + 1]]
    assert found["parameters"] == PRESETS["tiny"].num_parameters and PRESETS["tiny"].vocab_size == config.vocab_size


def test_a_packed_folder_is_measured_as_it_is(folder, capsys):
    packed, path = folder.parent / "packed", folder.parent / "packed.json"
    quantize_folder(folder, packed)
    assert bench_command(str(packed), json=str(path), **SMALL) == 0
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rungs"]] == ["packed", "flash"]
    assert found["parameters"] == sum(param.numel() for param in load_model(folder).parameters())
    held = sum(value.nbytes for name, value in load_state(packed))
    for row in found["rungs"]:
        assert row["training"] is None and not row["refused"] and row["inference"]["milliseconds"] > 0
        assert held <= row["inference"]["weight_bytes"] < 1.5 * held, "rotary tables in addition"
    assert found["rungs"][1]["inference"]["output_change"]["relative"] < 0.02  # bf16, in another order
    with pytest.raises(Unsupported, match="packed weights are not trained: give --phases inference, or the folder"):
        bench_command(str(packed), phases="training", **SMALL)
    with pytest.raises(ConfigurationError, match="'fp4' is none of packed, flash"):
        bench_command(str(packed), rungs="fp4", **SMALL)
