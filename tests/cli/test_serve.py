"""`vb serve` and `vb chat` as real processes: they answer, end cleanly, and refuse in one line."""

from __future__ import annotations

import http.client
import io
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.serve.serving import write_folder
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError
from vblackwell.serve.command import listen, read_keys
from vblackwell.serve.http.refusal import Refusal
from vblackwell.serve.opened import opened

JSON = {"Content-Type": "application/json"}
MEMORY = ["--budget", "32MiB", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("served") / "tiny")


def said(path: Path, pattern: str, child: Any) -> re.Match[str]:
    """What a process has written, once it is there."""
    while (found := re.search(pattern, path.read_text(encoding="utf-8"))) is None:
        assert child.alive, child.stderr.read_text(encoding="utf-8")
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_server_answers_and_ends_cleanly(place: Any, folder: Path, number: int):
    """At the second signal, sent when the first was heard: of two alike that wait, the system hands over one."""
    child = place.start("serve", str(folder), f"second={folder}", "--port", "0", *MEMORY)
    port = int(said(child.stdout, r"tiny, second at http://127.0.0.1:(\d+)/v1", child)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "second", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1})
    connection.request("POST", "/v1/chat/completions", body, JSON)
    answer = json.loads(connection.getresponse().read())
    assert answer["usage"]["completion_tokens"] == 3
    endless = {"messages": [{"role": "user", "content": "hi"}], "n": 60, "max_tokens": 900, "logit_bias": {"256": -100}}
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "tiny", "stream": True} | endless), JSON)
    stream = connection.getresponse()
    stream.read(1)
    child.signal(number)
    with pytest.raises(OSError):  # it takes nobody any more
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            time.sleep(0.05)
    child.signal(number)
    rest = stream.read().decode()
    connection.close()
    assert "the server is closing" in rest and rest.endswith("data: [DONE]\n\n")
    assert child.wait() == 0
    told = child.stderr.read_text(encoding="utf-8")
    assert "opening tiny" in told and "opened in" in told and "Traceback" not in told
    assert re.search(r"keys and values: [\d.]+ MiB of fast memory, up to [\d.]+ MiB of RAM", told), told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--port", "70000"], "--port 70000"),
        (["--api-key-file", "none.txt"], "none.txt"),
        (["--host", "no.such.host.invalid", "--api-key-file", "keys"], "no.such.host.invalid"),
        (["--pin", "other"], "pin 'other'"),
        (["--budget", "8KiB"], "raise --budget"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], told: str, folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o600)
    given = words if "--budget" in words else [*words, "--budget", "32MiB"]
    port = [] if "--port" in words else ["--port", "0"]
    assert main(["serve", str(folder), "--device", "cpu", *given, *port]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("vb: error: ") and told in last


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(folder: Path, capsys: Any):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", str(folder), "--port", str(other.getsockname()[1]), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "in use" in line and "--port" in line


def test_keys_are_read(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("one\n\n  two  \n")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_keys(str(path), "--api-key-file")
    path.chmod(0o640)
    assert read_keys(str(path), "--api-key-file") == ["one", "two"]
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="no key"):
        read_keys(str(path), "--api-key-file")
    assert read_keys(None, "--api-key-file") == []


def test_an_address_of_the_other_kind():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        made = listen("::1", 0)
    except ConfigurationError:
        pytest.skip("no ::1 here")
    with made:
        assert made.family == socket.AF_INET6


def test_an_adapter_may_have_a_chat_template_of_its_own(folder: Path, tmp_path: Path):
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 32), "B": (32, 2)}
    save_file(
        {name.format(0, each): torch.zeros(shapes[each]) for each in "AB"},
        tmp_path / "adapter_model.safetensors",
    )
    own = "{% for message in messages %}Own: {{ message.content }}<|end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(own)
    with opened([f"own={tmp_path}"], "32MiB", None, "cpu") as ready:
        assert ready.chats["own"].template.source == own


def test_a_conversation_in_a_terminal(folder: Path, monkeypatch: Any, capsys: Any):
    """Through a pipe: each line is said, and what was said before is read again."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n/help\n/clear\n\nlast\n/quit\nnever\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "4", "--temperature", "0", *MEMORY]) == 0
    out, told = capsys.readouterr()
    assert out and "Ctrl-C" in told


def test_what_a_conversation_cannot_have_is_refused(folder: Path, monkeypatch: Any, capsys: Any):
    """Before a model is opened, but for what only the model knows; a line that is no text is left out."""
    for words, part in (
        (["--max-new-tokens", "0"], "--max-new-tokens 0: give a whole number from 1 on"),
        (["--max-new-tokens", "1024"], "--max-new-tokens 1024: "),
        (["--system", "h\udce9"], "--system is not UTF-8 text (character 2)"),
        (["--budget", "1KiB"], "--budget of 1024 bytes is too small: give it 4 KiB or more"),
    ):
        assert main(["chat", str(folder), *MEMORY, *words]) == 2
        assert part in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("h\udce9\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "4", *MEMORY]) == 0
    assert "the line is not UTF-8 text" in capsys.readouterr().err


def test_a_folder_with_any_name_talks(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any):
    shutil.copytree(folder, tmp_path / "é model")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tmp_path / "é model"), "--max-new-tokens", "4", *MEMORY]) == 0
    assert capsys.readouterr().out


def test_a_word_after_a_slash_is_a_command(folder: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr("sys.stdin", io.StringIO("/bogus\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "4", *MEMORY]) == 0
    out, told = capsys.readouterr()
    assert not out and "no such command: /bogus" in told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_of_a_model_do_not_reach_a_terminal(
    folder: Path, monkeypatch: Any, capsys: Any, is_terminal: bool
):
    evil = "\x1b]52;c;eA==\x07\r\x9b2J\x7f \té\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("vblackwell.serve.chat.Conversation._listen", lambda talk, _: talk._show(evil) or evil)
    assert main(["chat", str(folder), *MEMORY]) == 0
    plain = r"\x1b]52;c;eA==\x07\x0d\x9b2J\x7f" + " \té\n"
    assert capsys.readouterr().out == (plain if is_terminal else evil) + "\n"


def test_an_answer_is_stopped_and_the_conversation_goes_on(folder: Path, monkeypatch: Any):
    from vblackwell.serve.chat import Conversation
    from vblackwell.serve.opened import opened

    shown = list[str]()

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    with opened([str(folder)], "32MiB", None, "cpu") as ready:
        talk = Conversation(ready, "tiny", "be short", show, max_tokens=900, seed=1)
        first = talk.say("hello")
        assert first.startswith("".join(shown[:3])) and len(first) < 500
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        assert ready.engine.state().pages_used == 0
        with pytest.raises(Refusal, match="more than the 1024"):
            talk.say("x" * 2000)
        assert len(talk.messages) == 3
        talk.clear()
        assert len(talk.messages) == 1


def test_a_model_without_a_template_does_not_talk(tmp_path: Path, monkeypatch: Any, capsys: Any):
    plain = write_folder(tmp_path / "plain", template=None)
    assert main(["chat", str(plain), *MEMORY]) == 2
    assert "no chat template" in capsys.readouterr().err
