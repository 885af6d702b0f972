"""The decoder is Hugging Face's Llama: same names, same bits in fp32, same decoding with a cache."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vblackwell.data.documents import TextFiles
from vblackwell.data.tokenizer import train_tokenizer
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.folder import save_model
from vblackwell.folders.tensor_file import spec_of
from vblackwell.generate.load import load_model
from vblackwell.generate.quantized import Packing
from vblackwell.nn.decoder.block import KVCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder

SHAPES = {
    "heads": {"num_heads": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one key head, wide heads": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32, "rope_theta": 500000.0},
}


def config(**changes) -> DecoderConfig:
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_layers": 3,
        "num_heads": 4,
        "max_position": 64,
    }
    return DecoderConfig(**(shape | changes))


def tokens(batch=2, length=33, seed=1) -> torch.Tensor:
    return torch.randint(0, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


def save(model: Decoder, parent, name="model", **options):
    state = model.state_dict()
    with CommitFolder(parent, name) as folder:
        specs = [spec_of(*item) for item in state.items()]
        save_model(folder, model.config.to_hf(), specs, iter(state.items()), **options)
    return parent / name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_saved_folder_opens_in_transformers_with_equal_logits(shape, tmp_path):
    model = Decoder(config(**shape), seed=3)
    folder = save(model, tmp_path, max_shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs) is LlamaForCausalLM and theirs.dtype == torch.float32
    input_ids = tokens()
    with torch.no_grad():
        assert torch.equal(model(input_ids), theirs(input_ids).logits)


def test_gradients_are_those_of_transformers():
    model = Decoder(config(num_kv_heads=2), seed=3)
    theirs = LlamaForCausalLM(LlamaConfig(**model.config.to_hf()))
    theirs.load_state_dict(model.state_dict())
    input_ids = tokens()
    model(input_ids[:, :-1], input_ids[:, 1:]).backward()
    theirs(input_ids, labels=input_ids).loss.backward()
    for (name, ours), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # the norms are differentiated as one operation here and as five there: a few roundings of 2^-24 apart
        torch.testing.assert_close(ours.grad, other.grad, rtol=2e-5, atol=2e-7, msg=name)


def test_bf16_is_as_near_to_fp32_as_transformers_is():
    model = Decoder(config(), seed=3)
    exact = model(tokens()).detach()
    theirs = LlamaForCausalLM(LlamaConfig(**model.config.to_hf()))
    theirs.load_state_dict(model.state_dict())
    with torch.no_grad():
        error = (model.bfloat16()(tokens()).float() - exact).norm()
        their_error = (theirs.bfloat16()(tokens()).logits.float() - exact).norm()
    assert 0 < error < 1.2 * their_error


def test_folder_comes_back_as_the_same_decoder(tmp_path):
    model = Decoder(config(num_kv_heads=2, bos_token_id=1, eos_token_id=2), seed=3)
    loaded = load_model(save(model, tmp_path))
    assert loaded.config == model.config
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    half = load_model(tmp_path / "model", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("held", "said"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_decoder_opens_in_the_type_of_its_files(held, said, tmp_path):
    model = Decoder(config(), seed=3, dtype=getattr(torch, held))
    file = save(model, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": said, "torch_dtype": said}))
    loaded, state = load_model(file.parent), model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert {p.dtype for p in loaded.parameters()} == {model.lm_head.weight.dtype}
    packed = load_model(file.parent, packing=Packing()).layers[0].mlp.up_proj.packed
    assert packed.dtype == model.lm_head.weight.dtype


def test_a_shape_may_be_of_numpys_integers():
    assert config(hidden_size=np.int64(64), num_layers=np.int32(3)) == config()
    with pytest.raises(ConfigurationError, match="num_layers is"):
        config(num_layers=np.int64(0))


def test_a_folder_of_transformers_loads(tmp_path):
    theirs = LlamaForCausalLM(LlamaConfig(**config(num_kv_heads=2).to_hf()))
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    loaded = load_model(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), theirs(tokens()).logits)


def test_tokenizer_comes_back_equal(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1  # größer\n" * 40)
    tokenizer = train_tokenizer(TextFiles(tmp_path, (text,), "text"), 300)
    model = Decoder(config(eos_token_id=0))
    loaded = AutoTokenizer.from_pretrained(save(model, tmp_path, tokenizer=tokenizer))
    assert (
        loaded.eos_token == "<|endoftext|>" and loaded.eos_token_id == 0 and len(loaded) == tokenizer.get_vocab_size()
    )
    for line in ("def g(y):\n\treturn größer\n", "  a  b", "日本語 \U0001f600", "<|endoftext|>x"):
        assert loaded(line)["input_ids"] == tokenizer.encode(line).ids
        assert loaded.decode(tokenizer.encode(line).ids) == line


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pieces", [(33,), (20, *[1] * 13), (1, 12, 20)], ids=["at once", "one by one", "in pieces"])
def test_cache_changes_nothing(shape, pieces):
    model = Decoder(config(**shape), seed=3)
    cache = KVCache(model.config, 40)
    with torch.no_grad():
        whole = model(tokens())
        parts = torch.cat([model(part, cache=cache) for part in tokens().split(pieces, dim=1)], dim=1)
    assert cache.length == 33
    # other shapes, other blocking of the same sums: logits are of order 0.1
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


def test_cache_and_model_have_a_limit():
    model = Decoder(config())
    with pytest.raises(ConfigurationError, match="limit is 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="limit is 64"):
        KVCache(model.config, 65)
    with pytest.raises(ConfigurationError, match="beyond the cache's 4"):
        model(torch.zeros(1, 5, dtype=torch.long), cache=KVCache(model.config, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"}, {"hidden_act": "gelu"}, {"attention_bias": True}, {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, {"quantization_config": {"bits": 4}},
        {"attention_dropout": 0.1},
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_is_refused(change):
    with pytest.raises(Unsupported, match="transformers"):
        DecoderConfig.from_hf(config().to_hf() | change)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_are_strangers(checkpointing):
    """A row of two documents gives the logits, the loss and the gradients of the documents alone."""
    model = Decoder(config(num_kv_heads=2), seed=3)
    model.gradient_checkpointing = checkpointing
    one, other = tokens()[:1, :5], tokens()[1:, :9]
    positions = torch.cat((torch.arange(4), torch.arange(8)))[None]
    row = torch.cat((one[:, :-1], other[:, :-1]), 1)
    targets = torch.cat((one[:, 1:], other[:, 1:]), 1)
    with torch.no_grad():
        packed = model(row, positions_BS=positions)
        apart = torch.cat((model(one[:, :-1]), model(other[:, :-1])), 1)
    torch.testing.assert_close(
        packed, apart, rtol=1e-5, atol=1e-6
    )  # sums over other numbers of keys, some of them zero
    gradients = []
    for loss in (
        lambda: model(row, targets, positions),
        lambda: (4 * model(one[:, :-1], one[:, 1:]) + 8 * model(other[:, :-1], other[:, 1:])) / 12,
    ):
        model.zero_grad()
        loss().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for got, expected in zip(*gradients, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()
    with pytest.raises(ConfigurationError, match="cache"):
        model(row, positions_BS=positions, cache=KVCache(model.config, 32))
    model.use_attention("flash")
    with pytest.raises(Unsupported, match="packed documents"):
        model(row, positions_BS=positions)


@pytest.mark.gpu
def test_masks_do_not_cost_the_fused_kernels_on_a_gpu(monkeypatch):
    """Packed documents of grouped heads, which need no mask, and a prompt that continues a filled cache: a fused kernel
    runs, of small calls PyTorch's memory-efficient one, with what each gives alone.
    """
    from vblackwell.nn.decoder import block as module

    ran: list[str] = []

    def spied(*args, **kwargs):
        out, name = dispatched(*args, **kwargs)
        ran.append(name)
        return out, name

    dispatched = module.attention
    monkeypatch.setattr(module, "attention", spied)
    shape = config(num_kv_heads=2, max_position=512)
    model = Decoder(shape, seed=3).to("cuda", torch.bfloat16)
    ids = torch.randint(shape.vocab_size, (1, 300), generator=torch.Generator().manual_seed(0)).cuda()
    one, other = ids[:, :123], ids[:, 123:]
    positions = torch.cat((torch.arange(123), torch.arange(177)))[None].cuda()
    with torch.no_grad():
        packed = model(ids, positions_BS=positions)
        apart = torch.cat((model(one), model(other)), 1)
        whole, cache = model(ids), KVCache(shape, 512)
        continued = torch.cat((model(one, cache=cache), model(other, cache=cache)), 1)
    assert len(ran) == shape.num_layers and "math" not in ran
    # bf16 keeps 8 bits, and the kernels add in other orders: a few roundings a layer.
    for got, expected in ((packed, apart), (continued, whole)):
        assert (got - expected).float().norm() <= 2e-2 * expected.float().norm()
