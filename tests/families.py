"""Tiny random causal language models of many Hugging Face families.

In ``SKIPPABLE`` families, each block adds the outputs of its attention and MLP children to the residual stream. The cache
holds only keys and values. ``REFUSED`` families do not fulfil one of these conditions; the value is the reason. Families
unknown to the installed transformers are left out of both.

Tokens 0, 1 and 2 are padding, end and start. ``generate`` masks token 0 in prompts; a plain forward pass does not.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.accelerator import DEVICE
from tests.exhaustive import representative

# Every family uses the fields that it has. Embeddings are untied, because a tied random model tends to repeat its last
# token, whatever its layers do.
_SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=256,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    tie_word_embeddings=False, dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, residual_dropout=0.0,
    resid_dropout=0.0, embed_dropout=0.0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    attention_multiplier=0.35,
)  # fmt: skip

_Fields = dict[str, Any]
# A tuple is a pattern that repeats over all layers.
_MIXED: _Fields = dict(sliding_window=8, layer_types=("sliding_attention", "full_attention"))
_QWEN: _Fields = _MIXED | dict(use_sliding_window=True)
_WINDOW: _Fields = dict(sliding_window=8)
_LOCAL: _Fields = dict(num_local_experts=4, num_experts_per_tok=2)
_EXPERTS: _Fields = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
_ROUTED: _Fields = dict(
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24,
    n_group=1, topk_group=1,
)  # fmt: skip
_DENSE_FIRST: _Fields = dict(first_k_dense_replace=1)
_LATENT: _Fields = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=12,
)  # fmt: skip


def _same_fields(families: str, fields: _Fields) -> dict[str, _Fields]:
    return dict.fromkeys(families.split(), fields)


_PLAIN = """
    apertus arcee bitnet diffllama ernie4_5 gemma glm glm4 gpt_neox granite helium hunyuan_v1_dense
    hyperclovax jais2 llama ministral3 nanochat nemotron olmo olmo2 persimmon phi seed_oss stablelm
"""

# Changes of each family's tiny configuration to _SIZES; None drops a field.
TINY: dict[str, _Fields] = {
    **_same_fields(_PLAIN, {}),
    **_same_fields("mistral phi3 starcoder2", _WINDOW),
    **_same_fields("cwm exaone4 gemma2 gemma3_text granite_swa ministral olmo3 vaultgemma", _MIXED),
    **_same_fields("qwen2 qwen3 smollm3", _QWEN),
    **_same_fields("flex_olmo olmoe", _EXPERTS),
    **_same_fields("granitemoe minimax_m2", _LOCAL),
    **_same_fields("mixtral phimoe", _LOCAL | _WINDOW),
    **_same_fields("gpt_oss granitemoe_swa", _LOCAL | _MIXED),
    **_same_fields("deepseek_v2 deepseek_v3", _ROUTED | _LATENT | _DENSE_FIRST),
    **_same_fields("axk1 glm4_moe_lite", _ROUTED | _LATENT),
    "afmoe": _EXPERTS | _MIXED | dict(num_shared_experts=1),
    "aria_text": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "codegen": dict(rotary_dim=4, n_inner=48),
    "cohere": dict(logit_scale=1.0),
    "cohere2": _MIXED | dict(logit_scale=1.0),
    "cohere2_moe": _EXPERTS | _MIXED | dict(logit_scale=1.0),
    "dots1": _ROUTED | _MIXED | _DENSE_FIRST,
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1),
    "exaone_moe": _EXPERTS | _MIXED | _DENSE_FIRST,
    "falcon": dict(head_dim=None, ffn_hidden_size=48),
    "flint": _EXPERTS | _MIXED | dict(mlp_only_layers=[0]),
    "glm4_moe": _ROUTED | _DENSE_FIRST,
    "gpt2": dict(n_inner=48),
    "gpt_bigcode": dict(n_inner=48),
    "gpt_neo": dict(window_size=8, attention_types=("local", "global")),
    "gptj": dict(rotary_dim=4, n_inner=48),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "hy_v3": _EXPERTS | dict(num_shared_experts=1),
    "jetmoe": _LOCAL | dict(kv_channels=8),
    "kolibri1": _EXPERTS | _MIXED,
    "laguna": _EXPERTS | _MIXED,
    "llama4_text": _LOCAL
    | dict(
        attention_chunk_size=8,
        layer_types=("chunked_attention", "full_attention"),
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
    ),
    "mellum": _EXPERTS | _MIXED | dict(mlp_layer_types=("dense", "sparse")),
    "mimo_v2_flash": _ROUTED | _MIXED | dict(v_head_dim=8),
    "minicpm3": _LATENT | dict(dim_model_base=32),
    "modernbert-decoder": dict(local_attention=16, layer_types=("sliding_attention", "full_attention")),
    "qwen2_moe": _EXPERTS | _QWEN,
    "qwen3_moe": _EXPERTS | _WINDOW | dict(use_sliding_window=True),
    "solar_open": _ROUTED,
    "youtu": _LATENT,
    # The families in REFUSED follow.
    **_same_fields("biogpt bloom mpt rwkv", {}),
    "bamba": dict(mamba_n_heads=4, mamba_d_state=8, mamba_chunk_size=8, attn_layer_indices=[1, 3]),
    "jamba": _EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "lfm2": dict(layer_types=("conv", "full_attention"), block_auto_adjust_ff_dim=False),
    "mamba": dict(state_size=8),
    "opt": dict(word_embed_proj_dim=32, ffn_dim=48),
    "qwen3_next": _EXPERTS
    | dict(layer_types=("linear_attention", "full_attention"), linear_num_key_heads=2, linear_num_value_heads=4)
    | dict(linear_key_head_dim=8, linear_value_head_dim=8),
    "recurrent_gemma": dict(attention_window_size=8),
    "xglm": dict(ffn_dim=48),
}

_STATEFUL = ("bamba", "jamba", "lfm2", "mamba", "qwen3_next", "recurrent_gemma", "rwkv")
_REASONS = {
    **dict.fromkeys(_STATEFUL, "recurrent state cannot rewind"),
    **dict.fromkeys(("bloom", "mpt"), "the residual is added inside the sub-layer"),
    **dict.fromkeys(("biogpt", "opt", "xglm"), "no child of a block is the MLP"),
}
REFUSED: dict[str, str] = {family: reason for family, reason in _REASONS.items() if family in CONFIG_MAPPING}
SKIPPABLE: tuple[str, ...] = tuple(sorted(family for family in TINY if family in CONFIG_MAPPING and family not in _REASONS))

# Families whose attention, MLP, norms, positions or windows differ.
_DISTINCT = (
    "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granitemoe", "llama", "llama4_text", "minicpm3", "mixtral",
    "olmo2", "persimmon", "phi", "phi3", "qwen2_moe", "qwen3", "smollm3", "stablelm",
)  # fmt: skip
REPRESENTATIVE: tuple[str, ...] = tuple(
    representative(
        [family for family in SKIPPABLE if family in _DISTINCT], [family for family in SKIPPABLE if family not in _DISTINCT]
    )
)
"""The families of tests that repeat what others check: all of them in ``make lossless`` only."""

# With these standard deviations no part dominates: greedy output varies, and every skip changes it.
_MATRIX_SPREAD = 0.4
_VECTOR_SPREAD = 0.1


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of ``family`` with ``changes`` to its fields; tuples repeat over layers."""
    # A field that a family does not use, such as num_key_value_heads in GPT-2, would mislead code that reads it.
    known = CONFIG_MAPPING[family]()
    fields = {name: value for name, value in _SIZES.items() if hasattr(known, name)} | TINY[family]
    fields = {name: value for name, value in fields.items() if value is not None} | changes
    layers = fields["num_hidden_layers"]
    for name, pattern in fields.items():
        if isinstance(pattern, tuple):
            fields[name] = [pattern[layer % len(pattern)] for layer in range(layers)]
    if family == "gpt_neo":
        fields["attention_types"] = [[fields["attention_types"], 1]]  # a list and its number of repetitions
    made = AutoConfig.for_model(family, **fields)
    made.eos_token_id = fields["eos_token_id"]  # some families replace None by ids that the small vocabulary lacks
    return made


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of ``family`` in evaluation mode; ``changes`` are passed to :func:`config`."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    model.eval()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Small embeddings, so that the layers matter. Non-zero biases, so that a skip that leaves a bias is detected.
            if id(parameter) in embeddings or (parameter.dim() == 1 and name.endswith("bias")):
                parameter.normal_(0.0, _VECTOR_SPREAD)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, _MATRIX_SPREAD)
    return model.to(DEVICE)  # type: ignore[arg-type]
