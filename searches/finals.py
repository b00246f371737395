"""Which configuration wins? The best few of a search, measured again beside plain decoding on prompts it never saw.

A configuration beats plain decoding when the whole 95 % interval of its held-out speedup lies above 1; if none does, plain
decoding wins.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig

from .bench import BASELINE, Bench
from .objective import MeasureSettings
from .standings import is_lossless, ranking

_FINALS = "finals"
_LEAST_PROMPTS = 5  # of fewer, resampling knows next to nothing about the next one
_HELD_OUT_SEED = 1_000_003  # draws and orders other than any trial's


@dataclass(frozen=True)
class Finalist:
    """A configuration, what the search thought of it, and what held-out prompts say."""

    config: SpeculativeConfig
    search_speedup: float
    held_out: dict[str, Any]

    @property
    def eligible(self) -> bool:
        """Whether it kept the output, and its whole interval, over enough prompts to be one, lies above 1."""
        enough = self.held_out["prompts"] >= _LEAST_PROMPTS
        return is_lossless(self.held_out) and enough and self.held_out["speedup_low"] > 1.0


@dataclass(frozen=True)
class Finals:
    """The finalists, best first, plain decoding's own figures, and the seconds that measuring took."""

    finalists: tuple[Finalist, ...]
    baseline: dict[str, Any]
    seconds: float

    @property
    def winner(self) -> Finalist:
        """The best eligible finalist, else plain decoding."""
        plain = Finalist(SpeculativeConfig(), 1.0, self.baseline)
        return next((finalist for finalist in self.finalists if finalist.eligible), plain)


def measure_finals(
    study: optuna.Study,
    bench: Bench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> Finals:
    """Measure the finalists on held-out prompts, all interleaved; what the study holds already is not measured again."""
    chosen = [(standing.config, standing.speedup) for standing in ranking(study)[: settings.finalists]]
    asked = {"configs": [config.to_dict() for config, _ in chosen], "prompts": prompts.digest}
    stored = study.user_attrs.get(_FINALS)
    if stored is None or stored["asked"] != json.loads(json.dumps(asked)):
        start = time.monotonic()
        configs = {str(i): config for i, (config, _) in enumerate(chosen)}
        rows = []
        for row in bench.compare(configs, prompts, settings.held_out_repeats, seed + _HELD_OUT_SEED):
            rows.append(row)
            on_prompt()
        found = {name: Measurement.of(rows, BASELINE, name).to_dict() for name in (BASELINE, *configs)}
        stored = {"asked": asked, "found": found, "seconds": time.monotonic() - start}
        study.set_user_attr(_FINALS, stored)
    finalists = [Finalist(config, value, stored["found"][str(i)]) for i, (config, value) in enumerate(chosen)]
    finalists.sort(key=lambda finalist: -finalist.held_out["speedup"])
    return Finals(tuple(finalists), stored["found"][BASELINE], stored["seconds"])
