"""The forward pass on a :class:`~layerskip.models.cache.KVCache` that target, draft view and draft model share.

It writes keys and values after ``cache.length`` and does not change the length. Hidden states can be collected during a
pass; EAGLE calls them features (arXiv 2401.15077).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from layerskip.models.graph_capture import CapturingCache, padded_count
from layerskip.models.weights import is_split


class Features:
    """A collector of the outputs of some of a model's sub-modules, by their dotted names, in the last pass."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self.parts: tuple[Tensor, ...] = ()

    @contextlib.contextmanager
    def collect(self, model: nn.Module) -> Iterator[None]:
        """Collect from the passes of a model, or of a view of it, within the ``with`` block."""
        outputs: dict[str, Tensor] = {}

        def hook(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            outputs[name] = output if isinstance(output, Tensor) else output[0]

        named = {name: model.get_submodule(name) for name in self.modules}
        handles = [module.register_forward_hook(functools.partial(hook, name)) for name, module in named.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.parts = tuple(outputs[name] for name in self.modules)

    def read(self) -> Tensor:
        """Return the outputs of the last pass for each token, ``[n, F]``, concatenated over the modules."""
        return torch.cat([part[0] for part in self.parts], dim=-1)


NO_FEATURES = Features(())


def forward(
    model: nn.Module,
    tokens: Tensor,
    cache: Cache,
    last: int,
    positions: Tensor | None = None,
    features: Features = NO_FEATURES,
) -> Tensor:
    """Return the logits ``[last, V]``, in the model's dtype, of the last tokens of a block that starts at ``cache.length``.

    Args:
        model: a Hugging Face causal language model, or a view of one.
        tokens: ``[n]`` int64.
        cache: read up to ``length``, written after it.
        last: 0 to n.
        positions: ``[n]`` int64; None for consecutive positions from ``cache.length`` on.
        features: collected during this pass.
    """
    if positions is None and isinstance(cache, CapturingCache) and isinstance(model, PreTrainedModel):
        layer = model.get_output_embeddings()  # heads have none: their passes read more than tokens
        if isinstance(layer, nn.Linear) and cache.captures(model, tokens.shape[0]):
            return _captured_forward(model, tokens, cache, last, features)
    if not features.modules:
        return _forward(model, tokens, cache, last, positions)
    with features.collect(model):
        return _forward(model, tokens, cache, last, positions)


def _captured_forward(model: nn.Module, tokens: Tensor, cache: CapturingCache, last: int, features: Features) -> Tensor:
    size, wanted = tokens.shape[0], last
    wide = _chain_width(size)
    if wide == size or (cache.pads_chains and cache.captures(model, wide)):
        # Few widths are captured, so blocks are followed by copies of their first token, and all rows have logits.
        tokens = tokens if wide == size else torch.cat((tokens, tokens[:1].expand(wide - size)))
        last = min(last, 1) * wide

    def compute(block: Tensor) -> tuple[Tensor, ...]:
        with features.collect(model):
            logits = _forward(model, block, cache, last)
        return logits, *features.parts

    logits, *parts = cache.replay(model, (last, features.modules), (tokens,), compute)
    features.parts = tuple(part[..., :size, :] for part in parts)
    return logits if last == wanted else logits[size - wanted : size]


def _chain_width(size: int) -> int:
    return size if size <= 2 else 4 if size <= 4 else padded_count(size)


def _forward(model: nn.Module, tokens: Tensor, cache: Cache, last: int, positions: Tensor | None = None) -> Tensor:
    size = tokens.shape[0]
    options: dict[str, Any] = {}
    if last < size and _has_logits_to_keep(type(model)):  # type: ignore[arg-type]
        # An int becomes a slice, for which torch copies the whole output layer where that needs no gradient.
        # The output layer of a split model is elsewhere, and indices on the CPU fit everywhere.
        options["logits_to_keep"] = torch.arange(size - last, size, device="cpu" if is_split(model) else tokens.device)
    if positions is not None:
        options["position_ids"] = positions[None]
    output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, return_dict=True, **options)
    logits: Tensor = output.logits
    return logits[0, logits.shape[1] - last :]


def clamp_tokens(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Clamp token ids ``[n]`` to the model's embeddings; a tokenizer may have more tokens than a draft model has rows."""
    return tokens.clamp_max(model.get_input_embeddings().weight.size(0) - 1)  # type: ignore[operator]


@functools.cache
def _has_logits_to_keep(model: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
