"""What five people meet in their first hour, from an empty folder, by the README: at most three commands each to what
they came for, on a terminal of 80 and one of 120 columns.

A folder of a tiny model stands for a 7B's, a cap of some MiB for a card.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.first_hour.terminal import Screen, typed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
VB = (sys.executable, "-m", "vblackwell")
# Words of the package that say nothing to who has not read its documentation, and what should not be seen at all.
STRANGE = re.compile(r"\barena\b|level 0|hit rate|Traceback|Warning:|None\b|\bnan\b")
Type = Callable[..., Screen]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A home with a model's folder and a text, as a person has them."""
    home = tmp_path / "home"
    home.mkdir()
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(home / "my-7b")
    tokenizer.save(str(home / "my-7b" / "tokenizer.json"))
    (home / "notes.txt").write_text("the rain in spain stays mainly in the plain\n" * 400, encoding="ascii")
    return home


@pytest.fixture(params=[80, pytest.param(120, marks=pytest.mark.slow)])
def on(folder: Path, request: pytest.FixtureRequest) -> Iterator[Type]:
    """``on(words, ...)``: the screen after a command that ends well; at most three of them. What they were and how long
    they took is printed (``pytest -s``)."""
    told = list[str]()
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # their memory is the cap, also where the tests run beside a GPU

    def type_it(*words: str, program: tuple[str, ...] = VB, lines: tuple[str, ...] = ()) -> Screen:
        assert len(told) < 3, "more commands than a newcomer types"
        screen = typed([*program, *words], folder, environment, request.param, lines)
        told.append(f"{screen.seconds:5.1f} s  {'vb' if program == VB else 'python'} {' '.join(words)}")
        assert screen.code == 0, screen.text
        assert not (found := STRANGE.search(screen.text)), (found, screen.text)
        assert all(len(line) < request.param for line in screen.redrawn), "a line that is written over is one line"
        return screen

    yield type_it
    print(f"\n{request.node.name}", *told, sep="\n")


@pytest.mark.slow
def test_a_student_with_a_small_card(on: Type):
    """Whether a 7B trains on 8 GB, and how; then that, with the README's flags."""
    said = on("estimate", "llama-7b", "--gpu", "3070").text
    (best,) = [line for line in said.splitlines() if "train all weights, streamed" in line][:1]
    assert re.search(r"\d", best) and "vb train" in said
    sizes = ("--fast-memory", "1MiB", "--host-memory", "64MiB")
    trained = on("train", "my-7b", "--data", "notes.txt", "--max-steps", "4", "--out", "mine", *sizes).text
    assert "chosen: " in trained and "step 4/4" in trained and "placement: streamed" in trained
    written = on("generate", "--model", "mine", "--prompt", "the rain", "--max-new-tokens", "8").lines
    assert any(line.startswith("the rain") for line in written)  # what hides a GPU is said before it


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, CHINESE], ids=["en", "zh"])
def test_a_researcher_with_a_module_and_a_loop(page: str, on: Type, folder: Path):
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    before = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))\n"
    )
    loop = (
        "for step in range(30):\n    x = torch.randn(64, 8)\n"
        "    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        "    print(f'loss {loss.item():.3f}')\nprint(vb.model_plan(model))\n"
    )
    (folder / "loop.py").write_text(before + code.replace("8GiB", "64MiB").replace("3e-4", "3e-2") + loop, "utf-8")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", on("loop.py", program=(sys.executable,)).text)]
    assert len(losses) == 30 and losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_a_user_of_the_trainer(on: Type):
    said = on(str(ROOT / "examples" / "trainer.py"), program=(sys.executable,)).text
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(losses) > 1 and losses[-1] < losses[0]


def test_one_who_only_asks_what_fits(on: Type):
    """With the card's name as a shop writes it: one screen, each row a way, with what to type."""
    said = on("estimate", "my-7b", "--gpu", "RTX 3060 12GB", "--ram", "32GiB", "--disk", "100GiB")
    assert sum("vb " in line for line in said.lines) >= 3 and "*" in said.text
    assert len(said.lines) < 45, "it is one screen"


@pytest.mark.slow
def test_one_who_writes_with_a_model_larger_than_memory(on: Type):
    """Of 0.6 MB of weights under a cap of 0.3."""
    asked = ("--prompt", "the", "--max-new-tokens", "8")  # its weights are random: any bytes follow
    assert "8 tokens, the first after" in on("generate", "--model", "my-7b", "--fast-memory", "300KiB", *asked).text
    on("quantize", "--model", "my-7b", "--out", "packed")
    assert "8 tokens, the first after" in on("generate", "--model", "packed", *asked).text


@pytest.mark.slow
def test_one_who_chats_with_a_model_larger_than_memory(on: Type, folder: Path):
    """Under the same cap: an answer comes, and the conversation ends as it is told."""
    template = "{% for each in messages %}{{ each.content }}\n{% endfor %}"
    (folder / "my-7b" / "chat_template.jinja").write_text(template, encoding="utf-8")
    sizes = ("--budget", "300KiB", "--max-new-tokens", "8", "--seed", "1")
    screen = on("chat", "my-7b", *sizes, lines=("the rain", "/quit"))
    shown = screen.text.split("> ")
    assert "Ctrl-C stops an answer" in shown[0] and len(shown) == 3, screen.text
    question, answer = shown[1].split("\n", 1)
    assert question.strip() == "the rain" and answer.strip(), screen.text
