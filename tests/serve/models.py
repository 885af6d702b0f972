"""For the engine's tests: tiny models, a fleet that leaves them where they are, and requests with what came of them."""

import threading
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from vblackwell.generate.generate import position_limit
from vblackwell.generate.sampling import Sampling
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.serve import paged_model
from vblackwell.serve.engine import Engine
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.pass_graphs import PassGraphs
from vblackwell.serve.request import Done, Event, Pooled, Request, Token
from vblackwell.serve.sunk import SunkPages

GREEDY = Sampling(temperature=0)
VOCABULARY = 96
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Mixtral": {"num_local_experts": 4},
}


def tiny(kind: str, seed: int = 0, **more: Any) -> Any:
    """A random model of transformers, whose logits differ enough that the likeliest token is plain."""
    torch.manual_seed(seed)
    if kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        config: Any = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes, **more)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = getattr(transformers, f"{kind}Config")(**{**_SMALL, **KINDS.get(kind, {}), **more})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.3)
    return model.eval()


@dataclass
class Resident:
    """A model that stays in memory."""

    name: str
    module: Any
    state: str = "awake"
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    calls: list[str] = field(default_factory=list)

    @property
    def position_limit(self) -> int | None:
        return position_limit(self.module)

    def touch(self) -> None:
        self.calls.append("touch")

    is_whole = True

    def held(self) -> AbstractContextManager[int | None]:
        return nullcontext(0)

    def wake(self) -> None:
        self.state = "awake"

    def sleep(self) -> None:
        self.state = "asleep"


class Residents:
    """A fleet of them, with so many ``sunk`` pages in RAM; pages begin as NaN, which must not be seen."""

    def __init__(self, models: dict[str, Any], sunk: int = 0) -> None:
        self.models = {name: Resident(name, model) for name, model in models.items()}
        self.reserved: list[Tensor] = []
        self.sunk: SunkPages | None = None
        self._num_sunk = sunk

    def reserve(self, num_bytes: int) -> Tensor:
        self.reserved.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.reserved[-1]

    def reserve_ram(self, reserved: Tensor, block_bytes: int) -> SunkPages | None:
        if not self._num_sunk:
            return None
        self._stack = create_vgpu_stack("64KiB", "4MiB", 0, device="cpu")
        self.sunk = SunkPages(self._stack, "sunk", reserved, block_bytes, self._num_sunk)
        return self.sunk

    def release(self, reserved: Tensor) -> None:
        if self.sunk is not None:
            self.sunk.close()
            assert self._stack.levels[1].used_bytes == 0
            self._stack.close()
        self.reserved = [each for each in self.reserved if each is not reserved]

    def sleep_idle(self, busy: Collection[str]) -> None:
        """They never do."""


class Answer:
    """What came of a request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._over = threading.Event()
        self.number = 0

    def __call__(self, event: Event) -> None:
        assert not self._over.is_set(), "nothing comes after Done"
        self.events.append(event)
        if isinstance(event, Done):
            self._over.set()

    @property
    def done(self) -> Done:
        assert self._over.wait(60), "the engine did not end the request"
        (done,) = (event for event in self.events if isinstance(event, Done))
        return done

    @property
    def told(self) -> list[Token]:
        assert self.done
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def vector(self) -> Tensor:
        assert self.done.error is None
        (pooled,) = (event for event in self.events if isinstance(event, Pooled))
        return pooled.vector_D

    @property
    def tokens(self) -> list[int]:
        return [token.token for token in self.told if not token.of_prompt]


def ask(engine: Engine, tokens: Iterable[int], count: int = 8, model: str = "m", **more: Any) -> Answer:
    """A request that is on its way."""
    answer = Answer()
    request = Request(model, tuple(tokens), count, more.pop("sampling", GREEDY), **more)
    answer.number = engine.submit(request, answer)
    return answer


class AsOnGpu:
    """Larger tiles of prompts, and graphs, for which passes run as they are without a GPU; `count` is of the passes
    that read tokens ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, init, logits = 0, PagedModel.__init__, PagedModel.logits

        def made(model: PagedModel, served: Any) -> None:
            init(model, served)
            model.graphs = model.graphs or PassGraphs(served.name)

        def counted(model: PagedModel, shares: Any, tokens_R: Tensor | None = None) -> Tensor:
            self.count += tokens_R is not None
            return logits(model, shares, tokens_R)

        monkeypatch.setattr(paged_model, "CPU_PROMPT_TILE", 48)
        monkeypatch.setattr(PagedModel, "__init__", made)
        monkeypatch.setattr(PagedModel, "logits", counted)
