"""Studies of which pages are written in tests, with known speedups."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from layerskip import SpeculativeConfig
from searches.study.finals import Finals, measure_finals
from searches.study.objective import MeasureSettings
from searches.study.study import DUPLICATE_OF, SETTINGS
from searches.tracking.names import DEVICE, ENGINE_FAILED, METRICS, PREDICTED, RETRY_OF, WORKER
from tests.searches.known import HELD_OUT, Known, lookup, run_known

SKIP = SpeculativeConfig("layer_skip", 4, "layers:2")


def known_study() -> tuple[optuna.Study, Finals]:
    """Return a study of two workers with skips, lookups, predictions, an interrupted trial, and its finals."""
    bench = Known({lookup(4): 1.6, lookup(6): 1.2, lookup(8): 0.7, SKIP: 1.4})
    measured = run_known(bench, lookup(4), lookup(6), lookup(8), SKIP, SpeculativeConfig())
    study = optuna.create_study(study_name="known <b>&amp;", direction="maximize")
    for trial in measured.trials:
        attributes: dict[str, Any] = trial.user_attrs | {"seconds": 2.0, WORKER: f"worker {trial.number % 2}"}
        if trial.number < 3:
            attributes[PREDICTED] = 1.0 + trial.number / 4
        trial.user_attrs = attributes
        study.add_trial(trial)
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"config": SKIP.to_dict()}))
    return study, measure_finals(measured, bench, HELD_OUT, MeasureSettings(finalists=3), 0)


def workers_study() -> optuna.Study:
    """Return a running study of three workers. One was killed, and its trial taken over, interrupted, and taken over."""
    measured = run_known(Known({lookup(4): 1.6, SKIP: 1.4}), lookup(4), SKIP, SpeculativeConfig())
    study = optuna.create_study(study_name="workers", direction="maximize")
    start = datetime.now() - timedelta(seconds=400)
    for number, (trial, worker) in enumerate(zip(measured.trials, ("b/2", "b/10", "a/1"), strict=True)):
        trial.user_attrs = trial.user_attrs | {"seconds": 60.0, WORKER: worker, DEVICE: "a processor, 8 threads"}
        trial.datetime_start = start + timedelta(seconds=100 * number)
        study.add_trial(trial)
    again = {"config": SKIP.to_dict()}
    for attributes, state, seconds in (
        ({WORKER: "b/2"}, TrialState.FAIL, 70),
        ({WORKER: "b/10", RETRY_OF: 3, "seconds": 5.0}, TrialState.FAIL, 300),
        ({WORKER: "b/2", "reason": "trial 4 measures the same configuration", DUPLICATE_OF: 4}, TrialState.FAIL, 302),
        ({WORKER: "a/1", RETRY_OF: 4}, TrialState.RUNNING, 310),
    ):
        trial = create_trial(state=state, user_attrs=again | attributes)
        trial.datetime_start = start + timedelta(seconds=seconds)
        study.add_trial(trial)
    return study


def engine_study() -> optuna.Study:
    """Return a study on an engine that reports throughput and latencies, with a trial that the engine could not run."""
    measured = run_known(Known({lookup(4): 1.5, lookup(6): 1.4, lookup(8): 1.3}), lookup(4), lookup(6), lookup(8))
    study = optuna.create_study(study_name="engine", direction="maximize")
    study.set_user_attr(SETTINGS, {"backend.name": "vllm", "workload.concurrency": 8, "target.name": "a/model"})
    plain = {"baseline_throughput": 70.0, "baseline_tpot_p50": 0.04, "baseline_tpot_p95": 0.05}
    loads = ((100.0, 0.02, 0.03), (90.0, 0.03, 0.06), (80.0, 0.01, 0.01))  # the second is behind the first in both
    for trial, (throughput, median, tail) in zip(measured.trials, loads, strict=True):
        load = {"throughput": throughput, "tpot_p50": median, "tpot_p95": tail, "ttft_p50": 0.2, "ttft_p95": 0.4}
        trial.user_attrs = trial.user_attrs | {"seconds": 30.0, METRICS: load | plain}
        study.add_trial(trial)
    failed = {"config": lookup(2).to_dict(), "seconds": 9.0, "reason": f"{ENGINE_FAILED}: out of memory"}
    study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs=failed))
    return study


def metrics_of(page: str) -> dict[str, Any]:
    """Return the figures that a page holds."""
    start = '<script id="figures" type="application/json">'
    figures: dict[str, Any] = json.loads(page.partition(start)[2].partition("</script>")[0])
    return figures
