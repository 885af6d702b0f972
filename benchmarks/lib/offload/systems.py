"""The systems that are compared: plain PyTorch and ours, with one interface. The others' offloading is in peers.py.

plain      transformers' causal model, fp32 weights, autocast to bf16, torch's fused AdamW, checkpointing, SDPA
lines      the same model through the three lines of the README, which choose everything but the cap and the precision
held       the same three lines where level 0 holds all of it
enabled    the same model, put into a stack in which all of it fits, and VGPUAdamW: what enabling the stack costs
resident   our Decoder, bf16 compute weights with fp32 masters, all on level 0
streamed   the same Decoder under the cap, streaming from the levels below
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.lib.offload.case import Case, Shape
from benchmarks.lib.offload.data import fill, next_tokens
from vblackwell import VGPUAdamW, create_vgpu_stack, enable_vgpu_stack_optimization, model_plan, offload_of
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.units import parse_bytes

RESIDENT_SHARE = 0.95  # of the free GPU memory, as level 0 of a model that fits
PLACING = {"update", "activations", "resident_bytes", "weight_bytes"}  # fields of a recipe
HOST_SHARE = 0.9  # of the free RAM, as level 1


@dataclass
class System:
    """Something that trains.

    Attributes:
        model: for its parameters; other people's wrappers may hold them.
        optimizer: its ``param_groups`` take the learning rate.
        loss_of: (B, S) token numbers on the device to the mean loss over next tokens.
        clip: clips gradients before the step and returns their 2-norm; None where the optimizer does it, or nobody.
        norm_of: the last step's norm, where the optimizer clips.
        finish: waits for what still runs after the step.
        stats: ``VGPUStack.get_stats`` of ours. about: what became of our layers, in words.
        notes: what a reader of the result should know.
        began: of `time.perf_counter`, where setting up begins; None: with building.
    """

    model: nn.Module
    optimizer: Any
    loss_of: Callable[[Tensor], Tensor]
    clip: Callable[[], Tensor] | None = None
    norm_of: Callable[[], float | None] = lambda: None
    finish: Callable[[], None] = lambda: None
    stats: Callable[[], dict[str, Any]] | None = None
    about: Callable[[], str] = lambda: ""
    notes: list[str] = field(default_factory=list)
    began: float | None = None
    _clipped: Tensor | None = None

    def step(self, ids_BS: Tensor, learning_rate: float, accumulation: int = 1) -> Tensor:
        """One training step of so many parts; the mean loss, which may still be on its way."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        *first, last = ids_BS.chunk(accumulation)
        total = torch.zeros((), device=ids_BS.device)
        for part in first:
            loss = self.loss_of(part) / accumulation
            loss.backward()
            total += loss.detach()
        loss = self.loss_of(last) / accumulation
        self.backward(loss)
        return total + loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Gradients, clipping and the update."""
        loss.backward()
        self._clipped = None if self.clip is None else self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def grad_norm(self) -> Tensor | float | None:
        """The 2-norm of the last step's gradients before clipping, where somebody measured it; perhaps still
        under way.
        """
        return self.norm_of() if self._clipped is None else self._clipped


def hf_config(shape: Shape, seq: int) -> Any:
    """transformers' configuration of ``shape``: of a llama the decoder that `DecoderConfig` describes."""
    same = {
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.family == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            n_embd=shape.hidden_size,
            n_inner=shape.intermediate_size,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_positions=shape.positions,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            **same,
        )
    whole = {"sliding_window": None} if shape.family == "mistral" else {}
    return AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads or shape.num_heads,
        max_position_embeddings=max(seq, 2048),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **same,
        **whole,
    )


def hf_model(case: Case, device: torch.device | str) -> Any:
    """An uninitialised or freshly drawn causal model on ``device`` that checkpoints its blocks."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf_config(case.decoder, case.seq))
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def hf_loss(model: nn.Module, device: torch.device | None = None) -> Callable[[Tensor], Tensor]:
    """The loss that transformers computes when it is given labels; with ``device`` under its autocast to bf16."""

    def loss_of(ids_BS: Tensor) -> Tensor:
        with nullcontext() if device is None else torch.autocast(device.type, dtype=torch.bfloat16):
            return model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss

    return loss_of


def drawn_weights(case: Case, model: nn.Module, device: torch.device) -> None:
    """The seed's weights into ``model``, wherever they are."""
    named = ((name, param.shape, param.detach()) for name, param in model.named_parameters())
    fill(named, case.decoder, case.seed, device)


def clip_of(case: Case, model: nn.Module) -> Callable[[], Tensor] | None:
    """torch's clipping, if the case clips."""
    limit = case.max_grad_norm
    if limit is None:
        return None
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def adamw_settings(case: Case) -> dict[str, Any]:
    """AdamW's arguments, the same for all."""
    return {"lr": case.rate_at(0), "betas": case.betas, "eps": case.eps, "weight_decay": case.weight_decay}


def build_plain(case: Case, device: torch.device) -> System:
    """Plain PyTorch."""
    model = hf_model(case, device)
    drawn_weights(case, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(case), fused=True)
    return System(model, optimizer, hf_loss(model, device), clip_of(case, model), notes=["torch AdamW, fused"])


def build_held(case: Case, device: torch.device) -> System:
    """The three lines with as much of the GPU as there is."""
    everything = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else case.cap_bytes
    return build_lines(replace(case, cap_bytes=everything), device, placement="resident")


def build_lines(case: Case, device: torch.device, placement: str = "auto") -> System:
    """What a reader of the README runs; of a recipe `undo` alone is asked, which who never clips may promise."""
    model = hf_model(case, "meta").to_empty(device="cpu")
    if case.decoder.family != "gpt2":
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # whose buffers are computed, not drawn
    model.tie_weights()  # what is empty has been made anew
    drawn_weights(case, model, device)
    began = time.perf_counter()
    disk = None if case.host_bytes is None else case.disk_bytes  # what a limit of RAM leaves out is refused
    stack = create_vgpu_stack(case.cap_bytes, case.host_bytes, disk, device=device)
    model = enable_vgpu_stack_optimization(model, stack, compute_dtype=torch.bfloat16, placement=placement)
    clipping = {"max_grad_norm": case.max_grad_norm, "accumulation_steps": case.accumulation}
    updating = {"update_in_backward": True, "undo": case.recipe.undo is not False}
    optimizer = VGPUAdamW(model.parameters(), **adamw_settings(case), **clipping, **updating)
    return replace(ours(model, optimizer, hf_loss(model), stack), began=began)


def build_enabled(case: Case, device: torch.device) -> System:
    """Plain PyTorch's model, in a stack that holds all of it on level 0."""
    stack = our_stack(case, device, streamed=False)
    model = hf_model(case, device)
    drawn_weights(case, model, device)
    model = enable_vgpu_stack_optimization(model, stack, placement="resident", accelerate=False)
    optimizer = VGPUAdamW(model.parameters(), **adamw_settings(case), max_grad_norm=case.max_grad_norm)
    return ours(model, optimizer, hf_loss(model, device), stack)


def build_resident(case: Case, device: torch.device) -> System:
    """Our decoder, everything on level 0."""
    return _build_decoder(case, device, "resident", {}, {})


def build_streamed(case: Case, device: torch.device) -> System:
    """Our decoder, streamed."""
    from vblackwell.offload.measure import rates_together

    asked = {name: value for name, value in asdict(case.recipe).items() if value is not None}
    if "update" in asked:
        asked["update"] = place_or_share(asked["update"])
    placing = {name: asked[name] for name in asked.keys() & PLACING}
    updating = {name: asked[name] for name in asked.keys() & {"update_in_backward", "undo"}}
    system = _build_decoder(case, device, "streamed", placing, updating)
    if device.type == "cuda" and placing.get("update", "auto") == "auto":
        link, cpu = rates_together(device)
        system.notes.append(
            f"the CPU's share follows from {link / 1e9:.1f} GB/s each way and {cpu / 1e9:.2f} G parameters/s"
        )
    return system


def place_or_share(text: str) -> str | float:
    """'device', 'host', or a share such as 0.25."""
    try:
        return float(text)
    except ValueError:
        return text


def _build_decoder(
    case: Case, device: torch.device, placement: str, placing: dict[str, Any], updating: dict[str, Any]
) -> System:
    shape, streamed = case.decoder, placement == "streamed"
    stack = our_stack(case, device, streamed=streamed)
    config = shape.decoder_config(max(case.seq, 2048))
    model = Decoder(config, device="meta").to_empty(device="cpu" if streamed else device)
    drawn_weights(case, model, device)
    model.gradient_checkpointing = True
    if case.recipe.loss_chunk_tokens is not None:
        model.loss_chunk_tokens = case.recipe.loss_chunk_tokens
    enable_vgpu_stack_optimization(model, stack, placement=placement, compute_dtype=torch.bfloat16, **placing)
    clipping = {"max_grad_norm": case.max_grad_norm, "accumulation_steps": case.accumulation}
    optimizer = VGPUAdamW(model.parameters(), **adamw_settings(case), **clipping, **updating)
    return ours(model, optimizer, lambda ids_BS: model(ids_BS, next_tokens(ids_BS)), stack)


def ours(model: nn.Module, optimizer: Any, loss_of: Callable[[Tensor], Tensor], stack: Any) -> System:
    """The system of a model in a stack."""
    engine = offload_of(model)
    assert engine is not None, "the model was just put into a stack"
    return System(
        model,
        optimizer,
        loss_of,
        norm_of=lambda: optimizer.grad_norm,
        finish=engine.finish,
        stats=stack.get_stats,
        about=lambda: "; ".join(model_plan(model).splitlines()),
    )


def our_stack(case: Case, device: torch.device, *, streamed: bool) -> Any:
    """The levels: the cap, or what the device has free, over RAM, over disk if asked for."""
    fast = case.cap_bytes
    if fast is None and device.type == "cuda":
        fast = int(RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0])
    if streamed and case.recipe.level0_bytes is not None:
        fast = parse_bytes(case.recipe.level0_bytes)
    host = case.host_bytes if case.host_bytes is not None else int(HOST_SHARE * psutil.virtual_memory().available)
    disk = case.disk_bytes if streamed else 0
    return create_vgpu_stack(fast, host, disk, case.disk_path, device=device, cap_process=False)


def attention_kernels(case: Case) -> AbstractContextManager[object]:
    """Deterministic cases leave out attention kernels whose backward is not."""
    if not case.deterministic:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
