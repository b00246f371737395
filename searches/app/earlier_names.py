"""Names of earlier versions that stored files still carry, or that users may still type."""

from __future__ import annotations

RENAMED = {("measure", "foretell"): "measure=predictions", ("measure", "compare"): "measure=race"}
"""Choices that are refused, with the choices that replace them."""

REMOVED = {"records": "searches.evaluate.predictions evaluates one run; compare the records themselves"}
"""Fields that are refused, with the reason."""

MOVED = {
    "searches.objective.MeasureSettings": "searches.study.objective.MeasureSettings",
    "searches.space.SearchSpace": "searches.space.search_space.SearchSpace",
    "searches.study.StudySettings": "searches.study.study.StudySettings",
    "searches.foresight.ScanSettings": "searches.predict.preparation.ScanSettings",
    "searches.proposals.ProposalSettings": "searches.predict.proposals.ProposalSettings",
    "searches.bridging_settings.BridgingSettings": "searches.training.bridge_settings.BridgingSettings",
    "searches.composition.load_local": "searches.app.local_target.load_local",
    "searches.gaussian.GaussianProcess": "searches.study.gaussian_process.GaussianProcess",
}
"""Values of ``_target_`` in configuration files that are refused, with today's values."""

PREDICTIONS_SCHEMA = "layerskip.foretold/1"
"""The schema of records that compare predictions with measurements."""

PREPARATION_SECONDS = "foresight_seconds"
"""The user attribute of an Optuna study that holds the seconds of profiling, scans and texts."""

BRIDGES_FOLDER = "shelf"
"""The folder of fitted bridges in the outputs folder; exports name paths in it."""
