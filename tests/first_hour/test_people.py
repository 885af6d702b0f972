"""What five people meet in their first hour, from an empty environment, by the README alone: at most three commands
each to what they came for, `pip install .` among them, on a terminal of 80 columns by README.md and on one of 120 by
README.zh-CN.md.

Each command is a line of that page, with the person's names and sizes in place of the page's. A folder of a tiny model
stands for a 7B's, a cap of some MiB for a card. What is typed, seen and waited for is printed (``pytest -s``).
"""

from __future__ import annotations

import re
import shlex
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.first_hour.terminal import Screen, typed
from tests.test_wheel import tracked

ROOT = Path(__file__).parents[2]
PAGES = {80: "README.md", 120: "README.zh-CN.md"}
# Words of the package that say nothing to who has not read its documentation, and what should not be seen at all.
STRANGE = re.compile(r"\barena\b|level 0|hit rate|Traceback|Warning:|None\b|\bnan\b")
COMMANDS = 3
TEMPLATE = "{% for each in messages %}{{ each.content }}\n{% endfor %}"
Type = Callable[..., Screen]


def page_on(columns: int) -> str:
    return (ROOT / PAGES[columns]).read_text(encoding="utf-8")


def as_written(page: str, beginning: str, names: Mapping[str, str]) -> list[str]:
    """The words of the one command in ``page`` that begins so, with ``names`` for what stands there."""
    lines = [
        line for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for line in block.split("\n")
    ]
    (line,) = [line for line in lines if line.startswith(beginning)]
    return [names.get(word, word) for word in shlex.split(line, comments=True)]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The programs of a new environment after the README's ``pip install .`` in a checkout, and what that looked like.
    What the package needs is this environment's: no registry is asked."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in tracked():
        copy = folder / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    standard = Path(sysconfig.get_path("stdlib"))
    needed = [
        path
        for path in sys.path
        if path and Path(path).is_dir() and Path(path) not in (ROOT, standard, standard / "lib-dynload")
    ]
    (packages / "needed.pth").write_text("\n".join(needed) + "\n", encoding="utf-8")
    _, *words = as_written(page_on(80), "pip install", {})
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    programs = folder / "env" / "bin"
    screen = typed(
        [str(programs / "python"), "-m", "pip", *words, *offline], folder / "checkout", {"TERM": "xterm"}, 80
    )
    assert screen.code == 0 and (programs / "vb").exists(), screen.text
    return programs, f"$ pip {' '.join(words)}\n[{screen.seconds:.1f} s]"


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
    (home / "examples").symlink_to(ROOT / "examples")
    (home / "notes.txt").write_text("the rain in spain stays mainly in the plain\n" * 400, encoding="ascii")
    return home


@pytest.fixture(params=[80, pytest.param(120, marks=pytest.mark.slow)])
def columns(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def on(folder: Path, columns: int, installed: tuple[Path, str], request: pytest.FixtureRequest) -> Iterator[Type]:
    """``on(beginning, *more, ...)``: the screen after the README's command that begins so, with ``names`` of the person
    in it and ``more`` that keeps a test short; or after a ``program`` of theirs. It ends well."""
    programs, told = installed[0], [installed[1]]
    # Their memory is the cap, also where the tests run beside a GPU.
    environment = {
        "HOME": str(folder),
        "PATH": f"{programs}:/usr/bin:/bin",
        "TERM": "xterm",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def type_it(
        beginning: str, *more: str, names: Mapping[str, str] | None = None, lines: tuple[str, ...] = ()
    ) -> Screen:
        assert len(told) < COMMANDS, "more commands than a newcomer types"
        own = beginning == "python loop.py"  # a researcher's
        words = shlex.split(beginning) if own else as_written(page_on(columns), beginning, names or {})
        screen = typed([str(programs / words[0]), *words[1:], *more], folder, environment, columns, lines)
        told.append(f"$ {shlex.join([*words, *more])}\n{screen.text}\n[{screen.seconds:.1f} s]")
        assert screen.code == 0, screen.text
        assert not (found := STRANGE.search(screen.text)), (found, screen.text)
        assert all(len(line) < columns for line in screen.redrawn), "a line that is written over is one line"
        return screen

    yield type_it
    print(f"\n{request.node.name}, by {PAGES[columns]}", *told, sep="\n")


@pytest.mark.slow
def test_a_student_with_a_small_card(on: Type):
    """Whether a 7B trains on 8 GB, and how; then that."""
    said = on("vb estimate FOLDER", names={"FOLDER": "llama-7b"}).text
    (best,) = [line for line in said.splitlines() if "train all weights, streamed" in line][:1]
    assert re.search(r"\d", best) and "vb train" in said
    names = {"FOLDER": "my-7b", "7GiB": "1MiB", "24GiB": "64MiB"}
    trained = on("vb train FOLDER --data notes.txt", "--max-steps", "4", names=names).text
    assert "chosen: " in trained and "step 4/4" in trained and "placement: streamed" in trained


@pytest.mark.slow
def test_a_student_who_adapts_and_lets_it_write(on: Type, folder: Path):
    """Adapters over FP4, on conversations; the folder that comes out writes."""
    line = '{"messages": [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "in spain"}]}\n'
    (folder / "chat.jsonl").write_text(line * 40, encoding="ascii")
    (folder / "my-7b" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    names = {"FOLDER": "my-7b"}
    assert "step 2/2" in on("vb train FOLDER --data chat.jsonl", "--max-steps", "2", names=names).text
    written = on("vb generate --model mine", "--max-new-tokens", "8", names={"7GiB": "300KiB"}).lines
    assert any(line.startswith("Once") for line in written)  # what hides a GPU is said before it


@pytest.mark.slow
def test_a_researcher_with_a_module_and_a_loop(on: Type, folder: Path, columns: int):
    (code,) = re.findall(r"^```python\n(.*?)^```", page_on(columns), re.DOTALL | re.MULTILINE)
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
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", on("python loop.py").text)]
    assert len(losses) == 30 and losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_a_user_of_the_trainer(on: Type):
    said = on("python examples/trainer.py").text
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(losses) > 1 and losses[-1] < losses[0]


def test_one_who_only_asks_what_fits(on: Type, columns: int):
    """With the card's name as a shop writes it: one screen, each row a way, with what to type."""
    said = on("vb estimate FOLDER", names={"FOLDER": "my-7b", "RTX 3070": "RTX 3060 12GB"})
    assert sum("vb " in line for line in said.lines) >= 3 and "*" in said.text
    assert len(said.lines) < 45, "it is one screen"
    prose = [line for line in said.lines if "vb " not in line]  # a command stays whole, to be copied
    assert all(len(line) <= columns for line in prose)


@pytest.mark.slow
def test_one_who_writes_with_a_model_larger_than_memory(on: Type):
    """Of 0.6 MB of weights under a cap of 0.3; its weights are random: any bytes follow."""
    names = {"mine": "my-7b", "7GiB": "300KiB"}
    assert "8 tokens, the first after" in on("vb generate --model mine", "--max-new-tokens", "8", names=names).text


@pytest.mark.slow
def test_one_who_packs_it_first(on: Type):
    on("vb quantize", names={"FOLDER": "my-7b"})
    names = {"mine": "packed", "7GiB": "300KiB"}
    assert "8 tokens, the first after" in on("vb generate --model mine", "--max-new-tokens", "8", names=names).text


@pytest.mark.slow
def test_one_who_chats_with_a_model_larger_than_memory(on: Type, folder: Path):
    """Under the same cap: an answer comes, and the conversation ends as it is told."""
    (folder / "my-7b" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    names = {"FOLDER": "my-7b", "6GiB": "300KiB"}
    screen = on("vb chat", "--max-new-tokens", "8", "--seed", "1", names=names, lines=("the rain", "/quit"))
    shown = screen.text.split("> ")
    assert "Ctrl-C stops an answer" in shown[0] and len(shown) == 3, screen.text
    question, answer = shown[1].split("\n", 1)
    assert question.strip() == "the rain" and answer.strip(), screen.text
