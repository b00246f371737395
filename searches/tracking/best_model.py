"""The winner of a study as a model of MLflow: ``mlflow.pyfunc.load_model("models:/<study>@best").predict(["a prompt"])``.

MLflow stores the path of this file, not a pickled object, and runs it where the model is loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlflow
from mlflow.pyfunc.model import PythonModel

ALIAS = "best"
"""The alias of the version that the last finished search of a study registered."""


class BestModel(PythonModel):
    """Decode prompts with an export, on the device and with the dtype of ``model_config``."""

    def load_context(self, context: Any) -> None:
        """Load the export, and the target that it names."""
        import layerskip
        from layerskip.models.target import described_precision

        path = Path(context.artifacts["export"]) / "best.json"
        described = layerskip.Export.load(path).target
        self._target = layerskip.load_target(
            described["name"],
            described["revision"],
            described_precision(described),
            context.model_config["device"],
            quantization=described.get("quantization"),
        )
        self._export = layerskip.Export.load(path, self._target)
        self._drafter = layerskip.build_drafter(self._export.config, self._target)

    def predict(self, context: Any, model_input: list[str], params: dict[str, Any] | None = None) -> list[str]:
        """Return one text per prompt, of at most ``max_new_tokens`` of ``model_config``."""
        import layerskip

        sampling, length = self._export.sampling, context.model_config["max_new_tokens"]
        return [
            layerskip.generate(self._target, prompt, self._drafter, sampling=sampling, max_new_tokens=length).text
            for prompt in model_input
        ]


def save(files: Iterable[tuple[Path, str | None]], folder: Path) -> None:
    """Write a model of MLflow into a new folder, with ``best.json`` and the files that it names, below their own folders."""
    with tempfile.TemporaryDirectory() as place:
        for path, below in files:
            target = Path(place, "export", below or "")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        mlflow.pyfunc.save_model(
            folder,
            python_model=__file__,
            artifacts={"export": str(Path(place, "export"))},
            model_config={"device": "auto", "max_new_tokens": 256},
            pip_requirements=[],
        )


mlflow.models.set_model(BestModel())
