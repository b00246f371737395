"""EAGLE heads: a one-layer model that predicts the target's next hidden state from its previous ones.

EAGLE (arXiv 2401.15077), section 4.1: the embedding of a token and the hidden state before it pass through one linear map
and one decoder layer; the target's own output layer reads the result. The decoder layer is transformers' Llama layer,
whatever the target's family.

With ``lookback`` the attention also reads the embeddings of a token and of those before it. It can then find earlier places
where the text was the same, and copy what followed there (:mod:`layerskip.heads.induction`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaModel

from layerskip.config import ConfigError, check_integer, check_number
from layerskip.models.attention import PLAIN
from layerskip.models.cache import KVCache
from layerskip.models.target import Target


class AppendedEmbeddings(nn.Module):
    """A layer in place of the norm before attention, which appends embeddings ``[B, n, E]`` to the attention's input.

    The embeddings are set for one pass. Without them zeros are appended, to find out which maps read one input.
    """

    embeddings: Tensor | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[B, n, H + E]`` from ``[B, n, H]``."""
        if self.embeddings is None:
            return pad(hidden, (0, self.width))
        return torch.cat((hidden, self.embeddings.to(hidden.dtype)), -1)


MOST_BACK = 64  # the largest lookback, in tokens
# Rotary base of heads with lookback: most dimensions hardly rotate within a text, so that distant matches count, too.
_LOOKBACK_BASE = 1e9


@dataclass(frozen=True)
class EagleShape:
    """The architecture of an EAGLE head."""

    hidden: int  # H, the width of the target's hidden states
    intermediate: int  # width of the layer's MLP
    heads: int  # of its attention
    key_value_heads: int
    head_dim: int  # width of each head
    rope_theta: float  # base of the rotary positions
    vocabulary: int | None = None  # number of the target's tokens that it may draft; None for all
    # Number of tokens before each whose embeddings its attention reads, in addition to the token's own. 0 for EAGLE's own
    # attention, which reads only the output of the linear map.
    lookback: int = 0
    rms_norm_eps: float = 1e-5  # of the layer's norm
    bias: bool = False  # whether the linear map has one, as in some published heads
    attention_bias: bool = False  # whether queries, keys and values have one

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "heads", "key_value_heads", "head_dim"):
            check_integer(name, getattr(self, name), 1)
        if self.hidden % self.heads or self.heads % self.key_value_heads or self.head_dim % 2:
            sizes = f"{self.heads} heads of {self.head_dim}, {self.key_value_heads} of keys and values"
            raise ConfigError(f"heads: {sizes}, do not divide {self.hidden} elements")
        if self.vocabulary is not None:
            check_integer("vocabulary", self.vocabulary, 1)
        check_integer("lookback", self.lookback, 0, MOST_BACK)
        check_number("rope_theta", self.rope_theta, 1.0, 1e12)
        check_number("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)

    @classmethod
    def of(cls, target: Target, vocabulary: int | None = None, lookback: int = 0) -> EagleShape:
        """Return the shape of a head whose layer has the sizes of the target's own; see :class:`EagleShape`."""
        config = target.model.config.get_text_config(decoder=True)
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        return cls(
            hidden,
            int(getattr(config, "intermediate_size", None) or 4 * hidden),
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or hidden // heads),
            _LOOKBACK_BASE if lookback else 10_000.0,
            vocabulary,
            lookback,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_llama(self) -> dict[str, Any]:
        """Return the layer as fields of a Llama configuration."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": self.attention_bias,
        }


class EagleHead(nn.Module):
    """An EAGLE head; ``tokens`` are the target's tokens that it may draft, ``[v]`` int64, in the order of its logits."""

    def __init__(self, shape: EagleShape, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.tokens: Tensor | None
        self.shape = shape
        self.scales = 1.0, 1.0  # of the embeddings and of the hidden states; training divides them by others
        # The embeddings are the target's.
        config = LlamaConfig(
            **shape.to_llama(), vocab_size=1, bos_token_id=None, eos_token_id=None, max_position_embeddings=2**20
        )
        config._attn_implementation = PLAIN
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=shape.bias)
        self.body = LlamaModel(config)
        # EAGLE's published layer has no norm before its attention, and none after the layer.
        layer: Any = self.body.layers[0]
        layer.input_layernorm = nn.Identity()
        layer.self_attn.o_proj.bias = None  # with attention_bias Llama's has one
        self.body.norm = nn.Identity()  # type: ignore[assignment]
        if shape.lookback:
            read = (1 + shape.lookback) * shape.hidden
            layer.input_layernorm = AppendedEmbeddings(read)
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.self_attn, name, _widened(getattr(layer.self_attn, name), read))
        # Untrained, the head is its linear map alone, which can be fitted in closed form.
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        self.register_buffer("tokens", tokens)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Predict the hidden states at tokens, ``[B, n, H]``.

        Args:
            embeddings: ``[B, n, (1 + lookback) * H]``: of the tokens and those before each, see :meth:`with_lookback`.
            features: ``[B, n, H]``: the hidden state before each token, either the target's or the head's own.
            cache: keys and values of earlier tokens, extended after its ``length``; None if there are none.
            positions: ``[B, n]`` int64; None if consecutive.
            visible: ``[B, 1, n, keys]`` bool: the attention mask; None for causal attention.
        """
        joined = self.fc(torch.cat((embeddings[..., : self.shape.hidden], features), -1))
        layer: Any = self.body.layers[0]
        layer.input_layernorm.embeddings = embeddings if self.shape.lookback else None
        try:
            output = self.body(
                inputs_embeds=joined,
                past_key_values=cache,
                position_ids=positions,
                attention_mask=visible,
                use_cache=cache is not None,
            )
        finally:
            layer.input_layernorm.embeddings = None
        return output.last_hidden_state  # type: ignore[no-any-return]

    def with_lookback(self, embedded: Tensor, count: int) -> Tensor:
        """Concatenate the embeddings of the last ``count`` tokens with those of the tokens before each.

        From ``[B, m, H]`` of consecutive tokens, m >= n, to ``[B, n, (1 + lookback) * H]``, with zeros before the first.
        """
        back = self.shape.lookback
        embedded = pad(embedded, (0, 0, max(0, count + back - embedded.shape[1]), 0))
        end = embedded.shape[1]
        return torch.cat([embedded[:, end - step - count : end - step] for step in range(back + 1)], -1)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("body.embed_tokens")}


def _widened(part: nn.Linear, more: int) -> nn.Linear:
    """Return the linear map with further inputs, whose weights are zero."""
    wide = nn.Linear(part.in_features + more, part.out_features, bias=False)
    wide.weight.data.zero_()[:, : part.in_features] = part.weight.data
    return wide
