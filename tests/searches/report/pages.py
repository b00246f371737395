"""Studies of which pages are written in tests: of an earlier version, and with known speedups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import create_trial

from layerskip import SpeculativeConfig
from searches.study.finals import Finals, measure_finals
from searches.study.objective import MeasureSettings
from searches.tracking.names import PREDICTED, WORKER
from tests.searches.known import HELD_OUT, Known, lookup, run_known
from tests.searches.programs import journal_study

EARLIER = Path(__file__).parents[1] / "data" / "earlier" / "results"
EARLIER_STUDY = "model-tpe-seed0-19d590"
EARLIER_LAYERS = 10

SKIP = SpeculativeConfig("layer_skip", 4, "layers:2")


def earlier_study(folder: Path) -> optuna.Study:
    """Return the study of an earlier version, from a copy of its journal: reading a journal may write next to it."""
    (folder / EARLIER_STUDY).mkdir()
    shutil.copy(EARLIER / EARLIER_STUDY / "journal.log", folder / EARLIER_STUDY)
    return journal_study(folder, EARLIER_STUDY)


def known_study() -> tuple[optuna.Study, Finals]:
    """Return a study of two workers with skips, lookups, predictions, an interrupted trial, and its finals."""
    bench = Known({lookup(4): 1.6, lookup(6): 1.2, lookup(8): 0.7, SKIP: 1.4})
    measured = run_known(bench, lookup(4), lookup(6), lookup(8), SKIP, SpeculativeConfig())
    study = optuna.create_study(study_name="known <b>&amp;", direction="maximize")
    for trial in measured.trials:
        attributes: dict[str, Any] = trial.user_attrs | {"seconds": 2.0, WORKER: f"worker {trial.number % 2}"}
        if trial.number < 3:
            attributes[PREDICTED] = 1.0 + trial.number / 4
        attributes["measurement"] = attributes["measurement"] | {"peak_memory_bytes": 2**20 * (100 + trial.number)}
        trial.user_attrs = attributes
        study.add_trial(trial)
    study.add_trial(create_trial(state=optuna.trial.TrialState.FAIL, user_attrs={"config": SKIP.to_dict()}))
    return study, measure_finals(measured, bench, HELD_OUT, MeasureSettings(finalists=3), 0)


def figures_of(page: str) -> dict[str, Any]:
    """Return the figures that a page holds."""
    start = '<script id="figures" type="application/json">'
    figures: dict[str, Any] = json.loads(page.partition(start)[2].partition("</script>")[0])
    return figures
