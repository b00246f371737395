"""The winner of a study as a model of MLflow: ``mlflow.pyfunc.load_model("models:/<study>@best").predict(["a prompt"])``.

MLflow stores the path of this file, not a pickled object, and runs it where the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
from mlflow.pyfunc.model import PythonModel

import layerskip
from layerskip.export import attached_folders
from layerskip.models.target import described_precision

ALIAS = "best"
"""The alias of the version that the last finished search of a study registered."""


class BestModel(PythonModel):
    """Decode prompts with an export, on the device and with the dtype of ``model_config``."""

    def load_context(self, context: Any) -> None:
        self._export = layerskip.Export.load(context.artifacts["export"])
        described = self._export.target
        self._target = layerskip.load_target(
            described["name"],
            described["revision"],
            described_precision(described),
            context.model_config["device"],
            quantization=described.get("quantization"),
        )
        self._export.check(self._target)
        self._drafter = layerskip.build_drafter(self._export.config, self._target)

    def predict(self, context: Any, model_input: list[str], params: dict[str, Any] | None = None) -> list[str]:
        """Return one text per prompt, of at most ``max_new_tokens`` of ``model_config``."""
        sampling, length = self._export.sampling, context.model_config["max_new_tokens"]
        return [
            layerskip.generate(self._target, prompt, self._drafter, sampling=sampling, max_new_tokens=length).text
            for prompt in model_input
        ]


def save(export: Path, folder: Path) -> None:
    """Write a model of MLflow into a new folder, with an export and the trained modules beside it that it names."""
    mlflow.pyfunc.save_model(
        folder,
        python_model=__file__,
        artifacts={"export": str(export)} | {place.name: str(place) for place in attached_folders(export)},
        model_config={"device": "auto", "max_new_tokens": 256},
        pip_requirements=[],
    )


mlflow.models.set_model(BestModel())
