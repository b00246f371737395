"""Any server with OpenAI's interface as the engine that a study measures.

Either a command starts it, with a place for the speculative configuration, or two running servers are named: one decodes
plainly, the other with the configuration that the user states, which is then the whole search space.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import optuna

from layerskip import ConfigError, SpeculativeConfig
from layerskip.engines.deployment import Unsupported
from searches.app.checks import InputError
from searches.backends.backend import BackendError
from searches.backends.client import Client
from searches.backends.running_engine import RunningEngine
from searches.backends.served import ServedBackend
from searches.backends.vllm import refusal, vllm_config
from searches.space.search_space import Params, SearchSpace

_SPECULATIVE = "speculative_config"
_PLACES = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "draft_model", "head", _SPECULATIVE)
_NEEDED = {"prompt_lookup": "num_speculative_tokens", "draft_model": "draft_model", "eagle": "head", "medusa": "head"}
"""The place without which a command cannot draft with a method."""


@dataclass(frozen=True)
class ServedSpace(SearchSpace):
    """A space of one configuration, ``served``, beside plain decoding."""

    served: SpeculativeConfig = field(default=SpeculativeConfig(), metadata={"runtime": True})

    def suggest(self, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        method = trial.suggest_categorical("method", self.available_methods)
        return self.served if method == self.served.method else SpeculativeConfig()

    def params(self, config: SpeculativeConfig) -> Params:
        return {"method": config.method}

    def lookups(self) -> list[SpeculativeConfig]:
        return [self.served] if self.served.method == "prompt_lookup" else []


@dataclass(eq=False)
class ServerBackend(ServedBackend):
    """A back end that measures any server.

    Args:
        command: starts a server. ``{port}`` is replaced in it, and ``{speculative_config}`` by vLLM's JSON for a
            configuration, or ``{num_speculative_tokens}``, ``{prompt_lookup_min}``, ``{prompt_lookup_max}``,
            ``{draft_model}`` and ``{head}`` by its fields. Plain decoding leaves out these arguments and their options.
        baseline_command: the command of plain decoding, if leaving out does not make it.
        baseline_url: a running server that decodes plainly.
        candidate_url: a running server that drafts.
        candidate: the configuration that it drafts with. In ``searches.verify`` it is that of the export by default.
    """

    name: ClassVar[str] = "server"
    command: str = ""
    baseline_command: str = ""
    baseline_url: str = ""
    candidate_url: str = ""
    candidate: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command:
            if self.baseline_url or self.candidate_url or self.candidate:
                raise InputError("backend.command: starts the servers, so URLs and backend.candidate have no effect")
            if "{port}" not in self.command:
                raise InputError("backend.command: has no {port}")
            if not any(f"{{{name}}}" in self.command for name in _PLACES):
                raise InputError(f"backend.command: has no {{{_SPECULATIVE}}}, so all configurations would be the same")
            return
        for name in ("baseline_url", "candidate_url"):
            if not getattr(self, name):
                raise InputError(f"backend.{name}: is missing; give both URLs, or backend.command")
            try:
                self._connect(getattr(self, name))
            except ValueError as error:
                raise InputError(f"backend.{name}: {error}") from None
        try:
            self._served = SpeculativeConfig.from_dict(dict(self.candidate))
        except ConfigError as error:
            raise InputError(f"backend.candidate.{error}") from None
        if self._served.method == "none":
            raise InputError("backend.candidate: state what candidate_url drafts with, such as {method: prompt_lookup}")

    def describe(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "baseline_command": self.baseline_command,
            "urls": [self.baseline_url, self.candidate_url],
            "candidate": dict(self.candidate),
        } | super().describe()

    def supports(self, method: str) -> str | None:
        if method == "none":
            return None
        if not self.command:
            return None if method == self._served.method else f"backend.candidate_url drafts with {self._served.method}"
        if f"{{{_SPECULATIVE}}}" in self.command:
            return refusal(method)
        needed = _NEEDED.get(method)
        if needed is None or f"{{{needed}}}" not in self.command:
            return f"backend.command has no place for {method}"
        if any(f"{{{other}}}" in self.command for other in {"draft_model", "head"} - {needed}):
            return f"backend.command drafts with another method than {method}"
        return None

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space without what servers lack; of a named server, with nothing but its configuration."""
        space = super().restrict(space)
        if self.command:
            return space
        return ServedSpace(**{each.name: getattr(space, each.name) for each in fields(SearchSpace)}, served=self._served)

    def _start(self, config: SpeculativeConfig) -> RunningEngine:
        if not self.command:
            if config.method != "none" and config != self._served:
                raise BackendError(f"server: {self.candidate_url} drafts with {self._served.label()}, not {config.label()}")
            url = self.baseline_url if config.method == "none" else self.candidate_url
            engine = RunningEngine(self.name, self._connect(url))
            if not engine.client.ready():
                raise BackendError(f"server: nothing answers at {engine.client.url}/v1/models")
            return engine
        command = functools.partial(self.arguments, config)
        return RunningEngine.started(self.name, command, os.environ, self._connect, self.start_seconds)

    def arguments(self, config: SpeculativeConfig, port: int) -> list[str]:
        """Return the command of a configuration; :class:`BackendError` if it asks for vLLM's form and has none."""
        plain = config.method == "none"
        parts = shlex.split(self.baseline_command if plain and self.baseline_command else self.command)
        values: dict[str, Any] = {name: getattr(config, name, "") for name in _PLACES} | {"port": port}
        if f"{{{_SPECULATIVE}}}" in self.command:
            try:
                values[_SPECULATIVE] = json.dumps(vllm_config(self.target, config))
            except Unsupported as error:
                raise BackendError(f"server: {error}") from None
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

    def _connect(self, url: str) -> Client:
        return Client.with_key(url, self.limit_seconds)
