"""Names under which Optuna's study and MLflow store the results of a trial."""

PREDICTED = "predicted_speedup"  # before the trial ran
DRIFTED = "drifted"  # the number of prompts that were measured again because the machine's speed had drifted
ENGINE_FAILED = "the engine failed"  # the beginning of the reason of a trial that the back end could not run
ENGINE_LOG = "engine_log"  # the last lines of the engine's log in such a trial
METRICS = "metrics"  # figures that the back end reports with the samples of a trial, such as throughput and latencies
STARTUP_SECONDS = "startup_seconds"  # one of these: of compiling and capturing passes, or of starting an engine
WORKER = "worker"  # the name of the worker that ran a trial; trials of a study that one process runs have none
DEVICE = "device"  # the type of that worker's device
RETRY_OF = "retry_of"  # the number of the interrupted trial whose choices a trial tries again
