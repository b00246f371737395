"""What all evaluation programs share: checks, parts, resumed work, criteria, and the record and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from layerskip import PromptSet, Sampling, Target
from layerskip.files import digest, write_json
from layerskip.models.environment import machine
from layerskip.models.loading import DTYPES
from searches.app.application import NOT_CONFIRMED
from searches.app.checks import check_list, check_number, check_seed, check_whole
from searches.backends.layerskip import LayerskipBackend
from searches.predict.preparation import ScanSettings
from searches.report.tables import as_markdown
from searches.results import RESULTS_VERSION, ResultLog
from searches.space.search_space import SearchSpace
from searches.study.bench import ModelBench
from searches.study.objective import MeasureSettings


@dataclass(frozen=True)
class Count:
    """How often something happened, or a metric, and the least and the greatest share that pass, if any."""

    name: str
    times: float
    of: float = 1
    minimum: float | None = None
    maximum: float | None = None

    @property
    def share(self) -> float:
        return self.times / self.of if self.of else 0.0

    @property
    def passed(self) -> bool:
        """Whether the criterion is met. A metric that is not a number misses it."""
        return (self.minimum is None or self.share >= self.minimum) and (self.maximum is None or self.share <= self.maximum)

    def cells(self) -> dict[str, str]:
        limits = {"at least": self.minimum, "at most": self.maximum}
        return {
            "counted": self.name,
            "times": f"{self.times:g} of {self.of:g}",
            "share": f"{self.share:.3g}",
            "criterion": ", ".join(f"{limit} {share:g}" for limit, share in limits.items() if share is not None),
            "result": "met" if self.passed else "MISSED",
        }


class Parts:
    """The parts of a configuration that measures layer skipping on a real target."""

    def __init__(self, config: DictConfig) -> None:
        self.measuring: MeasureSettings = instantiate(config.measure)
        self.scanning: ScanSettings = instantiate(config.scan)
        self.sampling: Sampling = instantiate(config.sampling)
        tune, held_out = instantiate(config.prompts).split()
        self.prompts: PromptSet = tune.take(self.measuring.prompts)
        self.held_out: PromptSet = held_out.take(self.measuring.held_out_prompts)
        self.target: Target = instantiate(config.target)
        self.space: SearchSpace = instantiate(config.space, layers=self.target.layers)
        self.bench = ModelBench(LayerskipBackend(self.target), self.sampling, self.measuring.max_new_tokens)
        settings = [OmegaConf.to_container(config[part], resolve=True) for part in ("measure", "scan", "sampling", "space")]
        self.identity = [self.target.digest, machine(self.target), self.prompts.digest, self.held_out.digest, settings]
        """What results depend on, except what each program adds."""


def random_target(fields: Mapping[str, Any], dtype: str, device: str | torch.device, seed: int = 0) -> Target:
    """Return a random target that never ends an output, from fields of a configuration, of Llama by default."""
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings = AutoConfig.for_model(**{"model_type": "llama", **fields, **ends})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=DTYPES[dtype])
    return Target(model.eval(), pack_weights=False)


def check_fields(config: DictConfig, minimum: Mapping[str, int], limits: Sequence[str] = ()) -> None:
    """Check the seed, whole numbers or lists of them by their lowest value, and limits of criteria, which may be null."""
    if "seed" in config:
        check_seed(config.seed)
    for name, lowest in minimum.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, ListConfig):
            check_list(name, value, or_empty=False)
        for item in value if isinstance(value, ListConfig) else [value]:
            check_whole(name, item, lowest)
    for name in limits:
        if (limit := OmegaConf.select(config, name)) is not None:
            check_number(name, limit, or_zero=True)


def resume(
    config: DictConfig, program: str, identity: Sequence[Any], jobs: Mapping[str, Callable[[], Any]], unit: str
) -> dict[str, Any]:
    """Do the jobs that no earlier run has finished, and return the results of all of them by name.

    ``identity`` is all that results depend on, beside the name of their job and the version of the program.
    """
    log = ResultLog(Path(config.outputs) / program / f"{digest([RESULTS_VERSION, *identity])[:12]}.jsonl")
    for name, job in tqdm(jobs.items(), unit=unit, disable=None):
        if name not in log:
            log.add(name, job())
    return {name: log[name] for name in jobs}


def conclude(config: DictConfig, name: str, record: Mapping[str, Any], counts: Sequence[Count]) -> None:
    """Write a record with its configuration and its counts, and print the criteria; exit with code 4 if one is missed."""
    file = Path(config.record or Path(config.outputs) / name)
    judged = [asdict(count) | {"share": count.share, "passed": count.passed} for count in counts]
    write_json(file, {**record, "config": OmegaConf.to_container(config, resolve=True), "counts": judged})
    print("\n".join(as_markdown([count.cells() for count in counts])))
    print(f"wrote {file}")
    if not all(count.passed for count in counts):
        sys.exit(NOT_CONFIRMED)
