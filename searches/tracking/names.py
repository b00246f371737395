"""Names under which a trial's results are stored, in Optuna's study and in MLflow."""

PREDICTED = "predicted_speedup"
"""The speedup that was predicted before the trial ran."""
DRIFTED = "drifted"
"""The number of prompts that were measured again because the machine's speed had moved."""
