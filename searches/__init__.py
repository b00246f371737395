"""Programs that search, measure and verify. Environment variables of libraries are set before these are imported."""

import logging
import os
import sys

from searches.app.interrupt import guard_imports
from searches.app.streams import hold_descriptors, tolerate_loss

if sys.argv[:1] == ["-m"]:  # Python looks for the program to run in this package
    guard_imports()
    hold_descriptors()
    tolerate_loss()

# No telemetry and no advice at start. Hydra must not catch errors.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for each trial, with a server
os.environ["HYDRA_FULL_ERROR"] = "1"
# Threads that wait for another one sleep after 0.1 ms. By default they spin for milliseconds: where another program
# uses a core, the thread that is waited for does not get it, and a pass takes up to 70 times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Report an unreachable server after seconds; MLflow's default is minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
if sys.stderr is None or not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries
# Transformers imports torchao where it is installed, which then reports the kernels that this machine cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
