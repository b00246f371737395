"""Held-out measurement of the best bridged and the best empty skips, with the winner rule of a study's finals.

All configurations are decoded on every prompt, so that any two of them can be compared in pairs. Plain decoding wins unless
another configuration is surely faster (:mod:`searches.study.finals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip import Measurement, PromptSet, SpeculativeConfig
from searches.bridges.points import EMPTY
from searches.study.bench import BASELINE, Bench, Row
from searches.study.finals import Finals, RunControl, measure_held_out
from searches.study.objective import MeasureSettings

Point = Mapping[str, Any]


@dataclass(frozen=True)
class BridgeFinals:
    """Measurements of the finalists.

    Args:
        configs: configurations by name: ``empty 1``, ``bridged 1`` and so on.
        predicted: predicted speedup of those that were scanned.
        finals: the winner and the evidence for it.
        rows: samples of each prompt.
    """

    configs: Mapping[str, SpeculativeConfig]
    predicted: Mapping[str, float]
    finals: Finals
    rows: Sequence[Row]

    def measured(self) -> dict[str, dict[str, Any]]:
        """Return each configuration compared with plain decoding, for a record. Prefill seconds are means per prompt."""
        measured = {}
        for name, config in self.configs.items():
            measurement = Measurement.of(self.rows, BASELINE, name)
            low, high = measurement.interval()
            fields = measurement.to_dict()
            measured[name] = {
                "config": without_folders(config),
                "speedup": measurement.speedup,
                "low": low,
                "high": high,
                "predicted": self.predicted.get(name),
                "tokens_per_second": fields["tokens_per_second"],
                "plain_tokens_per_second": fields["baseline_tokens_per_second"],
                "prefill_seconds": fields["prefill_seconds"] / len(self.rows),
                "plain_prefill_seconds": fields["baseline_prefill_seconds"] / len(self.rows),
                "acceptance_rate": fields["acceptance_rate"],
                "losslessness": fields["losslessness"]["verdict"],
            }
        return measured

    def over_empty(self) -> dict[str, Any] | None:
        """Return the paired speedup of every bridged skip over the fastest measured empty skip; None without both."""
        empty = [name for name in self.configs if name.startswith("empty")]
        bridged = [name for name in self.configs if name.startswith("bridged")]
        if not empty or not bridged:
            return None
        best = max(empty, key=lambda name: Measurement.of(self.rows, BASELINE, name).speedup)
        ratios: dict[str, Any] = {"empty": best}
        for name in bridged:
            ratio = Measurement.of(self.rows, best, name)
            low, high = ratio.interval()
            ratios[name] = {"ratio": ratio.speedup, "low": low, "high": high}
        return ratios


def measure_finalists(
    finalists: Mapping[str, Point],
    others: Mapping[str, SpeculativeConfig],
    bench: Bench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    folder: Path | None,
    on_prompt: Callable[[], None],
) -> BridgeFinals:
    """Decode every prompt with all configurations.

    Args:
        finalists: points whose configurations are measured, by name.
        others: further configurations, without predictions.
        bench: measures them.
        prompts: held-out prompts, with categories in turn.
        settings: the settings of measuring.
        seed: the seed of the order of configurations.
        folder: keeps rows as they are measured; None keeps nothing.
        on_prompt: called after each prompt.

    """
    configs = {name: SpeculativeConfig.from_dict(point["config"]) for name, point in finalists.items()} | dict(others)
    predicted = {name: float(point["predicted"]) for name, point in finalists.items()}
    expected = dict.fromkeys(configs, 1.0) | predicted
    control = RunControl(folder, on_prompt)
    finals, rows = measure_held_out(configs, expected, bench, prompts, settings, seed, control, drop_slower=False)
    return BridgeFinals(configs, predicted, finals, rows)


def choose_finalists(points: Sequence[Point], maximum: int) -> dict[str, Point]:
    """Return the points with the highest predictions, at most ``maximum`` empty and ``maximum`` bridged ones."""
    finalists = {}
    for name, empty in (("empty", True), ("bridged", False)):
        candidates = [point for point in points if (point["bridge"] == EMPTY) is empty and point["fit"]["helps"]]
        best: dict[tuple[str, str], Point] = {}
        for point in sorted(candidates, key=lambda point: -point["predicted"]):
            best.setdefault((point["mask"], point["bridge"]), point)
        for number, point in enumerate(list(best.values())[:maximum]):
            finalists[f"{name} {number + 1}"] = point
    return finalists


def without_folders(config: SpeculativeConfig) -> dict[str, Any]:
    """Return a configuration for a record, with trained parts named without their parent folders."""
    fields = config.to_dict()
    return fields | {name: Path(fields[name]).name for name in ("bridge", "draft_head", "head") if name in fields}
