"""How does a configuration decode inside Hugging Face's own ``model.generate``? As its ``custom_generate``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.registry import build_drafter
from layerskip.models.cache_pool import one_at_a_time
from layerskip.models.target import Target

_READERS: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""Per logits processor, in the order in which they apply: our field, and its attribute."""
_CUTS = (TopPLogitsWarper, MinPLogitsWarper)

_UNDERSTOOD = ("attention_mask", "past_key_values", "position_ids", "use_cache", "logits_to_keep", "cache_position")
"""What ``generate`` may hand on beside the tokens; everything else would change the output unseen."""


def custom_generate(
    config: SpeculativeConfig,
    check: Callable[[Target], None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """A decoding method for ``model.generate(**inputs, custom_generate=...)``.

    It reads generate's own sampling parameters, lengths and stopping criteria, and returns what generate returns.
    Drafters are kept per model, so an adaptive threshold and what token recycling has learnt carry on from call to call.
    ``model.generate(..., callback=f)`` streams committed tokens to ``f``; transformers keeps its own ``streamer`` from
    methods like this one.

    Args:
        config: how to decode.
        check: raises where a model is not the one that the configuration is for.
        tokenizer: the target's, which drafts of another one ask for; generate keeps its own from methods like this one.

    Returns:
        The method. It raises ValueError, naming what it is, for what speculative decoding here does not do: batches,
        padding, beams, and logits processors beyond temperature, top-k, top-p, min-p and repetition penalty.
    """
    known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Drafter]] = weakref.WeakKeyDictionary()

    def method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        callback: Callable[[list[int]], None] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        _refuse(input_ids, generation_config, model_kwargs)
        target = Target(model, tokenizer)
        place = model.device, model.dtype
        with one_at_a_time(model):
            if model not in known or known[model][0] != place:
                if check is not None:
                    check(target)
                with torch.random.fork_rng([]):  # new modules draw weights, in whose place the trained ones come
                    known[model] = place, build_drafter(config, target)
            _, drafter = known[model]
        continuation = decode(
            target,
            drafter,
            input_ids[0].tolist(),
            _sampling(logits_processor, bool(generation_config.do_sample)),
            max(1, _length(stopping_criteria, generation_config.max_length) - input_ids.shape[1]),
            stops=_stops(stopping_criteria, input_ids.device),
            callback=callback,
            eos_ids=_eos_ids(stopping_criteria),
            accept=config.accept,
        )
        new: Any = torch.tensor([continuation.tokens], dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat((input_ids, new), dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # wants LongTensor
        return sequences

    return method


def _refuse(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: a batch of {input_ids.shape[0]}; one sequence at a time")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask: has padding; give one sequence without any")
    for name, value in model_kwargs.items():
        if name not in _UNDERSTOOD and value is not None:
            raise ValueError(f"{name}: is not understood by speculative decoding here")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values: a cache that is filled already; the loop keeps its own")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions[0].tolist() != list(range(input_ids.shape[1])):
        raise ValueError("position_ids: other positions than 0, 1, 2, ...")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise ValueError(f"{name}: is not kept by speculative decoding here")
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(f"num_beams: {generation_config.num_beams}; only 1 is decoded speculatively")


def _sampling(processors: LogitsProcessorList, sampled: bool) -> Sampling:
    fields: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
    before = -1
    for processor in processors:
        kind = type(processor)
        if kind not in _READERS or getattr(processor, "prompt_ignore_length", None):
            raise ValueError(f"logits_processor: {kind.__name__} is not one that drafting can follow")
        if kind in _CUTS and (processor.min_tokens_to_keep, processor.filter_value) != (1, -math.inf):
            raise ValueError(f"logits_processor: {kind.__name__} with other settings than how much it keeps")
        if (turn := list(_READERS).index(kind)) <= before:
            raise ValueError(f"logits_processor: {kind.__name__} comes twice, or in another order than generate's own")
        before, (name, attribute) = turn, _READERS[kind]
        if sampled or name == "repetition_penalty":
            fields[name] = getattr(processor, attribute)
    return Sampling(**fields)


def _stops(criteria: StoppingCriteriaList, device: torch.device) -> Callable[[list[int]], bool] | None:
    """The criteria that the loop does not know itself; it knows lengths and ends of sequence."""
    others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    if not others:
        return None

    def stops(tokens: list[int]) -> bool:
        sequence = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(criterion(sequence, None)).all()) for criterion in others)

    return stops


def _length(criteria: StoppingCriteriaList, otherwise: int) -> int:
    """Prompt and output together; the caller's own criterion takes the place of generate's."""
    return min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=otherwise)


def _eos_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    return frozenset(token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist())
