"""What would the target think next? A one-layer model over its hidden states, that says so without running it.

EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv 2401.15077), section 4.1: the embedding of a token
beside the hidden state before it, through one linear map and one decoder layer, gives about the hidden state behind the
token; the target's own output layer reads it. EAGLE-3 (arXiv 2503.01840) lets it read three of the target's layers and its
own outputs. The layer is transformers' Llama layer, whatever the target's family.

With ``lookback`` the layer's attention reads, beside what EAGLE's does, the embeddings of a token and of those before it: it
can find where the text was like this before and what followed there (:mod:`layerskip.heads.induction`), as EAGLE's hardly can,
whose hidden states say what comes next rather than which token they stand behind.

A head of three layers is simpler than EAGLE-3's as its authors published it: it feeds back what has passed its last norm,
theirs what has not; a linear map joins embedding and state as in EAGLE, where their layer's attention reads both side by
side, each normed; and the target's output layer reads the result, where theirs has a trained one of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaModel

from layerskip.config import ConfigError
from layerskip.heads.published_eagle import is_published, read_published
from layerskip.models.architecture import architecture
from layerskip.models.attention import PLAIN
from layerskip.models.cache import KVCache
from layerskip.models.packing import packed_like
from layerskip.models.target import Target
from layerskip.models.trained_module import load_head
from layerskip.rules import check_integer, check_number, check_type

KIND = "eagle"
_LATER = ("attention_bias", "lookback")  # fields that shapes did not have at first
MOST_BACK = 64  # tokens that a head may look back
_FAR = (
    1e9  # rotary base of heads that look back: most of their numbers hardly turn within a text, however far a match is
)


@dataclass(frozen=True)
class EagleShape:
    """What an EAGLE head is made from.

    Args:
        hidden: H, the width of the target's hidden states.
        intermediate: width of the layer's MLP.
        heads: attention heads.
        key_value_heads: of keys and values.
        head_dim: width of each.
        modules: names of the target's sub-modules that it reads; one gives H numbers, three are fused first.
        vocabulary: how many of the target's tokens it drafts from; None for all of them.
        bias: whether the linear map has one.
        rope_theta: base of the rotary positions.
        rms_norm_eps: of the layer's norms.
        attention_bias: whether queries, keys and values have one, as in heads that were published for Qwen2.
        lookback: how many tokens before each its attention knows by their embeddings, and with them that token itself; 0 for
            EAGLE's own attention, which knows only what the linear map makes.

    Raises:
        ConfigError: no layer can be made from it.
    """

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    modules: tuple[str, ...]
    vocabulary: int | None = None
    bias: bool = True
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    lookback: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "heads", "key_value_heads", "head_dim"):
            check_integer(name, getattr(self, name), 1)
        if self.hidden % self.heads or self.heads % self.key_value_heads or self.head_dim % 2:
            found = f"{self.heads} heads of {self.head_dim}, {self.key_value_heads} of keys and values"
            raise ConfigError(f"heads: {found}, do not divide {self.hidden} numbers")
        if not self.modules or not all(isinstance(name, str) for name in self.modules):
            raise ConfigError("modules: are not names of what it reads")
        if self.vocabulary is not None:
            check_integer("vocabulary", self.vocabulary, 1)
        check_integer("lookback", self.lookback, 0, MOST_BACK)
        for name in ("bias", "attention_bias"):
            check_type(name, getattr(self, name), bool)
        check_number("rope_theta", self.rope_theta, 1.0, 1e12)
        check_number("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)

    @classmethod
    def of(cls, target: Target, three_layers: bool = False, vocabulary: int | None = None, lookback: int = 0) -> EagleShape:
        """A head like one of the target's own layers."""
        config = target.model.config.get_text_config(decoder=True)
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        return cls(
            hidden,
            int(getattr(config, "intermediate_size", None) or 4 * hidden),
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or hidden // heads),
            read_modules(target, three_layers),
            vocabulary,
            rope_theta=_FAR if lookback else cls.rope_theta,
            lookback=lookback,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; without what heads did not have at first, so that theirs are the same."""
        return {name: value for name, value in asdict(self).items() if name not in _LATER or value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> EagleShape:
        """The shape that :meth:`to_dict` wrote, though JSON has lists for tuples."""
        return cls(**fields | {"modules": tuple(fields["modules"])})


def read_modules(target: Target, three_layers: bool = False) -> tuple[str, ...]:
    """The sub-modules that a head reads: the model without its output layer, or a low, a middle and a high layer."""
    if not three_layers:
        body = target.model.base_model_prefix
        # Llama 4's text model names a body that only its larger sibling, which sees images, has.
        return (body if hasattr(target.model, body) else architecture(target.model).path.rpartition(".")[0],)
    found, layers = architecture(target.model), target.layers
    chosen = (2, layers // 2, layers - 3) if layers >= 7 else (0, layers // 2, layers - 1)
    if not chosen[0] < chosen[1] < chosen[2]:
        raise ConfigError(f"three_layers: {target.name} has {layers} layers, of which no three lie apart")
    return tuple(f"{found.path}.{index}" for index in chosen)


class EagleHead(nn.Module):
    """The trained part.

    Args:
        shape: what it is made from.
        tokens: ``[v]`` int64, the target's tokens that it drafts from, in the order of its logits; None for all.
    """

    def __init__(self, shape: EagleShape, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.tokens: Tensor | None
        self.shape = shape
        width = len(shape.modules)
        config = LlamaConfig(
            vocab_size=1,  # embeddings are the target's
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=2**20,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=shape.rms_norm_eps,
            attention_bias=shape.attention_bias,
        )
        config._attn_implementation = PLAIN
        self.fuse = nn.Linear(width * shape.hidden, shape.hidden, bias=False) if width > 1 else nn.Identity()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=shape.bias)
        self.body = LlamaModel(config)
        # The published layer reads the linear map's output as it is, and gives what the output layer reads.
        layer: Any = self.body.layers[0]
        layer.self_attn.o_proj.bias = None  # Llama's has one with the others
        layer.input_layernorm = self._beside = _Beside()
        if shape.lookback:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.self_attn, name, _widened(getattr(layer.self_attn, name), (1 + shape.lookback) * shape.hidden))
        if width == 1:
            self.body.norm = nn.Identity()  # type: ignore[assignment]
        # It begins as its linear map alone, which can be fitted in closed form.
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
        """Hidden states behind some tokens.

        Args:
            embeddings: ``[B, n, (1 + lookback) * H]`` of the tokens and of those before each, see :meth:`look`.
            features: ``[B, n, H]`` before each: the target's, fused, or the head's own.
            cache: its keys and values of what comes before, written behind ``length``; None where that is all.
            positions: ``[B, n]`` int64, if not one behind the other.
            visible: ``[B, 1, n, keys]`` bool: what each sees, if not all before it.

        Returns:
            ``[B, n, H]``.
        """
        own = embeddings[..., : self.shape.hidden]
        self._beside.read = embeddings if self.shape.lookback else None
        try:
            found = self.body(
                inputs_embeds=self.fc(torch.cat((own, features), -1)),
                past_key_values=cache,
                position_ids=positions,
                attention_mask=visible,
                use_cache=cache is not None,
            )
        finally:
            self._beside.read = None
        return found.last_hidden_state  # type: ignore[no-any-return]

    def look(self, embedded: Tensor, count: int) -> Tensor:
        """The embeddings of some tokens, each beside those of the tokens before it.

        Args:
            embedded: ``[B, m, H]``, m at least ``count``: of tokens one behind the other, the last of which are meant.
            count: n, how many are.

        Returns:
            ``[B, n, (1 + lookback) * H]``; zeros stand for what comes before the first of the m.
        """
        back = self.shape.lookback
        embedded = pad(embedded, (0, 0, max(0, count + back - embedded.shape[1]), 0))
        end = embedded.shape[1]
        return torch.cat([embedded[:, end - step - count : end - step] for step in range(back + 1)], -1)

    def weights(self) -> dict[str, Tensor]:
        """Its own tensors, as they are saved."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("body.embed_tokens")}


class _Beside(nn.Module):
    """In the place of a norm that EAGLE's layer lacks: has attention read embeddings beside what the linear map made.

    Attributes:
        read: ``[B, n, E]``, during a pass; None for nothing.
    """

    read: Tensor | None = None

    def forward(self, made: Tensor) -> Tensor:
        """``[B, n, H]`` to ``[B, n, H + E]``."""
        return made if self.read is None else torch.cat((made, self.read.to(made.dtype)), -1)


def _widened(part: nn.Linear, more: int) -> nn.Linear:
    """The same function, of further inputs that count for nothing yet."""
    wide = nn.Linear(part.in_features + more, part.out_features, bias=part.bias is not None)
    wide.weight.data.zero_()[:, : part.in_features] = part.weight.data
    if part.bias is not None:
        wide.bias.data.copy_(part.bias.data)
    return wide


def load_eagle(folder: str | Path, target: Target) -> EagleHead:
    """A head for a target, in its dtype and on its device; one in its authors' published layout is taken as well.

    Raises:
        ConfigError: there is none, it is damaged, or it was made for another target.
    """
    folder = Path(folder)
    damaged = f"head: {folder} is damaged:"
    if is_published(folder):
        fields, weights = read_published(folder, target)
        fields |= {"modules": read_modules(target)}
    else:
        fields, weights = load_head(folder, KIND, target)
    try:
        shape = EagleShape.from_dict(fields)
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(f"{damaged} its shape: {error}") from error
    if shape.hidden != target.hidden:
        raise ConfigError(f"head: {folder} was made for another target: it reads {shape.hidden} numbers a token")
    if unread := set(shape.modules) - {name for name, _ in target.model.named_modules()}:
        raise ConfigError(f"{damaged} {target.name} has no {min(unread)} that it could read")
    head = EagleHead(shape, weights.pop("tokens", None))
    try:
        missing, unknown = head.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{damaged} {' '.join(str(error).split())[:200]}") from error
    lost = [name for name in missing if name not in ("tokens", "body.embed_tokens.weight")]
    if lost or unknown:
        raise ConfigError(f"{damaged} {', '.join([*lost, *unknown][:3])}")
    rotary: Any = head.body.rotary_emb
    frequencies = rotary.inv_freq.clone()
    head = head.to(target.device, target.model.dtype).eval()
    rotary.inv_freq = frequencies.to(target.device)  # positions turn by float32, as in training
    return packed_like(target.model, head)
