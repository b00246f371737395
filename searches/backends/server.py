"""Any server with OpenAI's interface as the engine that a study measures, started by a command with places for drafting."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from layerskip import SpeculativeConfig
from searches.app.checks import InputError
from searches.backends.served import ServedBackend
from searches.backends.vllm import refusal, vllm_config

_SPECULATIVE = "speculative_config"
_PLACES = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "draft_model", "head", _SPECULATIVE)
_NEEDED = {"prompt_lookup": "num_speculative_tokens", "draft_model": "draft_model", "eagle": "head"}
"""The place without which a command cannot draft with a method."""


@dataclass(eq=False)
class ServerBackend(ServedBackend):
    """A back end that measures any server.

    Args:
        command: starts a server. ``{port}`` is replaced in it, and ``{speculative_config}`` by vLLM's JSON for a
            configuration, or ``{num_speculative_tokens}``, ``{prompt_lookup_min}``, ``{prompt_lookup_max}``,
            ``{draft_model}`` and ``{head}`` by its fields. Plain decoding leaves out these arguments and their options.
        baseline_command: the command of plain decoding, if leaving out does not make it.
    """

    name: ClassVar[str] = "server"
    command: str = ""
    baseline_command: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places = {name for name in _PLACES if f"{{{name}}}" in self.command}
        if "{port}" not in self.command:
            raise InputError("backend.command: has no {port}")
        if not self._places:
            raise InputError(f"backend.command: has no {{{_SPECULATIVE}}}, so all configurations would be the same")
        if self.schedule and not self.takes_schedules:
            raise InputError(f"backend.schedule: has no effect without {{{_SPECULATIVE}}} in backend.command")

    @property
    def takes_schedules(self) -> bool:
        return _SPECULATIVE in self._places

    def describe(self) -> dict[str, Any]:
        return {"command": self.command, "baseline_command": self.baseline_command} | super().describe()

    def supports(self, method: str) -> str | None:
        if method == "none":
            return None
        if _SPECULATIVE in self._places:
            return refusal(method)
        needed = _NEEDED.get(method)
        if needed not in self._places:
            return f"backend.command has no place for {method}"
        if self._places & {"draft_model", "head"} - {needed}:
            return f"backend.command drafts with another method than {method}"
        return None

    def arguments(self, config: SpeculativeConfig, port: int) -> list[str]:
        plain = config.method == "none"
        parts = shlex.split(self.baseline_command if plain and self.baseline_command else self.command)
        values: dict[str, Any] = {name: getattr(config, name, "") for name in _PLACES} | {"port": port}
        if _SPECULATIVE in self._places:
            values[_SPECULATIVE] = json.dumps(vllm_config(self.target, config, schedule=self.schedule))
        found: list[str] = []
        for part in parts:
            if plain and any(f"{{{name}}}" in part for name in _PLACES):
                if not part.startswith("-") and found and found[-1].startswith("-") and "=" not in found[-1]:
                    found.pop()  # the option that the argument belongs to
                continue
            for name, value in values.items():  # not str.format, as commands may hold JSON of their own
                part = part.replace(f"{{{name}}}", str(value))
            found.append(part)
        return found
