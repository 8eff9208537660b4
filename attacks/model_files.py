"""A model that lies in a file or folder."""

from __future__ import annotations

from pathlib import Path

from mycelia.attacks.model import Model, Outputs, as_model
from mycelia.attacks.onnx_model import onnx_model
from mycelia.engine.data import Dataset
from mycelia.engine.trained import of_run

__all__ = ["model_of"]


def model_of(path: Path | str, dataset: Dataset | None = None, outputs: Outputs = "logits") -> Model:
    """The model of a run folder, or in an ONNX file.

    Args:
        path: of it.
        dataset: with inputs and classes of the model's shape; None: what the run was trained on.
        outputs: what it gives.

    Raises:
        ConfigError: no run, or ONNX Runtime is not installed.
        DataError: a file or checkpoint that is damaged, or of another model.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return onnx_model(path, outputs)
    return as_model(of_run(path, dataset).module, outputs)
