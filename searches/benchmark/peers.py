"""Rows of a benchmark beside ours: decoding methods of transformers' ``generate``.

Parameters that transformers adapts by itself are pinned, unless the benchmark asks for its defaults. The number of drafted
tokens, its schedule and the confidence threshold are part of the *assistant's* generation configuration, and the threshold
adapts if scikit-learn is installed.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import utils as generation

from layerskip import DecodeStats, Round, Target, UnsupportedModel
from layerskip.decoding.decode import DecodeResult
from layerskip.engines.deployment import hugging_face_fields
from layerskip.measure.measure import Task
from layerskip.models.loading import DTYPES, load_draft, load_target
from searches.app.checks import check_list

# Earlier releases (5.17, but not 5.23) also call stopping criteria on every draft. A release without this private function
# is a later one.
_verify = getattr(generation, "_speculative_sampling", None)
_CALLS_ON_DRAFTS = _verify is not None and "is_done_candidate" in inspect.signature(_verify).parameters
_METHODS = ("plain", "static", "prompt_lookup", "early_exit", "assistant", "universal")


@dataclass(eq=False)
class Peer:
    """One decoding method of transformers.

    It is ``plain``, ``static`` (``cache_implementation="static"``, which compiles the passes on CUDA), ``prompt_lookup``
    (``prompt_lookup_num_tokens``), ``early_exit`` (``assistant_early_exit``), ``assistant`` (``assistant_model``) or
    ``universal`` (the same with two tokenizers).

    Raises:
        InputError: the method is unknown.
        UnsupportedModel: transformers does not accept the draft model.
    """

    target: Target
    method: str
    num_speculative_tokens: int | None = None  # tokens drafted per round; None keeps transformers' default
    prompt_lookup_max: int = 3
    exit_layer: int | None = None  # number of layers that the draft of ``early_exit`` keeps; None for half of them
    draft_model: str = ""  # of ``assistant`` and ``universal``
    confidence: float | None = 0.0  # confidence below which drafting stops; 0 never stops; None keeps transformers' default
    dtype: str | None = None  # of the weights that it decodes with, loaded once more; None for the target's

    def __post_init__(self) -> None:
        check_list("method", [self.method], _METHODS)
        check_list("dtype", [self.dtype or self.target.dtype], tuple(DTYPES))
        if self.dtype not in (None, self.target.dtype):
            self.target = load_target(self.target.name, self.target.revision, str(self.dtype), str(self.target.device))
        if self.method == "universal":
            draft = load_draft(self.target, self.draft_model, same_tokenizer=False).model
            sizes = {model.config.get_text_config(decoder=True).vocab_size for model in (self.target.model, draft)}
            if len(sizes) == 1:
                reason = "its vocabulary is as large as the target's, which transformers takes for the same tokenizer"
                raise UnsupportedModel(f"draft_model: {self.draft_model}: {reason}")

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        """Generate, and record the length of the output after every round."""
        model = self.target.model
        inputs: Any = torch.tensor([list(prompt)], device=self.target.device)
        recorder = _RoundRecorder(len(prompt), on_prefill, _CALLS_ON_DRAFTS and self.method not in ("plain", "static"))
        options = self._options()
        torch.manual_seed(task.seed)
        with self._pinned(options.get("assistant_model", model)):
            output: Any = model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=task.max_new_tokens,
                stopping_criteria=StoppingCriteriaList([recorder]),
                **hugging_face_fields(task.sampling),
                **options,
            )
        tokens = output[0, len(prompt) :].tolist()
        return DecodeResult(tokens, DecodeStats(tuple(recorder.rounds())), "")

    def _options(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` for this method."""
        if self.method == "plain":
            return {}
        if self.method == "static":
            return {"cache_implementation": "static"}
        if self.method == "prompt_lookup":
            length = self.num_speculative_tokens or 10
            return {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": self.prompt_lookup_max}
        if self.method == "early_exit":
            return {"assistant_early_exit": self.exit_layer or self.target.layers // 2}
        assistant = load_draft(self.target, self.draft_model, self.method == "assistant")
        tokenizers = {"tokenizer": self.target.tokenizer, "assistant_tokenizer": assistant.tokenizer}
        return {"assistant_model": assistant.model} | (tokenizers if self.method == "universal" else {})

    @contextlib.contextmanager
    def _pinned(self, drafting: PreTrainedModel) -> Iterator[None]:
        """Pin what transformers would adapt, in the generation configuration of the model that drafts."""
        config = drafting.generation_config
        assert isinstance(config, GenerationConfig)
        values = {
            "num_assistant_tokens_schedule": "constant",
            "num_assistant_tokens": self.num_speculative_tokens,
            "assistant_confidence_threshold": self.confidence,
        }
        values = {name: value for name, value in values.items() if value is not None}
        before = {name: getattr(config, name, None) for name in values}
        vars(config).update(values)
        try:
            yield
        finally:
            vars(config).update(before)


class _RoundRecorder(StoppingCriteria):
    """Stopping criterion that records the length after prefill and after every round, and never stops.

    ``on_drafts`` says whether transformers also calls it on every draft, before verification.
    """

    def __init__(self, prompt_length: int, on_prefill: Callable[[int], None], on_drafts: bool) -> None:
        self._lengths = [prompt_length]
        self._on_prefill, self._on_drafts, self._drafted = on_prefill, on_drafts, False

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        self._drafted = self._on_drafts and not self._drafted
        if not self._drafted:
            if len(self._lengths) == 1:
                self._on_prefill(input_ids.shape[1] - self._lengths[0])
            self._lengths.append(input_ids.shape[1])
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    def rounds(self) -> list[Round]:
        """Return the committed tokens of every round. The number of drafted tokens is unknown."""
        return [Round(0, 0, after - before) for before, after in itertools.pairwise(self._lengths[1:])]
