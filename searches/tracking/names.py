"""Names under which Optuna's study and MLflow store the results of a trial."""

PREDICTED = "predicted_speedup"
"""The speedup that was predicted before the trial ran."""
DRIFTED = "drifted"
"""The number of prompts that were measured again because the machine's speed had drifted."""
WORKER = "worker"
"""The name of the worker that ran a trial; trials of a study that one process runs have none."""
