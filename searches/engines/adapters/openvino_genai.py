"""OpenVINO GenAI on a CPU, with its attention cache in the model's precision."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

LOADS = "folder"
_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def conversion(python: str, saved: str, dtype: str) -> list[str]:
    """Return the command that converts a saved model, without the new folder."""
    precision = "fp16" if dtype == "float16" else "fp32"  # which contains bfloat16
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", saved]
    return [*command, "--task", "text-generation-with-past", "--weight-format", precision]


def command(settings: Mapping[str, Any]) -> str:
    """Return the command that continues a text so."""
    lines = ["import openvino_genai", *_statements(settings)]
    lines.append("print(pipeline.generate('Why is the sky blue?', max_new_tokens=64, **lengths))")
    return shlex.join([settings["python"], "-c", "; ".join(lines)])


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of the compiled model, which keep the attention cache in the model's precision."""
    kind = _KINDS[settings["dtype"]]
    precision = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    return precision | {"INFERENCE_NUM_THREADS": settings["threads"]}


def _statements(settings: Mapping[str, Any]) -> list[str]:
    """Return the statements that make ``pipeline`` and ``lengths``, by which the engine and the command load the same."""
    drafting, lengths, options = settings["speculative_config"], dict[str, int](), _options(settings)
    given = f"**{options!r}"
    # Every prompt is read whole, as the others read it.
    found = ["schedule = openvino_genai.SchedulerConfig()", "schedule.enable_prefix_caching = False"]
    if drafting:
        lengths["num_assistant_tokens"] = drafting["num_speculative_tokens"]
        if drafting["method"] == "ngram":
            given, lengths["max_ngram_size"] = f"prompt_lookup=True, {given}", drafting["prompt_lookup_max"]
        else:
            found.append(f"draft = openvino_genai.draft_model({drafting['model']!r}, 'CPU', **{options!r})")
            given = f"draft_model=draft, {given}"
    found.append(f"lengths = {lengths!r}")
    loaded = f"openvino_genai.LLMPipeline({settings['model']!r}, 'CPU', scheduler_config=schedule, {given})"
    return [*found, f"pipeline = {loaded}"]


class Engine:
    """A pipeline for one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._genai, self._openvino = openvino_genai, openvino
        made: dict[str, Any] = {"openvino_genai": openvino_genai}
        exec("\n".join(_statements(settings)), made)
        self._pipeline, self._lengths = made["pipeline"], made["lengths"]
        self.version = str(openvino_genai.__version__)
        # The pipeline does not show its model. Without AVX-512, a request for bfloat16 becomes float32.
        model = openvino.Core().compile_model(
            os.path.join(settings["model"], "openvino_model.xml"), "CPU", _options(settings)
        )
        self.precision = {name: str(model.get_property(name)) for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")}

    def decode(self, request: dict[str, Any], on_round: Callable[[int], None]) -> list[int]:
        """Return the continuation of ``tokens``."""
        import numpy

        running = self._genai.StreamingStatus.RUNNING

        class Streamer(self._genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: Any) -> Any:
                on_round(len(token) if isinstance(token, (list, tuple)) else 1)
                return running

            def end(self) -> None:
                pass

        config = self._genai.GenerationConfig(max_new_tokens=request["max_new_tokens"], **self._lengths)
        config.do_sample, config.apply_chat_template = False, False
        config.repetition_penalty = request["repetition_penalty"]
        config.stop_token_ids = set(request["eos"])
        tokens = self._openvino.Tensor(numpy.array([request["tokens"]], dtype=numpy.int64))
        return list(self._pipeline.generate(tokens, config, Streamer()).tokens[0])
