"""Which skips really decode fastest, bridged ones or empty ones? Held-out prompts decide, by the rule of a study's finals.

Of both, those that are foretold to be fastest are decoded on every prompt, so that each may be paired with any other; plain
decoding wins where nothing is surely faster (:mod:`searches.study.finals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip import Measurement, PromptSet, SpeculativeConfig
from searches.bridging.comparison import EMPTY
from searches.study.bench import BASELINE, Bench, Row
from searches.study.finals import Finals, compete
from searches.study.objective import MeasureSettings

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Contest:
    """What was decoded.

    Args:
        configs: by name: ``empty 1``, ``bridged 1`` and so on.
        predicted: what was foretold of those that were scanned.
        finals: as of a study whose finalists these are.
        rows: the samples of each prompt.
    """

    configs: Mapping[str, SpeculativeConfig]
    predicted: Mapping[str, float]
    finals: Finals
    rows: Sequence[Row]

    def measured(self) -> dict[str, dict[str, Any]]:
        """Each beside plain decoding, for a record; what comes before the first token is told as a prompt's mean."""
        found = {}
        for name, config in self.configs.items():
            measurement = Measurement.of(self.rows, BASELINE, name)
            low, high = measurement.interval()
            said = measurement.to_dict()
            found[name] = {
                "config": named(config),
                "speedup": measurement.speedup,
                "low": low,
                "high": high,
                "predicted": self.predicted.get(name),
                "tokens_per_second": said["tokens_per_second"],
                "plain_tokens_per_second": said["baseline_tokens_per_second"],
                "prefill_seconds": said["prefill_seconds"] / len(self.rows),
                "plain_prefill_seconds": said["baseline_prefill_seconds"] / len(self.rows),
                "acceptance_rate": said["acceptance_rate"],
                "losslessness": said["losslessness"]["verdict"],
            }
        return found

    def over_empty(self) -> dict[str, Any] | None:
        """Every bridged one, prompt by prompt, over the empty one that was measured to be fastest; None without either."""
        empty = [name for name in self.configs if name.startswith("empty")]
        bridged = [name for name in self.configs if name.startswith("bridged")]
        if not empty or not bridged:
            return None
        best = max(empty, key=lambda name: Measurement.of(self.rows, BASELINE, name).speedup)
        found: dict[str, Any] = {"empty": best}
        for name in bridged:
            ratio = Measurement.of(self.rows, best, name)
            low, high = ratio.interval()
            found[name] = {"ratio": ratio.speedup, "low": low, "high": high}
        return found


def contest(
    chosen: Mapping[str, Point],
    others: Mapping[str, SpeculativeConfig],
    bench: Bench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    folder: Path | None,
    on_prompt: Callable[[], None],
) -> Contest:
    """Decode every prompt with all of them.

    Args:
        chosen: points whose configurations are measured, by name.
        others: further configurations, of which nothing was foretold.

    The others are those of :func:`~searches.study.finals.compete`.
    """
    configs = {name: SpeculativeConfig.from_dict(point["config"]) for name, point in chosen.items()} | dict(others)
    predicted = {name: float(point["predicted"]) for name, point in chosen.items()}
    before = dict.fromkeys(configs, 1.0) | predicted
    finals, rows = compete(configs, before, bench, prompts, settings, seed, folder, on_prompt, leaving=False)
    return Contest(configs, predicted, finals, rows)


def choose(points: Sequence[Point], most: int) -> dict[str, Point]:
    """The configurations that are foretold to be fastest, so many of those that skip emptily and of those bridged."""
    chosen = {}
    for name, kinds in (("empty", True), ("bridged", False)):
        some = [point for point in points if (point["bridge"] == EMPTY) is kinds and point["fit"]["helps"]]
        best: dict[tuple[str, str], Point] = {}
        for point in sorted(some, key=lambda point: -point["predicted"]):
            best.setdefault((point["mask"], point["bridge"]), point)
        for number, point in enumerate(list(best.values())[:most]):
            chosen[f"{name} {number + 1}"] = point
    return chosen


def named(config: SpeculativeConfig) -> dict[str, Any]:
    """A configuration for a record, what it was trained by named without the place."""
    fields = config.to_dict()
    return fields | {name: Path(fields[name]).name for name in ("bridge", "draft_head", "head") if name in fields}
