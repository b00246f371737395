"""Inference engines beside this library's decoder, each of which has a file in :mod:`searches.engines.adapters`.

Each runs in a process of its own (:mod:`searches.engines.worker`), under the interpreter in which it is installed, on the
same model, prompts and number of threads as the others. Its tokens are counted and timed here, by the same clock.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from layerskip import DecodeStats, PromptSet, Round, SpeculativeConfig, Target, UnsupportedModel
from layerskip.decoding.decode import DecodeResult
from layerskip.engines.registry import speculation
from layerskip.measure.measure import Contender, Task, interleave
from layerskip.measure.measurement import Sample
from layerskip.models.loading import DTYPES, gguf_file, load_draft
from layerskip.models.positions import max_positions
from searches.app.checks import InputError, check_list, check_whole
from searches.backends.backend import BackendError
from searches.backends.engine_process import EngineProcess, interpreter
from searches.backends.vllm import served_folder, written_once
from searches.engines.worker import load_adapter
from searches.progress import say

ADAPTERS = Path(__file__).with_name("adapters")
ENGINES = tuple(sorted(file.stem for file in ADAPTERS.glob("[!_]*.py")))
"""The engines that have a file in ``adapters/``."""
_ALIASES = {"openvino": "openvino_genai", "llama_cpp": "xllamacpp"}
_VERSION = """
import importlib.metadata as metadata, sys
names = metadata.packages_distributions().get(sys.argv[1], ())
print(*(metadata.version(name) for name in names[:1]))
"""
METHODS = ("plain", "prompt_lookup", "draft_model")
_WORKER = Path(__file__).with_name("worker.py")
_LONGEST = 4096  # tokens of prompt and output that engines are asked to hold
_ANSWER_SECONDS = 600.0  # within which an engine loads a model, or decodes a prompt


def installed(field: str, name: str | None) -> str:
    """Return the name of an engine, which may be given as the project's own, if the engine is installed.

    Raises:
        InputError: it is unknown or not installed; the message begins with the field.
    """
    engine = _ALIASES.get(str(name), name)
    check_list(field, [engine], ENGINES)
    if interpreter(str(engine)) is None:
        raise InputError(f"{field}: {engine} is not installed; make engines installs it")
    return str(engine)


def engine_version(engine: str) -> str:
    """Return the version of the package that an engine is installed from; empty if it is from none."""
    words = [str(interpreter(engine)), "-c", _VERSION, engine]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def check_on_cpu(target: Target) -> None:
    """Raise ``InputError`` for a target on another device than the one on which engines decode."""
    if target.device.type != "cpu":
        raise InputError(f"target.device: engines decode on a CPU, not on {target.device.type}; target.device=cpu")


def asked_dtype(target: Target) -> str:
    """Return the data type in which an engine decodes beside a target."""
    return "bfloat16" if target.precision == "mixed" else target.dtype


@dataclass(eq=False)
class EnginePeer:
    """One decoding method of an inference engine.

    Attributes:
        precision: of the engine's arithmetic and its cache, as it states them; it may not follow ``dtype``.
        rounds_to: the data type to which it rounds at most.
        outputs: the new tokens of each prompt.

    Raises:
        InputError: a field is unknown or out of range.
        UnsupportedModel: the engine does not load the model.
    """

    target: Target
    folder: Path  # where the target's model, and what the engine makes of it, are kept
    engine: str  # one of ``ENGINES``; ``xllamacpp`` (llama.cpp) reads the target's GGUF file
    method: str  # ``plain``, ``prompt_lookup`` or ``draft_model``
    python: str | None = None  # the interpreter in which the engine is installed; None for that of :func:`interpreter`
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 3
    dtype: str | None = None  # ``float32``, ``bfloat16`` or ``float16``; None for the target's; ``xllamacpp`` ignores it
    draft_model: str = ""  # a folder, hub id or GGUF file of the method ``draft_model``
    start_seconds: float | None = None  # within which it loads; None for ten minutes
    limit_seconds: float | None = None  # within which it decodes a prompt; None for ten minutes

    def __post_init__(self) -> None:
        check_list("engine", [self.engine], ENGINES)
        check_list("method", [self.method], METHODS)
        self.dtype = self.dtype or self.target.dtype
        check_list("dtype", [self.dtype], tuple(DTYPES))
        check_whole("num_speculative_tokens", self.num_speculative_tokens)
        check_whole("prompt_lookup_max", self.prompt_lookup_max)
        python = self.python = interpreter(self.engine, self.python) or sys.executable
        if shutil.which(python) is None:
            raise InputError(f"python: {python} is not a program")
        file = str(ADAPTERS / f"{self.engine}.py")
        self._adapter = load_adapter(file)
        self.rounds_to = DTYPES[getattr(self._adapter, "ROUNDS_TO", self.dtype)]
        own = {"OMP_NUM_THREADS": str(torch.get_num_threads())} | _intel_openmp(python)
        self._settings = {
            "model": self._for_engine(self.target),
            "speculative_config": self._drafting(),
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "max_length": min(_LONGEST, max_positions(self.target.model) or _LONGEST),
            "python": python,
            "environment": own,
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        self.process = EngineProcess([python, str(_WORKER), file], environment, self.engine, asked=True)
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        try:
            self.process.send(json.dumps(self._settings))
            loaded = self._answer(self.start_seconds)
            self.version, self.precision = str(loaded["version"]), dict(loaded["precision"])
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether it can decode."""
        return self.process.running

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        """Decode greedily, and report when the first tokens are known."""
        if not task.sampling.greedy:
            raise InputError(f"sampling: {self.engine} is measured greedily")
        request = {"tokens": list(prompt), "max_new_tokens": task.max_new_tokens, "eos": sorted(self.target.eos_ids)}
        self.process.send(json.dumps(request | {"repetition_penalty": task.sampling.repetition_penalty}))
        on_prefill(int(self._answer(self.limit_seconds)["first"]))
        answer = self._answer(self.limit_seconds)
        rounds = [self._round(after - before) for before, after in itertools.pairwise(answer["lengths"])]
        size = self.target.model.config.get_text_config(decoder=True).vocab_size
        if not all(isinstance(token, int) and 0 <= token < size for token in answer["tokens"]):
            self.close()
            raise UnsupportedModel(f"{self.engine}: answers with tokens that are not in the vocabulary")
        self.outputs[tuple(prompt)] = answer["tokens"]
        return DecodeResult(answer["tokens"], DecodeStats(tuple(rounds)), "")

    def _round(self, size: int) -> Round:
        """Return a round of some tokens. Engines do not state their drafts, which count as long as they may be."""
        longest = 0 if self.method == "plain" else self.num_speculative_tokens
        return Round(max(longest, size - 1), size - 1, size) if longest else Round(0, 0, size)

    def close(self) -> None:
        """End the worker and what it started."""
        self.process.stop()

    def command(self) -> str:
        """Return the command that decodes so without this program."""
        return str(self._adapter.command(self._settings))

    def _answer(self, seconds: float | None) -> dict[str, Any]:
        try:
            return dict(json.loads(self.process.receive(seconds or _ANSWER_SECONDS)))
        except BackendError as error:
            raise UnsupportedModel(error.reason) from None

    def _drafting(self) -> dict[str, Any]:
        """Return how the engine drafts, in the words of vLLM; empty for plain decoding."""
        count = self.num_speculative_tokens
        if self.method != "draft_model":
            config = SpeculativeConfig("prompt_lookup", count, prompt_lookup_min=1, prompt_lookup_max=self.prompt_lookup_max)
            return speculation("none" if self.method == "plain" else self.method, config, str)
        if not self.draft_model:
            raise InputError("draft_model: is missing")
        draft = load_draft(self.target, self.draft_model)
        config = SpeculativeConfig("draft_model", count, draft_model=self.draft_model)
        return speculation("draft_model", config, lambda: self._for_engine(draft))

    def _for_engine(self, model: Target) -> str:
        """Return a file or folder of a model that the engine loads; converted once per model and dtype."""
        if self._adapter.LOADS == "gguf":
            if (file := gguf_file(model.name)) is None:
                raise UnsupportedModel(f"{self.engine}: {model.name} is not a GGUF file")
            return str(file)
        if model.quantization is not None:
            raise UnsupportedModel(f"{self.engine}: it loads no weights that are quantised on loading")
        saved = served_folder(model, self.folder)
        if not hasattr(self._adapter, "conversion"):
            return saved
        command = self._adapter.conversion(str(self.python), saved, model.dtype)

        def convert(folder: Path) -> None:
            converter = EngineProcess([*command, str(folder)], os.environ, f"{self.engine}: cannot convert {model.name}")
            try:
                converter.wait_for_end(_ANSWER_SECONDS)
            except BackendError as error:
                raise UnsupportedModel(error.reason) from None

        name = f"{Path(model.name).name}-{model.digest[:8]}-{model.dtype}-{self.engine.partition('_')[0]}"
        return written_once(self.folder / name, convert)


def interleave_alive(
    target: Target,
    prompts: PromptSet,
    contenders: Mapping[str, Contender],
    task: Task,
    repeats: int = 1,
    on_prompt: Callable[[], object] = lambda: None,
) -> tuple[list[Mapping[str, Sample]], dict[str, str]]:
    """Return the rows of :func:`~layerskip.measure.measure.interleave`, and why each engine that ended did.

    An engine that ends has no samples from then on; the others decode on.
    """
    rows: list[Mapping[str, Sample]] = []
    ended: dict[str, str] = {}
    while len(rows) < len(prompts) * repeats:
        alive = {name: each for name, each in contenders.items() if name not in ended}
        repeat, done = divmod(len(rows), len(prompts))
        left, before = PromptSet(prompts.items[done:]), PromptSet(prompts.items[:done]) if done else None
        again, own = 1 if done else repeats - repeat, replace(task, seed=task.seed + 1000 * repeat)
        try:
            for row in interleave(target, left, alive, own, again, before=before):
                rows.append(row)
                on_prompt()
        except UnsupportedModel as error:
            gone = [name for name, each in alive.items() if isinstance(each, EnginePeer) and not each.is_running]
            if not gone:
                raise
            say(f"engines: {', '.join(gone)} left out: {error}")
            ended |= dict.fromkeys(gone, str(error))
    return rows, ended


def _intel_openmp(python: str) -> dict[str, str]:
    """Return the variable that loads Intel's OpenMP first, which vLLM asks for; its wheel for CPUs has it."""
    library = Path(str(shutil.which(python))).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() and "LD_PRELOAD" not in os.environ else {}
