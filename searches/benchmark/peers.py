"""Rows of a benchmark beside ours: decoding methods of transformers' ``generate``, and inference engines.

Parameters that transformers adapts by itself are pinned, unless the benchmark asks for its defaults. The number of drafted
tokens, its schedule and the confidence threshold are part of the *assistant's* generation configuration, and the threshold
adapts if scikit-learn is installed.

OpenVINO GenAI, vLLM and llama.cpp run each in a process of its own, under the interpreter in which they are installed
(:mod:`searches.benchmark.engine_worker`), on the same model, prompts and number of threads as the others. Their tokens are
counted and timed here, by the same clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import utils as generation

from layerskip import DecodeStats, Round, Target, UnsupportedModel
from layerskip.decoding.decode import DecodeResult
from layerskip.device.memory import tensor_bytes
from layerskip.files import atomic_folder
from layerskip.measure.measure import Task
from layerskip.models.loading import DTYPES, gguf_file, load_draft, load_target
from layerskip.models.positions import max_positions
from searches.app.checks import InputError, check_list, check_whole

# Earlier releases (5.17, but not 5.23) also call stopping criteria on every draft. A release without this private function
# is a later one.
_verify = getattr(generation, "_speculative_sampling", None)
_CALLS_ON_DRAFTS = _verify is not None and "is_done_candidate" in inspect.signature(_verify).parameters
_METHODS = ("plain", "static", "prompt_lookup", "early_exit", "assistant", "universal")
_ENGINES = ("openvino_genai", "vllm", "xllamacpp")
_ENGINE_METHODS = ("plain", "prompt_lookup", "assistant")
WORKER = Path(__file__).with_name("engine_worker.py")
_LONGEST = 4096  # tokens of prompt and output that vLLM is asked to hold
_CLOSING_SECONDS = 20


@dataclass(frozen=True)
class Peer:
    """One decoding method of transformers.

    Args:
        target: the target.
        method: ``plain``, ``static`` (``cache_implementation="static"``, which compiles the passes on CUDA),
            ``prompt_lookup`` (``prompt_lookup_num_tokens``), ``early_exit`` (``assistant_early_exit``), ``assistant``
            (``assistant_model``) or ``universal`` (the same with two tokenizers).
        num_speculative_tokens: tokens drafted per round; None keeps transformers' default.
        prompt_lookup_max: longest n-gram of ``prompt_lookup``.
        exit_layer: number of layers that the draft of ``early_exit`` keeps.
        draft_model: draft model of ``assistant`` and ``universal``.
        confidence: confidence below which drafting stops; 0 never stops; None keeps transformers' default.
        dtype: of the weights that it decodes with, loaded once more; None for the target's.

    Raises:
        InputError: the method is unknown.
        UnsupportedModel: transformers does not accept the draft model.
    """

    target: Target
    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int = 3
    exit_layer: int = 0
    draft_model: str = ""
    confidence: float | None = 0.0
    dtype: str | None = None
    _pinned: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_list("method", [self.method], _METHODS)
        check_list("dtype", [self.dtype or self.target.dtype], tuple(DTYPES))
        if self.dtype not in (None, self.target.dtype):
            same = load_target(self.target.name, self.target.revision, str(self.dtype), str(self.target.device))
            object.__setattr__(self, "target", same)
        if self.method == "universal":
            draft = load_draft(self.target, self.draft_model, same_tokenizer=False).model
            sizes = {model.config.get_text_config(decoder=True).vocab_size for model in (self.target.model, draft)}
            if len(sizes) == 1:
                reason = "its vocabulary is as large as the target's, which transformers takes for the same tokenizer"
                raise UnsupportedModel(f"draft_model: {self.draft_model}: {reason}")
        if self.num_speculative_tokens is not None:
            self._pinned["num_assistant_tokens"] = self.num_speculative_tokens
        self._pinned["num_assistant_tokens_schedule"] = "constant"
        if self.confidence is not None:
            self._pinned["assistant_confidence_threshold"] = self.confidence

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        """Generate, and record the length of the output after every round."""
        model = self.target.model
        inputs: Any = torch.tensor([list(prompt)], device=self.target.device)
        recorder = _RoundRecorder(len(prompt), on_prefill, _CALLS_ON_DRAFTS and self.method not in ("plain", "static"))
        torch.manual_seed(task.seed)
        with self._assistant() as options:
            output: Any = model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=task.max_new_tokens,
                stopping_criteria=StoppingCriteriaList([recorder]),
                **_sampling(task),
                **options,
            )
        tokens = output[0, len(prompt) :].tolist()
        return DecodeResult(tokens, DecodeStats(tuple(recorder.rounds())), "")

    def memory_bytes(self) -> int:
        """Return the bytes of the draft model that it does not share with the target; caches do not outlive ``generate``."""
        with self._assistant() as options:
            return tensor_bytes(options.get("assistant_model"), beside=(self.target.model,))

    @contextlib.contextmanager
    def _assistant(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of ``generate`` for this method, with the pinned parameters in place."""
        if self.method == "plain":
            yield {}
        elif self.method == "static":
            yield {"cache_implementation": "static"}
        elif self.method == "prompt_lookup":
            yield {
                "prompt_lookup_num_tokens": self.num_speculative_tokens or 10,
                "max_matching_ngram_size": self.prompt_lookup_max,
            }
        elif self.method == "early_exit":
            with _pinned(self.target.model, self._pinned):
                yield {"assistant_early_exit": self.exit_layer}
        else:
            assistant = load_draft(self.target, self.draft_model, self.method == "assistant")
            tokenizers = {"tokenizer": self.target.tokenizer, "assistant_tokenizer": assistant.tokenizer}
            with _pinned(assistant.model, self._pinned):
                yield {"assistant_model": assistant.model} | (tokenizers if self.method == "universal" else {})


class _RoundRecorder(StoppingCriteria):
    """Stopping criterion that records the length after prefill and after every round, and never stops.

    ``on_prefill`` is called after prefill with the number of new tokens. ``on_drafts`` says whether transformers also calls
    the criterion on every draft, before verification.
    """

    def __init__(self, prompt_length: int, on_prefill: Callable[[int], None], on_drafts: bool) -> None:
        self._lengths = [prompt_length]
        self._on_prefill, self._on_drafts, self._drafted = on_prefill, on_drafts, False

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        self._drafted = self._on_drafts and not self._drafted
        if not self._drafted:
            if len(self._lengths) == 1:
                self._on_prefill(input_ids.shape[1] - self._lengths[0])
            self._lengths.append(input_ids.shape[1])
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    def rounds(self) -> list[Round]:
        """Return the committed tokens of every round. The number of drafted tokens is unknown."""
        pairs = zip(self._lengths[1:], self._lengths[2:], strict=False)
        return [Round(0, 0, after - before) for before, after in pairs]


@contextlib.contextmanager
def _pinned(model: PreTrainedModel, values: dict[str, Any]) -> Iterator[None]:
    """Set fields of the model's generation configuration, and restore them at the end."""
    config = model.generation_config
    assert isinstance(config, GenerationConfig)
    before = {name: getattr(config, name, None) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _sampling(task: Task) -> dict[str, Any]:
    greedy = task.sampling.greedy
    options = {name: value for name, value in task.sampling.to_dict().items() if name == "repetition_penalty" or not greedy}
    return {"do_sample": not greedy} | options


def is_installed(engine: str, python: str | None) -> bool:
    """Return whether an engine can be used: an interpreter is named for it, or it is installed with this program."""
    return python is not None or importlib.util.find_spec(engine) is not None


@dataclass
class EnginePeer:
    """One decoding method of an inference engine.

    Args:
        target: the target.
        folder: where its model, and what the engine makes of it, are kept.
        engine: ``openvino_genai``, ``vllm`` or ``xllamacpp`` (llama.cpp), which reads the target's GGUF file.
        method: ``plain``, ``prompt_lookup`` or ``assistant``.
        python: the interpreter in which the engine is installed; None for this one.
        num_speculative_tokens: tokens drafted per round.
        prompt_lookup_max: longest n-gram of ``prompt_lookup``.
        draft_model: draft model of ``assistant``.
        dtype: ``float32``, ``bfloat16`` or ``float16`` in the engine; None for the target's. ``xllamacpp`` ignores it.

    Attributes:
        version: that of the engine.
        precision: of its arithmetic and its cache, as the engine states them; it may not follow ``dtype``.

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

    def __post_init__(self) -> None:
        check_list("engine", [self.engine], _ENGINES)
        check_list("method", [self.method], _ENGINE_METHODS)
        check_list("dtype", [self.dtype or self.target.dtype], tuple(DTYPES))
        check_whole("num_speculative_tokens", self.num_speculative_tokens)
        check_whole("prompt_lookup_max", self.prompt_lookup_max)
        python = self.python or sys.executable
        if shutil.which(python) is None:
            raise InputError(f"python: {python} is not a program")
        model = self._model_folder(self.target)
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
        if not (line := self._process.stdout.readline()):
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
                command = [self.python or sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
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
