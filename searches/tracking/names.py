"""Names under which Optuna's study and MLflow store the results of a trial."""

PREDICTED = "predicted_speedup"
"""The speedup that was predicted before the trial ran."""
DRIFTED = "drifted"
"""The number of prompts that were measured again because the machine's speed had drifted."""
