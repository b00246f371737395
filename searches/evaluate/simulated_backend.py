"""A back end that decodes nothing: it draws samples from a :class:`Landscape` and sleeps for their simulated seconds.

Studies on it run the real program, on a tiny random model whose weights are never used. Many of them run beside each other
on few cores, as sleeping needs none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from layerskip import PromptSet, SpeculativeConfig, Target
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.backends.backend import Backend, Load
from searches.evaluate.landscape import Landscape
from searches.evaluate.simulated_decoder import Machine, SimulatedBench
from searches.space.search_space import SearchSpace

_KINDS = ("none", "layer_skip", "prompt_lookup")
_WIDTH = 8  # of the tiny model


def save_random_model(folder: Path, layers: int) -> None:
    """Save a tiny random Llama with a tokenizer of single bytes, as ``target=local`` loads it."""
    pieces = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sizes = {"hidden_size": _WIDTH, "intermediate_size": _WIDTH, "num_attention_heads": 1, "num_hidden_layers": layers}
    torch.manual_seed(0)
    settings = AutoConfig.for_model("llama", vocab_size=len(pieces), eos_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>").save_pretrained(folder)


def pause(seconds: float) -> None:
    """Sleep in place of decoding."""
    time.sleep(seconds)


@dataclass(frozen=True)
class SimulatedBackend(Backend):
    """The simulated decoder of one landscape, whose best configuration is known.

    Args:
        target: gives the number of layers.
        seed: of the landscape.
        pace: real seconds of sleep per simulated second.
    """

    target: Target = field(metadata={"runtime": True})
    seed: int = 0
    pace: float = 1.0
    name: ClassVar[str] = "simulated"

    @property
    def exact(self) -> bool:
        """Always true: nothing is rounded."""
        return True

    @property
    def landscape(self) -> Landscape:
        """Costs and acceptance of the decoder."""
        return Landscape.draw(self.seed, self.target.layers)

    def describe(self) -> dict[str, Any]:
        """Return the seed of the landscape. The pace changes no sample."""
        return {"landscape": self.seed}

    def supports(self, kind: str) -> str | None:
        """Return None for the kinds that a landscape knows."""
        return None if kind in _KINDS else "it is not simulated"

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space without siblings and without thresholds that adapt."""
        return dataclasses.replace(space, siblings=0, stops=["length", "threshold"])

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        task: Task,
        load: Load = Load(),
        repeats: int = 1,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Sleep, and yield simulated samples; the arguments are those of :meth:`Backend.compare`.

        The errors of the clock depend on the task's seed alone, so that a trial measures the same in any process.
        """
        bench = SimulatedBench(self.landscape, Machine(task.seed), lambda seconds: pause(seconds * self.pace))
        return bench.compare(configs, prompts, repeats, task.seed, without, before)

    def close(self) -> None:
        """Do nothing, as nothing was started."""
