"""A server on a tiny random model over bytes, for the tests of what clients see."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vblackwell.folders.chat_prompt import ChatTemplate
from vblackwell.serve.command import Listener, listen
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet
from vblackwell.serve.http.prepare import Chat
from vblackwell.serve.http.server import Server

END, START = "<|end|>", "<|start|>"
POSITIONS = 1024
TEMPLATE = """{% if tools %}Call by <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{% endif %}{% for message in messages %}{% if message.role == 'moderator' %}{{ raise_exception('nobody') }}{% endif %}\
<|start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}{{ suffix }}"""


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, then those that begin and end turns, and the tags of calls."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, START])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return tokenizer


def byte_model(seed: int, positions: int) -> Any:
    """A random causal model over them, whose likeliest token is plain."""
    torch.manual_seed(seed)
    config: Any = transformers.LlamaConfig(
        vocab_size=byte_tokenizer().get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=257,
        eos_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.3)
    return model.eval()


def write_folder(folder: Path, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    """The same model as a Hugging Face folder."""
    byte_model(seed, POSITIONS).save_pretrained(folder)
    opened = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END, bos_token=START)
    opened.chat_template = template
    opened.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Serving:
    """A server that runs: its parts, and where it listens."""

    url: str
    port: int
    engine: Engine
    server: Server
    listener: Listener

    def until_idle(self, seconds: float = 30.0) -> None:
        """Waits until the engine has nothing to do."""
        begun = time.monotonic()
        while any(model.running or model.waiting for model in self.engine.state().models.values()):
            assert time.monotonic() - begun < seconds, "texts are still written"
            time.sleep(0.01)


@contextmanager
def serving(
    names: Mapping[str, tuple[int, int]] | None = None,
    *,
    folders: Sequence[Path] = (),
    chats: bool = True,
    grace_seconds: float = 10.0,
    **options: Any,
) -> Iterator[Serving]:
    """A server of random models, by name their seed and limit of positions, or of ``folders``; ``options`` of `Engine`
    and `Server`."""
    models = {name: byte_model(*of) for name, of in (names or {"tiny": (0, POSITIONS)}).items()}
    on_cpu: Any = {"budget": "64MiB", "host_memory": "256MiB", "device": "cpu"}
    tokenizers = dict.fromkeys(models, byte_tokenizer())
    fleet = Fleet(folders, **on_cpu) if folders else Fleet.of_modules(models, tokenizers=tokenizers, **on_cpu)
    template = ChatTemplate(TEMPLATE, "the test's template", {})
    talk = {name: Chat.of(template, byte_tokenizer()) for name in fleet.models} if chats else {}
    of_engine = {name: options.pop(name) for name in ("max_waiting", "cache_bytes", "max_rows") if name in options}
    engine = Engine(fleet, **{"cache_bytes": 4 << 20, **of_engine})
    server = Server(engine, fleet, talk, **options)
    socket = listen("127.0.0.1", 0)
    listener = Listener(server, socket, grace_seconds)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
    thread.start()
    try:
        port = socket.getsockname()[1]
        yield Serving(f"http://127.0.0.1:{port}", port, engine, server, listener)
    finally:
        listener.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        engine.close(grace_s=0)
        fleet.close()
