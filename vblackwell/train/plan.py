"""``vb estimate MODEL`` with flags that only ``vb train`` has: the plan of that run, without its data and its weights,
on this machine or on a card by name.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vblackwell.data.tokenizer import vocab_size_of
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.compressed_tensors import not_trained
from vblackwell.folders.folder import find_folder, read_config, read_json, read_tokenizer, stored_dtype
from vblackwell.generate.load import model_on_meta
from vblackwell.kernels.fp4.w4a8 import FP8_CAPABILITY
from vblackwell.machine.device import BF16_CAPABILITY, choose_device, choose_precision, has_bf16
from vblackwell.machine.gpus import context_bytes, find_gpu
from vblackwell.machine.limits import stated_beside
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.config import PRESETS, DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.estimate.command import bounded_by, defaults_of
from vblackwell.planner.forecast import Machine
from vblackwell.planner.known_models import KNOWN_MODELS
from vblackwell.planner.model_spec import packed_in
from vblackwell.planner.placement import Plan
from vblackwell.trace.causal_lm import build_causal_lm, check_fields
from vblackwell.train.auto import bounds_of, make_training_plan, plan_on
from vblackwell.train.config import TrainConfig, flag_of, resolve
from vblackwell.train.defaults import Facts, choose
from vblackwell.train.model import TrainableModel, check_length, check_rows, convert_linears, preset_model, trainable
from vblackwell.units import format_bytes

OTHERS = ("optimizer", "gpu_memory", "gpus", "topology", "html", "expandable_segments", "advice")  # of vb estimate


def plan_command(given: dict[str, Any]) -> int:
    """Print what ``vb train --vgpu-auto`` would choose; 0. ``given``: flags of both commands by field name, and
    ``model``. Raises ConfigurationError: a flag of the other answers of ``vb estimate``, a model that ``vb train`` does
    not take; others as `make_training_plan`.
    """
    for name in OTHERS:
        if name in given:
            said = "belongs to an estimate of plain PyTorch, and other flags here are of vb train alone"
            raise ConfigurationError(f"{flag_of(name)} {said}: drop the one or the others")
    if "gpu" in given and "device" in given:
        said = "--gpu plans for a card by name, and --device says where this machine computes"
        raise ConfigurationError(f"{said}: drop one of them")
    as_json, gpu, model = given.pop("json", False), given.pop("gpu", None), given.pop("model")
    if "seq_length" not in given:
        _, given["seq_length"], learnt = defaults_of(model)
        if learnt is not None:
            print(bounded_by(model, learnt), file=sys.stderr, flush=True)
    config = resolve({"config" if model in PRESETS else "model": model, **given, "vgpu_auto": True})
    where, parameters, plan = _plan(config, gpu, functools.partial(print, file=sys.stderr, flush=True))
    if as_json:
        values = {"model": model, "parameters": parameters, "machine": where, "seq_length": config.seq_length}
        print(json.dumps(values | plan.as_dict(), indent=2))
    else:
        head = f"{model}, {parameters:,} parameters, on {where}, {config.seq_length:,} tokens a sequence"
        print("\n".join([head, *plan.lines()]))
    return 0


def _plan(config: TrainConfig, gpu: str | None, say: Callable[[str], None]) -> tuple[str, int, Plan]:
    """The machine in words, the model's parameters, and the plan."""
    card = None if gpu is None else find_gpu(gpu)
    device = choose_device(config.device, say) if card is None else torch.device("cuda")
    has = has_bf16(device) if card is None else card.capability >= BF16_CAPABILITY
    if card is not None and config.fp8_activations and card.capability < FP8_CAPABILITY:
        raise Unsupported(f"--fp8-activations: {card.name} has no FP8 tensor cores: leave it out")
    check_rows(config)
    found, weights = _model_of(config)
    chosen, _ = choose(config, Facts(device.type == "cuda", has, weights))
    config = replace(config, precision=chosen.precision)  # the length and batch of a run go by its data
    dtype = choose_precision(config.precision, config.mixed_precision, bf16=has)
    if config.model is not None:
        check_length(config, found, config.model)
    count = sum(parameter.numel() for parameter in found.model.parameters())
    model = convert_linears(config, found, device, say).model
    if card is None:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine, without a GPU"
        return where, count, make_training_plan(config, model, dtype, device, say)
    room, stated = card.total_bytes - context_bytes(card.capability), stated_beside(card)
    if stated is not None and (config.host_memory is None or (config.has_disk and config.disk_memory is None)):
        ram, disk = map(format_bytes, stated)
        said = f"{ram} of RAM and {disk} of disk next to a card that this machine lacks"
        say(f"assumes {said}: --ram and --disk change it")
    here = bounds_of(config, torch.device("cpu"), stated)
    bounds = replace(here, gpu=room if config.fast_memory is None else min(int(config.fast_memory), room))
    machine = Machine(bounds, rates_of(card), capability=card.capability)
    return card.name, count, plan_on(machine, config, model, dtype, card.num_sms)


def _model_of(config: TrainConfig) -> tuple[TrainableModel, torch.dtype | None]:
    """The run's model on meta, without what fills it, and the type of its folder's weights; None for a preset."""
    if config.model is None:
        given = None if config.tokenizer is None else read_tokenizer(Path(config.tokenizer))
        vocab_size = config.vocab_size if given is None else vocab_size_of(given)
        return replace(preset_model(config, vocab_size), initialize=None), None
    fields = KNOWN_MODELS.get(config.model)
    if fields is None and Path(config.model).suffix == ".json":
        fields = read_json(Path(config.model))
    if fields is None:
        folder = find_folder(config.model)
        fields, made = read_config(folder), model_on_meta(folder, torch.float32, quantized=config.lora is not None)
        return replace(trainable(made), packing=packed_in(fields, made)), stored_dtype(folder)
    check_fields(fields, config.model, (("vocab_size",),))
    weights = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), torch.float32)
    plain = {name: value for name, value in fields.items() if name != "quantization_config"}
    if plain != fields and config.lora is None:
        raise not_trained(config.model, fields["quantization_config"])
    if not_supported_reasons(plain):
        made = build_causal_lm(plain, config.model, torch.float32).train()
    else:
        made = Decoder(DecoderConfig.from_hf(plain), device="meta", dtype=torch.float32)
    return replace(trainable(made), packing=packed_in(fields, made)), weights
