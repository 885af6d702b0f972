"""What one system is asked to do, and what it answers: values that travel to its process and back as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields

from vblackwell.nn.decoder.config import DecoderConfig

SYSTEMS = ("plain", "lines", "held", "enabled", "resident", "streamed", "fsdp2", "deepspeed")
PEAK = 989e12  # FLOP/s in bf16 of an H100 or H200, by its data sheet


FAMILIES = ("llama", "mistral", "qwen2", "gpt2")  # as transformers names them


@dataclass(frozen=True)
class Shape:
    """A decoder of one of `FAMILIES`. ``num_kv_heads`` None: as many as query heads, as gpt2 always has; ``tied``: the
    embeddings are the head; ``positions``: that gpt2 has embeddings of.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 32000
    num_kv_heads: int | None = None
    family: str = "llama"
    tied: bool = False
    positions: int = 0

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: projections of attention, feed-forward, two norms, and biases where there are."""
        hidden, wide = self.hidden_size, self.intermediate_size
        if self.family == "gpt2":
            return 4 * hidden * (hidden + 1) + 2 * hidden * wide + wide + hidden + 4 * hidden
        key_size = hidden // self.num_heads * (self.num_kv_heads or self.num_heads)
        biases = hidden + 2 * key_size if self.family == "qwen2" else 0
        return 2 * hidden * (hidden + key_size) + 3 * hidden * wide + 2 * hidden + biases

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        rows = self.vocab_size * (1 if self.tied else 2) + self.positions
        last_norm = (2 if self.family == "gpt2" else 1) * self.hidden_size
        return self.num_layers * self.block_parameters + rows * self.hidden_size + last_norm

    def decoder_config(self, max_position: int) -> DecoderConfig:
        """Our decoder of this shape, a llama's."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers, self.num_heads)
        return DecoderConfig(*sizes, self.num_kv_heads, max_position=max_position)


SHAPES = {
    "tiny": Shape(64, 160, 4, 4, 256),
    "1.36B": Shape(2048, 5632, 24, 16),
    "2.70B": Shape(2560, 6912, 32, 20),
    "6.7B": Shape(4096, 11008, 32, 32),
    "14B": Shape(5120, 13824, 48, 40, 152064, 8, "qwen2"),
}


@dataclass(frozen=True)
class Recipe:
    """Choices of our own systems that others do not have; None leaves the package's default.

    Attributes:
        update: where AdamW runs: 'auto', 'device' (streamed states), 'host' (the CPU) or the share on the host.
            Streamed only.
        resident_bytes: level-0 bytes for groups that live there. Streamed only.
        weight_bytes: level-0 bytes for loaded weights. Streamed only.
        level0_bytes: of level 0, less than the cap: what activations need stays outside. Streamed only.
        activations: where checkpoints' inputs wait for backward: 'level0' or 'host'. Streamed only.
        undo: False: an update after the backward is final, there is no log to undo it.
        update_in_backward: start a group's update after its backward.
        loss_chunk_tokens: tokens whose logits exist at a time.
    """

    update: str | None = None
    undo: bool | None = None
    update_in_backward: bool = True
    loss_chunk_tokens: int | None = None
    activations: str | None = None
    resident_bytes: str | None = None
    weight_bytes: str | None = None
    level0_bytes: str | None = None

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """``'update=device,undo=false'``.

        Raises:
            ValueError: an unknown name, or a value of the wrong type.
        """
        found = dict(part.partition("=")[::2] for part in filter(None, text.split(",")))
        flags = {"true": True, "false": False}
        for name, value in found.items():
            known = {each.name: each.type for each in fields(cls)}
            if name not in known or not value or ("bool" in known[name]) != (value in flags):
                raise ValueError(f"recipe {name}={value}: write name=value with a name of {', '.join(known)}")
        values = {name: flags.get(value, int(value) if value.isdigit() else value) for name, value in found.items()}
        return cls(**values)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Case:
    """One system, one shape, one training run.

    Attributes:
        system: one of `SYSTEMS`.
        shape: a key of `SHAPES`, or the name of ``drawn``.
        seq, batch: tokens in a sequence, sequences in a forward. accumulation: forwards and backwards in a step.
        warmup, steps: unmeasured and measured steps.
        max_grad_norm: clip to this 2-norm; None neither clips nor measures.
        bad_every: one of so many batches is a bad one (lib/offload/data.py); None: none is.
        learning_rate, rise_steps: the rate climbs linearly to ``learning_rate`` within ``rise_steps`` steps and stays.
        betas, eps, weight_decay: AdamW's, on all parameters.
        seed: of weights and tokens.
        device: 'cuda' or 'cpu'.
        cap_bytes: enforced on the process (CUDA), and level 0's capacity; None: the whole device.
        host_bytes, disk_bytes, disk_path: capacities of our lower levels; None: nine tenths of the free RAM, no disk.
        deterministic: deterministic kernels, so that losses may be compared bit by bit.
        drawn: a shape that is none of `SHAPES`.
    """

    system: str
    shape: str = "2.70B"
    seq: int = 2048
    batch: int = 8
    warmup: int = 5
    steps: int = 10
    max_grad_norm: float | None = None
    learning_rate: float = 1e-4
    rise_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    seed: int = 0
    device: str = "cuda"
    cap_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int = 0
    disk_path: str | None = None
    deterministic: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    drawn: Shape | None = None
    accumulation: int = 1
    bad_every: int | None = None

    def __post_init__(self) -> None:
        for value, known in ((self.system, SYSTEMS), (self.shape, SHAPES if self.drawn is None else (self.shape,))):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if min(self.seq, self.batch, self.steps, self.warmup, self.accumulation) < 1:
            raise ValueError("seq, batch, steps, warmup and accumulation must be at least 1")

    @property
    def decoder(self) -> Shape:
        return self.drawn or SHAPES[self.shape]

    def ends_badly(self, first: int) -> bool:
        """Whether, measured from step ``first`` on, a bad batch is one of the last two, whose tail is not measured."""
        if self.bad_every is None:
            return False
        return any((number + 1) % self.bad_every == 0 for number in range(first + self.steps - 2, first + self.steps))

    def rate_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..."""
        return self.learning_rate * min(1.0, (step + 1) / self.rise_steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        values = json.loads(text)
        values["recipe"] = Recipe(**values["recipe"])
        values["betas"] = tuple(values["betas"])
        values["drawn"] = values["drawn"] and Shape(**values["drawn"])
        return cls(**values)


@dataclass
class Result:
    """What was measured. Bytes; seconds; None where the system or the device has no such number.

    Attributes:
        tokens: a step.
        max_grad_norm: the case's. clipped_share: of the measured steps.
        tokens_per_second: by the median measured step, or where some clipped and others not by their mean.
        drained_tokens_per_second: all measured steps between two standstills.
        peak_reserved, peak_allocated: torch's, from the first step on. gpu_used: the device's, contexts included.
        level0_peak: of our stack's books.
        host_rss: the process's highest. host_used: growth of the machine's used RAM. pinned: torch's pinned blocks and
            ours.
        first_step_seconds: to the end of step 1, from where building begins; of the three lines, from the first one on.
        losses: of all steps, the unmeasured ones too.
        link_bytes: a measured step, by direction. link_busy: share of the measured time during which a copy ran,
            likewise.
    """

    system: str
    status: str = "ok"
    error: str = ""
    tokens: int = 0
    tokens_per_second: float | None = None
    drained_tokens_per_second: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    max_grad_norm: float | None = None
    clipped_share: float | None = None
    peak_reserved: int | None = None
    peak_allocated: int | None = None
    gpu_used: int | None = None
    level0_peak: int | None = None
    host_rss: int | None = None
    host_used: int | None = None
    pinned: int | None = None
    build_seconds: float | None = None
    first_step_seconds: float | None = None
    link_bytes: dict[str, float] = field(default_factory=dict)
    link_busy: dict[str, float] = field(default_factory=dict)
    stall_share: float | None = None
    notes: list[str] = field(default_factory=list)
