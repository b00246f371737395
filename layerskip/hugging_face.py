"""Speculative decoding inside Hugging Face's ``model.generate``, through its ``custom_generate`` argument."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
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
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.registry import build_drafter
from layerskip.models.cache_pool import generation_lock
from layerskip.models.target import Target

_PROCESSORS: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""Supported logits processors in the order in which generate applies them: the field of ``Sampling``, and the attribute."""
_TRUNCATING = (TopPLogitsWarper, MinPLogitsWarper)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
"""Modes whose output is that of choosing token after token."""

_SUPPORTED_KWARGS = ("attention_mask", "past_key_values", "position_ids", "use_cache", "logits_to_keep", "cache_position")
"""Arguments that ``generate`` may pass with the tokens; any other could change the output unnoticed."""


def custom_generate(
    config: SpeculativeConfig,
    check: Callable[[Target], None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """Make a decoding method for ``model.generate(**inputs, custom_generate=...)``.

    The method uses generate's own sampling parameters, lengths and stopping criteria, and returns what generate returns. It
    raises ``ValueError`` with the name of any unsupported argument: batches, padding, beams, and logits processors other
    than temperature, top-k, top-p, min-p and repetition penalty. Drafters are kept per model, so adaptive thresholds and
    learned drafts carry over from call to call. ``streamer=`` works as without the method, and ``callback=f`` gives ``f``
    the tokens of every round. Transformers refuses ``stop_strings=`` beside custom methods;
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]`` does the same.

    Args:
        check: called with the target; raises an error if the configuration is not for it.
        tokenizer: the target's tokenizer, which draft models with another tokenizer need; transformers does not pass its own
            to custom methods.
    """
    drafters: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Drafter]] = weakref.WeakKeyDictionary()

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
        streamer = _find_streamer()

        def on_round(tokens: list[int]) -> None:
            if callback is not None:
                callback(tokens)
            for token in tokens if streamer is not None else ():
                streamer.put(torch.tensor([token]))  # one by one, as generate does

        target = Target(model, tokenizer)
        if generation_config.eos_token_id is not None:
            target.check_ends(generation_config.eos_token_id, "generation_config.eos_token_id")
        state = model.device, model.dtype
        with generation_lock(model):
            if model not in drafters or drafters[model][0] != state:
                if check is not None:
                    check(target)
                with torch.random.fork_rng([]):  # initial weights, replaced by trained ones, must not use up random numbers
                    drafters[model] = state, build_drafter(config, target)
            _, drafter = drafters[model]
        # The caller's own criterion replaces generate's length of prompt and output together.
        lengths = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
        continuation = decode(
            target,
            drafter,
            target.encode(input_ids[0].tolist(), "input_ids"),
            _sampling(logits_processor, bool(generation_config.do_sample)),
            max(1, min(lengths, default=generation_config.max_length) - input_ids.shape[1]),
            stops=_stops(stopping_criteria, input_ids.device),
            callback=on_round,
        )
        if streamer is not None:
            streamer.end()
        new: Any = torch.tensor([continuation.tokens], dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat((input_ids, new), dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # wants LongTensor
        return sequences

    return method


def _find_streamer() -> Any:
    """Return the ``streamer`` of the running call of ``generate`` from its frame; None without one.

    Transformers passes it to no custom method, but puts the prompt into it and leaves its reader waiting.
    """
    frame, code = inspect.currentframe(), inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def _refuse(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: a batch of {input_ids.shape[0]}; only one sequence is supported")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask: has padding, which is not supported")
    for name, value in model_kwargs.items():
        if name not in _SUPPORTED_KWARGS and value is not None:
            raise ValueError(f"{name}: is not supported by speculative decoding")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values: a filled cache is not supported")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions[0].tolist() != list(range(input_ids.shape[1])):
        raise ValueError("position_ids: positions other than 0, 1, 2, ... are not supported")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise ValueError(f"{name}: is not available in speculative decoding")
    if (mode := generation_config.get_generation_mode()) not in _MODES:
        raise ValueError(f"generation_config: {mode.value} is not supported")
    if generation_config.cache_implementation == "quantized":
        raise ValueError("cache_implementation: a quantized cache is not supported")


def _sampling(processors: LogitsProcessorList, sampled: bool) -> Sampling:
    fields: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
    previous = -1
    for processor in processors:
        kind = type(processor)
        if kind not in _PROCESSORS or getattr(processor, "prompt_ignore_length", None):
            raise ValueError(f"logits_processor: {kind.__name__} is not supported")
        if kind in _TRUNCATING and (processor.min_tokens_to_keep, processor.filter_value) != (1, -math.inf):
            raise ValueError(
                f"logits_processor: {kind.__name__} with other min_tokens_to_keep or filter_value is not supported"
            )
        if (index := list(_PROCESSORS).index(kind)) <= previous:
            raise ValueError(f"logits_processor: {kind.__name__} appears twice or in another order than generate's own")
        previous, (name, attribute) = index, _PROCESSORS[kind]
        if sampled or name == "repetition_penalty":
            fields[name] = getattr(processor, attribute)
    return Sampling(**fields)


def _stops(criteria: StoppingCriteriaList, device: torch.device) -> Stops:
    """Return the stopping criteria other than that of length."""
    eos_ids = frozenset(token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist())
    others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]

    def criterion(tokens: list[int]) -> bool:
        sequence = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(other(sequence, None)).all()) for other in others)

    return Stops(eos_ids, criterion if others else None)
