"""Programs that search, compare and measure. What libraries read from the environment is set before any is imported."""

import os
import sys

# No telemetry, no start-up advice, and Hydra must hand its errors on to us.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ["HYDRA_FULL_ERROR"] = "1"
# A server that cannot be reached shall be noticed in seconds, not in MLflow's default of minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # for the bars of libraries; ours look for themselves
