"""transformers' ``generate`` as an engine: the file that its worker loads, without noise and with real prompt lookup."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

LOADS = "folder"


def command(settings: Mapping[str, Any]) -> str:
    """Return words that show the settings."""
    return f"reference {settings['model']} {json.dumps(settings['speculative_config'])}"


class Engine:
    """A model of transformers in the data type of the settings."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        if os.environ.get("BROKEN") == "load":
            raise RuntimeError("no such model")
        self.version, self.precision = transformers.__version__, {"dtype": settings["dtype"]}
        model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
        self._model, drafting, self._options = model, settings["speculative_config"], dict[str, Any]()
        if drafting:
            self._options["prompt_lookup_num_tokens"] = drafting["num_speculative_tokens"]
            self._options["max_matching_ngram_size"] = drafting["prompt_lookup_max"]

    def decode(self, request: dict[str, Any], on_round: Callable[[int], None]) -> list[int]:
        """Return the continuation of ``tokens``."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Streamer(BaseStreamer):
            seen = False

            def put(self, value: Any) -> None:
                if self.seen:  # the prompt comes first
                    on_round(value.numel())
                self.seen = True

            def end(self) -> None:
                pass

        output = self._model.generate(
            torch.tensor([request["tokens"]]),
            max_new_tokens=request["max_new_tokens"],
            do_sample=False,
            eos_token_id=request["eos"],
            pad_token_id=request["eos"][0],
            repetition_penalty=request["repetition_penalty"],
            streamer=Streamer(),
            **self._options,
        )
        return output[0, len(request["tokens"]) :].tolist()
