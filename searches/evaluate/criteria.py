"""What all evaluation programs share: checks, the parts of a configuration, criteria, and the record they end with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from layerskip import PromptSet, Sampling, Target
from layerskip.files import write_json
from layerskip.models.loading import DTYPES
from searches.app.application import NOT_CONFIRMED
from searches.app.checks import check_list, check_seed, check_whole
from searches.backends.layerskip import LayerskipBackend
from searches.predict.preparation import ScanSettings
from searches.space.search_space import SearchSpace
from searches.study.bench import ModelBench
from searches.study.objective import MeasureSettings


@dataclass(frozen=True)
class Count:
    """Number of times that something happened, or a measured metric, and the criterion for it.

    Args:
        times: how often it happened, or the metric.
        minimum: smallest share that passes; None sets no lower limit.
        maximum: largest share that passes; None sets no upper limit.
    """

    name: str
    times: float
    of: float = 1
    minimum: float | None = None
    maximum: float | None = None

    @property
    def share(self) -> float:
        """``times / of``; 0.0 if ``of`` is 0."""
        return self.times / self.of if self.of else 0.0

    @property
    def passed(self) -> bool:
        """True if the criterion is met; False if the metric is not a number."""
        return (self.minimum is None or self.share >= self.minimum) and (self.maximum is None or self.share <= self.maximum)

    def cells(self) -> list[str]:
        """Return the count as a row of the table of criteria."""
        limits = {"at least": self.minimum, "at most": self.maximum}
        asked = ", ".join(f"{limit} {share:g}" for limit, share in limits.items() if share is not None)
        return [self.name, f"{self.times:g} of {self.of:g}", f"{self.share:.3g}", asked, "met" if self.passed else "MISSED"]


class Parts:
    """The parts of a configuration that measures layer skipping with empty skips on a real target."""

    def __init__(self, config: DictConfig) -> None:
        self.measuring: MeasureSettings = instantiate(config.measure)
        self.scanning: ScanSettings = instantiate(config.scan)
        self.sampling: Sampling = instantiate(config.sampling)
        tune, held_out = instantiate(config.prompts).split()
        self.prompts: PromptSet = tune.take(self.measuring.prompts)
        self.held_out: PromptSet = held_out.take(self.measuring.held_out_prompts)
        self.target: Target = instantiate(config.target)
        self.space: SearchSpace = instantiate(config.space, layers=self.target.layers)
        self.space.refuse_fitted("only empty skips are compared")
        self.bench = ModelBench(LayerskipBackend(self.target), self.sampling, self.measuring.max_new_tokens)


def random_target(
    fields: Mapping[str, Any],
    dtype: str,
    device: str | torch.device,
    seed: int = 0,
    name: str = "random Llama",
    pack_weights: bool = False,
) -> Target:
    """Make a target with random weights on a device from fields of transformers' configuration, of Llama by default.

    It never ends an output by itself.
    """
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings = AutoConfig.for_model(**{"model_type": "llama"} | dict(fields) | ends)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=DTYPES[dtype])
    return Target(model.eval(), name=name, pack_weights=pack_weights)


def check_fields(config: DictConfig, minimum: Mapping[str, int]) -> None:
    """Check the seed, and whole numbers or lists of them by their lowest value.

    Raises:
        InputError: a field is wrong; the message begins with its name.
    """
    check_seed(config.seed)
    for name, lowest in minimum.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, ListConfig):
            check_list(name, value, or_empty=False)
        for item in value if isinstance(value, ListConfig) else [value]:
            check_whole(name, item, lowest)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def conclude(config: DictConfig, name: str, record: dict[str, Any], counts: Sequence[Count]) -> None:
    """Write a record with its counts and print the criteria.

    Args:
        config: names another file in ``record``; its ``outputs`` is the folder.

    Raises:
        SystemExit: a criterion is missed; exit code 4.
    """
    file = Path(config.record or Path(config.outputs) / name)
    judged = [asdict(count) | {"share": count.share, "passed": count.passed} for count in counts]
    write_json(file, record | {"counts": judged})
    if counts:
        print(table(["counted", "times", "share", "criterion", "result"], [count.cells() for count in counts]))
    print(f"wrote {file}")
    if not all(count.passed for count in counts):
        sys.exit(NOT_CONFIRMED)
