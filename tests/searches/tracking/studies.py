"""A study with trials of several drafters, as its runs are compared in MLflow."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState, create_trial

from layerskip import Measurement, SpeculativeConfig
from searches.study.bench import BASELINE
from tests.searches.known import PROMPTS, Known, lookup

SKIP = SpeculativeConfig("layer_skip", 3, "attention:1;layers:2-3")
CASCADE = SpeculativeConfig("cascade", members=(lookup(8), SpeculativeConfig("token_recycling", 6)))
SPEEDUPS = {
    SpeculativeConfig(): 1.0,
    lookup(4): 1.6,
    SKIP: 0.8,
    SpeculativeConfig("layer_skip", 2, "mlp:3-4"): 1.1,
    SpeculativeConfig("token_recycling", 6): 1.4,
    CASCADE: 1.9,
}
"""The configuration of each trial, in order, and its speedup over ten tokens per second."""
NOT_RUN = lookup(5)
"""The configuration of a last trial, which was not run."""


def compared_study() -> optuna.Study:
    """Return the finished study."""
    study, bench = optuna.create_study(direction="maximize"), Known(SPEEDUPS)
    for config, speedup in SPEEDUPS.items():
        measured = Measurement.of(bench.compare({"candidate": config}, PROMPTS, 1, 0), BASELINE, "candidate")
        attributes = {
            "config": config.to_dict(),
            "measurement": measured.to_dict() | {"acceptance_rate": 0.5},
            "table": measured.table(),
            "seconds": 1.0,
        }
        study.add_trial(create_trial(value=speedup, user_attrs=attributes))
    not_run = {"config": NOT_RUN.to_dict(), "seconds": 0.1, "reason": "cannot win"}
    study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs=not_run))
    return study
