"""Tiny random causal language models of many Hugging Face families, so that tests can ask: does it hold for any decoder?

``SKIPPABLE`` families have blocks whose attention and MLP are children that the block adds to its residual stream, and
caches that hold nothing but keys and values. ``REFUSED`` families lack one of the two; the value says which.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# What every family gets unless its entry in TINY says otherwise; a family that lacks a field ignores it.
_SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=256,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip

# A tuple is a pattern that is repeated over the layers, whatever their number.
_MIXED: dict[str, Any] = dict(sliding_window=8, layer_types=("sliding_attention", "full_attention"))
_WINDOW: dict[str, Any] = dict(sliding_window=8)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
)
_LOCAL_EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
_ROUTED_EXPERTS: dict[str, Any] = dict(
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1
)
_DENSE_FIRST: dict[str, Any] = dict(first_k_dense_replace=1)
_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, head_dim=None, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=12,
)  # fmt: skip
_MAMBA: dict[str, Any] = dict(mamba_n_heads=4, mamba_d_state=8, mamba_chunk_size=8)
_LINEAR: dict[str, Any] = dict(
    layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip

# model_type -> how its tiny configuration differs from _SIZES; None stands for a field that must not be passed.
TINY: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS | _MIXED | dict(num_shared_experts=1),
    "apertus": {},
    "arcee": {},
    "aria_text": dict(moe_num_experts=4, moe_topk=2),
    "axk1": _ROUTED_EXPERTS | _LATENT,
    "bitnet": {},
    "codegen": dict(rotary_dim=4),
    "cohere": dict(logit_scale=1.0),
    "cohere2": _MIXED | dict(logit_scale=1.0),
    "cohere2_moe": _EXPERTS | _MIXED | dict(logit_scale=1.0),
    "cwm": _MIXED,
    "deepseek_v2": _ROUTED_EXPERTS | _LATENT | _DENSE_FIRST,
    "deepseek_v3": _ROUTED_EXPERTS | _LATENT | _DENSE_FIRST,
    "diffllama": {},
    "dots1": _ROUTED_EXPERTS | _MIXED | _DENSE_FIRST,
    "ernie4_5": {},
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1),
    "exaone4": _MIXED,
    "exaone_moe": _EXPERTS | _MIXED | _DENSE_FIRST,
    "falcon": dict(head_dim=None, ffn_hidden_size=48),
    "flex_olmo": _EXPERTS,
    "flint": _EXPERTS | _MIXED | dict(mlp_only_layers=[0]),
    "gemma": {},
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "glm": {},
    "glm4": {},
    "glm4_moe": _ROUTED_EXPERTS | _DENSE_FIRST,
    "glm4_moe_lite": _ROUTED_EXPERTS | _LATENT,
    "gpt2": dict(n_inner=48),
    "gpt_bigcode": dict(n_inner=48),
    "gpt_neo": dict(window_size=8, attention_types=("local", "global")),
    "gpt_neox": {},
    "gpt_neox_japanese": dict(intermediate_multiple_size=2),
    "gpt_oss": _LOCAL_EXPERTS | _MIXED,
    "gptj": dict(rotary_dim=4, n_inner=48),
    "granite": {},
    "granite_swa": _MIXED,
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoe_swa": _LOCAL_EXPERTS | _MIXED,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "hy_v3": _EXPERTS | dict(num_shared_experts=1),
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": dict(kv_channels=8, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2),
    "kolibri1": _EXPERTS | _MIXED,
    "laguna": _EXPERTS | _MIXED,
    "llama": {},
    "llama4_text": _LOCAL_EXPERTS | dict(
        intermediate_size_mlp=48, attention_chunk_size=8, layer_types=("chunked_attention", "full_attention")
    ),
    "mellum": _EXPERTS | _MIXED | dict(mlp_layer_types=("dense", "sparse")),
    "mimo_v2_flash": _ROUTED_EXPERTS | _MIXED | dict(v_head_dim=8),
    "minicpm3": _LATENT,
    "minimax_m2": _LOCAL_EXPERTS,
    "ministral": _MIXED,
    "ministral3": {},
    "mistral": _WINDOW,
    "mixtral": _LOCAL_EXPERTS | _WINDOW,
    "modernbert-decoder": dict(local_attention=16, layer_types=("sliding_attention", "full_attention")),
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": _EXPERTS,
    "persimmon": {},
    "phi": {},
    "phi3": _WINDOW,
    "phimoe": _LOCAL_EXPERTS | _WINDOW,
    "qwen2": _MIXED | dict(use_sliding_window=True),
    "qwen2_moe": _EXPERTS | _MIXED | dict(use_sliding_window=True),
    "qwen3": _MIXED | dict(use_sliding_window=True),
    "qwen3_moe": _EXPERTS | _WINDOW | dict(use_sliding_window=True),
    "seed_oss": {},
    "smollm3": _MIXED | dict(use_sliding_window=True),
    "solar_open": _ROUTED_EXPERTS,
    "stablelm": {},
    "starcoder2": _WINDOW,
    "vaultgemma": _MIXED,
    "youtu": _LATENT,
    "bamba": _MAMBA | dict(attn_layer_indices=[1, 3]),
    "bloom": {},
    "biogpt": {},
    "falcon_h1": _MAMBA | dict(mamba_d_ssm=32),
    "falcon_mamba": dict(state_size=8),
    "jamba": _EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "granitemoehybrid": _LOCAL_EXPERTS | _MAMBA | dict(layer_types=("linear_attention", "full_attention")),
    "lfm2": dict(layer_types=("conv", "full_attention")),
    "mamba": dict(state_size=8),
    "mamba2": dict(num_heads=8, state_size=8, n_groups=2, chunk_size=8),
    "minimax": _LOCAL_EXPERTS | dict(block_size=8),
    "mpt": {},
    "nemotron_h": _ROUTED_EXPERTS,
    "olmo_hybrid": _LINEAR,
    "opt": dict(word_embed_proj_dim=32, ffn_dim=48),
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _EXPERTS | _LINEAR,
    "recurrent_gemma": dict(attention_window_size=8),
    "rwkv": dict(context_length=256),
    "xglm": dict(ffn_dim=48),
    "zamba2": dict(n_mamba_heads=4, mamba_d_state=8, chunk_size=8, layers_block_type=("mamba", "hybrid")),
}

_SPREAD = 0.3


def config(family: str, **changes: Any) -> PreTrainedConfig:
    fields = {name: value for name, value in (_SIZES | TINY[family]).items() if value is not None} | changes
    layers = fields["num_hidden_layers"]
    for name, pattern in fields.items():
        if isinstance(pattern, tuple):
            fields[name] = [pattern[layer % len(pattern)] for layer in range(layers)]
    if family == "gpt_neo":
        fields["attention_types"] = [[fields["attention_types"], 1]]
    return AutoConfig.for_model(family, **fields)


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, _SPREAD)
    return model
