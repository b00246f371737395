"""Inference engines beside this library's decoder: OpenVINO GenAI, vLLM and llama.cpp.

Each runs in a process of its own (:mod:`searches.engines.worker`), under the interpreter in which it is installed, on the
same model, prompts and number of threads as the others. Its tokens are counted and timed here, by the same clock.
``make engines`` installs all of them, each below ``.engines``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from layerskip import DecodeStats, Round, Target, UnsupportedModel
from layerskip.decoding.decode import DecodeResult
from layerskip.files import atomic_folder
from layerskip.measure.measure import Task
from layerskip.models.loading import DTYPES, gguf_file, load_draft
from layerskip.models.positions import max_positions
from searches.app.checks import InputError, check_list, check_whole
from searches.app.composition import CONF

ENGINES = ("openvino_genai", "vllm", "xllamacpp")
_METHODS = ("plain", "prompt_lookup", "assistant")
WORKER = Path(__file__).with_name("worker.py")
_INSTALLED = Path(CONF).parent / ".engines"
"""Where ``make engines`` installs each engine, in an environment of its own; ``LAYERSKIP_ENGINES`` names another folder."""
_LONGEST = 4096  # tokens of prompt and output that vLLM is asked to hold
_CLOSING_SECONDS = 20
_ANSWER_SECONDS = 600.0  # within which an engine loads a model, or decodes a prompt


def interpreter(engine: str, python: str | None = None) -> str | None:
    """Return the interpreter in which an engine is installed, the given one if there is one; None if it is not installed."""
    own = Path(os.environ.get("LAYERSKIP_ENGINES", _INSTALLED)) / engine / "bin" / "python"
    if python is not None or own.exists():
        return python or str(own)
    return sys.executable if importlib.util.find_spec(engine) is not None else None


@dataclass
class EnginePeer:
    """One decoding method of an inference engine.

    Args:
        target: the target.
        folder: where its model, and what the engine makes of it, are kept.
        engine: ``openvino_genai``, ``vllm`` or ``xllamacpp`` (llama.cpp), which reads the target's GGUF file.
        method: ``plain``, ``prompt_lookup`` or ``assistant``.
        python: the interpreter in which the engine is installed; None for that of :func:`interpreter`.
        num_speculative_tokens: tokens drafted per round.
        prompt_lookup_max: longest n-gram of ``prompt_lookup``.
        draft_model: draft model of ``assistant``.
        dtype: ``float32``, ``bfloat16`` or ``float16`` in the engine; None for the target's. ``xllamacpp`` ignores it.

    Attributes:
        version: that of the engine.
        precision: of its arithmetic and its cache, as the engine states them; it may not follow ``dtype``.
        is_running: whether it can decode.

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
    dtype: str | None = None
    version: str = field(init=False, default="")
    precision: dict[str, str] = field(init=False, default_factory=dict)
    is_running: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        check_list("engine", [self.engine], ENGINES)
        check_list("method", [self.method], _METHODS)
        check_list("dtype", [self.dtype or self.target.dtype], tuple(DTYPES))
        check_whole("num_speculative_tokens", self.num_speculative_tokens)
        check_whole("prompt_lookup_max", self.prompt_lookup_max)
        python = self.python = interpreter(self.engine, self.python) or sys.executable
        if shutil.which(python) is None:
            raise InputError(f"python: {python} is not a program")
        model = self._model = self._model_folder(self.target)
        draft = self._model_folder(load_draft(self.target, self.draft_model)) if self.method == "assistant" else ""
        settings = {
            "engine": self.engine,
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup_max": self.prompt_lookup_max,
            "model": str(model),
            "draft_model": str(draft),
            "dtype": self.dtype or self.target.dtype,
            "threads": torch.get_num_threads(),
            "max_length": min(_LONGEST, max_positions(self.target.model) or _LONGEST),
        }
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(WORKER), str(os.getpid())],
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
            loaded = self._ask(settings)
            self.version, self.precision = str(loaded["version"]), dict(loaded["precision"])
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
            with contextlib.suppress(ProcessLookupError):  # also what it started, if it has ended itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def command(self) -> str:
        """Return what decodes so without this program: a command, or expressions in Python."""
        lookup, count, longest = self.method == "prompt_lookup", self.num_speculative_tokens, self.prompt_lookup_max
        model, dtype = str(self._model), self.dtype or self.target.dtype
        if self.engine == "openvino_genai":
            kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
            options = f"INFERENCE_PRECISION_HINT={kind!r}, KV_CACHE_PRECISION={kind!r}"
            pipeline = f"LLMPipeline({model!r}, 'CPU', {'prompt_lookup=True, ' * lookup}{options})"
            drafting = f", num_assistant_tokens={count}, max_ngram_size={longest}" * lookup
            return f"openvino_genai.{pipeline}.generate(prompt, max_new_tokens=n{drafting})"
        if self.engine == "xllamacpp":
            command = ["llama-server", "--model", model, "--threads", str(torch.get_num_threads())]
            lengths = ["--spec-ngram-simple-size-n", str(longest), "--spec-ngram-simple-size-m", str(count)]
            return shlex.join([*command, *(["--spec-type", "ngram-simple", *lengths] if lookup else [])])
        command = ["vllm", "serve", model, "--dtype", dtype, "--generation-config", "vllm"]
        speculative = {"method": "ngram", "num_speculative_tokens": count}
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": longest}
        return shlex.join([*command, *(["--speculative-config", json.dumps(speculative)] if lookup else [])])

    def _kill(self) -> None:
        if self._process.returncode is None:  # else its number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a line, and return the answer to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the answer reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        begun, watch = time.monotonic(), threading.Timer(_ANSWER_SECONDS, self._kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            self.is_running = False
            if time.monotonic() - begun >= _ANSWER_SECONDS:
                raise UnsupportedModel(f"{self.engine}: it gave no answer within {_ANSWER_SECONDS:.0f} seconds")
            self._log.seek(0)
            raise UnsupportedModel(f"{self.engine}: it ended: {_last_line(self._log.read()) or 'it printed nothing'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UnsupportedModel(f"{self.engine}: {answer['error']}")
        return answer

    def _model_folder(self, model: Target) -> Path:
        """Return a folder with a model as the engine loads it; made once per model, dtype and engine."""
        if self.engine == "xllamacpp":
            if (file := gguf_file(model.name)) is None:
                raise UnsupportedModel(f"xllamacpp: {model.name} is not a GGUF file")
            return file
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
                command = [str(self.python), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
                command += ["--model", str(saved), "--task", "text-generation-with-past", "--weight-format", precision]
                done = subprocess.run([*command, str(partial)], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise UnsupportedModel(f"openvino_genai: cannot convert {model.name}: {_last_line(done.stderr)}")
        return converted


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def _intel_openmp(python: str) -> dict[str, str]:
    """Return the variable that loads Intel's OpenMP first, which vLLM asks for; its wheel for CPUs has it."""
    library = Path(str(shutil.which(python))).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() and "LD_PRELOAD" not in os.environ else {}
