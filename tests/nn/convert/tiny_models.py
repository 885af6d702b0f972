"""A small random model of every causal architecture of transformers that can be made small, for checks over all of
them.

Configurations call the same sizes by some eighty names. `tiny_config` sets those that an architecture's has, and what
``MORE`` adds.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ENDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    **ENDS, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "sliding_window": 8,
    "attention_window_size": 8, "chunk_size": 8,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "emb_dim": 64, "word_embed_proj_dim": 64, "lru_width": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "ffn_hidden_size": 96, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "ffn_intermediate_size": 96, "dff": 96, "dim_ff": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4, "encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "rotary_dim": 8,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_top_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_num_heads": 4,
    "mamba_head_dim": 32, "mamba_expand": 2, "mamba_d_ssm": 128, "state_size": 16, "ssm_state_size": 16,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 0,
    "is_decoder": True,
}  # fmt: skip
MLA = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
)
WHOLE_HEADS = {"num_key_value_heads": 4}
MIXED = ["linear_attention", "full_attention"] * 2
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(MLA, WHOLE_HEADS),
    "bailing_hybrid": {"layer_types": MIXED, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granite": {"logits_scaling": 2.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {
        **WHOLE_HEADS,
        "layer_types": MIXED,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {**WHOLE_HEADS, "zero_expert_num": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "attention"],
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 4, "hash_seed": 0},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "layers_block_type": ["mamba", "hybrid"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "roc_bert": {
        "pronunciation_vocab_size": 96,
        "shape_vocab_size": 96,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xlstm": {"qk_dim_factor": 1.0, "num_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
# Those of transformers 5.23 that are text models and small by sizes alone.
KINDS = """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe
    cpmant ctrl cwm data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 electra
    ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2
    gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3
    gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe
    lfm3 llama llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3
    minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi mpt mvp
    nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe
    plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma
    reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open stablelm
    starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm youtu zamba2 zaya
"""
# Of these, transformers before 5.23 has other configurations, or faults: doge's `generate` writes other text
# than its forward.
SINCE_5_23 = {"deepseek_v4", "doge", "longcat_flash", "zamba2"}
MAX_PARAMETERS = 3_000_000
IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def tiny_config(kind: str) -> PreTrainedConfig:
    """A small configuration of the architecture ``kind``."""
    known = set[str]()
    for made in CONFIG_MAPPING[kind].__mro__[:-1]:
        known |= set(inspect.signature(made.__init__).parameters) | set(getattr(made, "__annotations__", {}))
        known |= set(getattr(made, "attribute_map", {}))
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return AutoConfig.for_model(kind, **{**sizes, **MORE.get(kind, {})})


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A small random model of it from ``seed``, in eval mode, that does not end a text; ``changes`` are made to its
    configuration.

    Raises:
        ValueError: it is not small.
    """
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        count = sum(param.numel() for param in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{kind} has {count:,} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def small_kinds() -> list[str]:
    """Those of `KINDS` that the installed transformers has, as they are checked."""
    older = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23)
    known = [kind for kind in KINDS.split() if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return [kind for kind in known if not (older and kind in SINCE_5_23)]
