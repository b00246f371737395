"""OpenVINO GenAI on a CPU, with its attention cache in the model's precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

LOADS = "folder"
_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def conversion(python: str, saved: str, dtype: str) -> list[str]:
    """Return the command that converts a saved model, whose last word is the new folder."""
    precision = "fp16" if dtype == "float16" else "fp32"  # which contains bfloat16
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", saved]
    return [*command, "--task", "text-generation-with-past", "--weight-format", precision]


def command(settings: Mapping[str, Any]) -> str:
    """Return the expression that decodes so."""
    drafting, how, lengths = settings["speculative_config"], "", ""
    options = ", ".join(f"{name}={kind!r}" for name, kind in _precision(settings).items())
    if drafting:
        lengths = f", num_assistant_tokens={drafting['num_speculative_tokens']}"
        if drafting["method"] == "ngram":
            how, lengths = "prompt_lookup=True, ", f"{lengths}, max_ngram_size={drafting['prompt_lookup_max']}"
        else:
            how = f"draft_model=openvino_genai.draft_model({drafting['model']!r}, 'CPU', {options}), "
    pipeline = f"LLMPipeline({settings['model']!r}, 'CPU', {how}{options})"
    return f"openvino_genai.{pipeline}.generate(prompt, max_new_tokens=n{lengths})"


def _precision(settings: Mapping[str, Any]) -> dict[str, str]:
    kind = _KINDS[settings["dtype"]]
    return {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}


class Engine:
    """A pipeline for one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._genai, self._openvino = openvino_genai, openvino
        precision = _precision(settings)
        options = precision | {"INFERENCE_NUM_THREADS": settings["threads"]}
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = False  # every prompt is read whole, as the others read it
        drafting: dict[str, Any] = {"scheduler_config": schedule}
        self._lengths: dict[str, int] = {}
        if speculative := settings["speculative_config"]:
            self._lengths["num_assistant_tokens"] = speculative["num_speculative_tokens"]
            if speculative["method"] == "ngram":
                drafting["prompt_lookup"] = True
                self._lengths["max_ngram_size"] = speculative["prompt_lookup_max"]
            else:
                drafting["draft_model"] = openvino_genai.draft_model(speculative["model"], "CPU", **options)
        self._pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", **drafting, **options)
        self.version = str(openvino_genai.__version__)
        # The pipeline does not show its model. Without AVX-512, a request for bfloat16 becomes float32.
        model = openvino.Core().compile_model(os.path.join(settings["model"], "openvino_model.xml"), "CPU", options)
        self.precision = {name: str(model.get_property(name)) for name in precision}

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
