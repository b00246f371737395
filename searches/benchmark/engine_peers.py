"""Inference engines as rows of a benchmark: OpenVINO GenAI and vLLM, each in a process of its own.

An engine runs under the interpreter in which it is installed (:mod:`searches.benchmark.engine_worker`), on the same
model, prompts and number of threads as the others. Its tokens are counted and timed here, by the same clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from layerskip import DecodeStats, Round, Target, UnsupportedModel
from layerskip.decoding.decode import DecodeResult
from layerskip.files import atomic_folder
from layerskip.measure.measure import Task
from layerskip.models.loading import load_draft
from layerskip.models.positions import max_positions
from searches.app.checks import InputError, check_whole

ENGINES = ("openvino_genai", "vllm")
METHODS = ("plain", "prompt_lookup", "assistant")
_WORKER = Path(__file__).with_name("engine_worker.py")
_LONGEST = 4096  # tokens of prompt and output that vLLM is asked to hold
_CLOSING_SECONDS = 20


def is_installed(engine: str, python: str | None) -> bool:
    """Return whether an engine can be used: an interpreter is named for it, or it is installed with this program."""
    return python is not None or importlib.util.find_spec(engine) is not None


@dataclass
class EnginePeer:
    """One decoding method of an inference engine.

    Args:
        target: the target.
        folder: where its model, and what the engine makes of it, are kept.
        engine: ``openvino_genai`` or ``vllm``.
        method: ``plain``, ``prompt_lookup`` or ``assistant``.
        python: the interpreter in which the engine is installed; None for this one.
        num_speculative_tokens: tokens drafted per round.
        prompt_lookup_max: longest n-gram of ``prompt_lookup``.
        draft_model: draft model of ``assistant``.

    Raises:
        InputError: a field is unknown or out of range.
        UnsupportedModel: the engine does not load the model.
    """

    target: Target
    folder: Path
    engine: str
    method: str
    python: str | None = None
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 3
    draft_model: str = ""
    version: str = field(init=False, default="")

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("method", METHODS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(known)}")
        check_whole("num_speculative_tokens", self.num_speculative_tokens)
        check_whole("prompt_lookup_max", self.prompt_lookup_max)
        python = self.python or sys.executable
        if shutil.which(python) is None:
            raise InputError(f"python: {python} is not a program")
        model = self._model_folder(self.target)
        draft = self._model_folder(load_draft(self.target, self.draft_model)) if self.method == "assistant" else ""
        settings = {
            name: getattr(self, name) for name in ("engine", "method", "num_speculative_tokens", "prompt_lookup_max")
        }
        settings |= {
            "model": str(model),
            "draft_model": str(draft),
            "dtype": self.target.dtype,
            "threads": torch.get_num_threads(),
        }
        settings["max_length"] = min(_LONGEST, max_positions(self.target.model) or _LONGEST)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(_WORKER), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is this program's to handle, which then closes the worker
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
            | _intel_openmp(python),
        )
        try:
            self.version = str(self._ask(settings)["version"])
        except BaseException:
            self.close()
            raise

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        """Decode greedily, and report when the first tokens are known."""
        if not task.sampling.greedy:
            raise InputError(f"sampling: {self.engine} is measured greedily; peers.<name>=null leaves it out")
        request = {"tokens": list(prompt), "max_new_tokens": task.max_new_tokens, "eos": sorted(self.target.eos_ids)}
        on_prefill(int(self._ask(request | {"repetition_penalty": task.sampling.repetition_penalty})["first"]))
        answer = self._read()
        lengths = answer["lengths"]
        rounds = [Round(0, 0, after - before) for before, after in itertools.pairwise(lengths)]
        return DecodeResult(answer["tokens"], DecodeStats(tuple(rounds)), "")

    def memory_bytes(self) -> None:
        """Return None: the memory of another process's drafter is not known."""

    def close(self) -> None:
        """End the worker and what it started."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a line, and return the answer to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the answer reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended: {self._last_words()}"}
        if "error" in answer:
            raise UnsupportedModel(f"{self.engine}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"

    def _model_folder(self, model: Target) -> Path:
        """Return a folder with a model as the engine loads it; made once per model, dtype and engine."""
        name = f"{Path(model.name).name}-{model.digest[:8]}-{model.dtype}"
        saved = self.folder / name
        if not (saved / "config.json").exists():
            with atomic_folder(saved) as partial:
                model.save(partial)
        if self.engine != "openvino_genai":
            return saved
        converted = self.folder / f"{name}-openvino"
        if not converted.exists():
            with atomic_folder(converted) as partial:
                precision = "fp16" if model.dtype == "float16" else "fp32"  # which contains bfloat16
                command = [self.python or sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
                command += ["--model", str(saved), "--task", "text-generation-with-past", "--weight-format", precision]
                done = subprocess.run([*command, str(partial)], capture_output=True, text=True, check=False)
                if done.returncode:
                    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
                    raise UnsupportedModel(f"openvino_genai: cannot convert {model.name}: {' '.join(last)[:300]}")
        return converted


def _intel_openmp(python: str) -> dict[str, str]:
    """Return the variable that loads Intel's OpenMP first, which vLLM asks for; its wheel for CPUs has it."""
    library = Path(str(shutil.which(python))).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() and "LD_PRELOAD" not in os.environ else {}
