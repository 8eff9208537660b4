"""An ONNX file as a model that gives scores or labels; it has no gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from mycelia.attacks.model import CallableModel, Outputs
from mycelia.engine.errors import DataError
from mycelia.engine.plugins import import_extra

__all__ = ["onnx_model"]

_DTYPES: Final = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def onnx_model(path: Path, outputs: Outputs = "logits") -> CallableModel:
    """The model in a file, run by ONNX Runtime on the CPU.

    Args:
        path: the file.
        outputs: what its first output is.

    Raises:
        ConfigError: ONNX Runtime is not installed.
        DataError: no ONNX model, or one that does not take one array of floating point numbers.
    """
    runtime = import_extra("onnxruntime", "onnx", who=str(path))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own errors have no common class
        raise DataError(f"it cannot be read: {error}", rule="an ONNX model", who=str(path)) from error
    given = session.get_inputs()
    if len(given) != 1 or given[0].type not in _DTYPES:
        types = ", ".join(each.type for each in given)
        raise DataError(
            f"its inputs are {types}", rule="one array of floating point numbers [n, …]", who=str(path)
        )
    name, dtype, result = given[0].name, _DTYPES[given[0].type], session.get_outputs()[0].name
    fixed = given[0].shape[0] if given[0].shape and isinstance(given[0].shape[0], int) else 0

    def predict(x: Any) -> Any:
        rows = np.ascontiguousarray(x, dtype)
        if not fixed or len(rows) == fixed:
            return session.run([result], {name: rows})[0]
        parts = []
        for start in range(0, len(rows), fixed):  # a file may take batches of one size only
            part = rows[start : start + fixed]
            filled = np.concatenate([part, np.repeat(part[-1:], fixed - len(part), axis=0)])
            parts.append(session.run([result], {name: filled})[0][: len(part)])
        return np.concatenate(parts)

    return CallableModel(predict, outputs, numpy=True, name=path.name)
