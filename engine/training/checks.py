"""Whether examples fit a program and its metrics, and whether a step went well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from mycelia.engine.data import Dataset, Examples
from mycelia.engine.errors import DataError, MyceliaError
from mycelia.engine.metrics import Metrics
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["check_examples", "check_finite_step", "parts_of"]

_SHOWN_IDS = 64


def parts_of(
    data: Dataset | Examples, eval_data: Examples | None, classes: int | None
) -> tuple[Dataset | None, Examples, Examples | None]:
    """The checked set where there is one, the training examples, and those to evaluate on.

    Raises:
        DataError: no examples, a value that is not finite, or a label that is not in `0..classes-1`.
    """
    if isinstance(data, Dataset):
        whole = data if eval_data is None else Dataset(data.name, data.train, eval_data, data.classes)
        return whole, whole.train, whole.test
    if classes is not None:
        return Dataset("examples", data, data if eval_data is None else eval_data, classes), data, eval_data
    if any(part is not None and len(part) == 0 for part in (data, eval_data)):
        raise DataError("there are no examples", rule="at least one", who="Trainer")
    return None, data, eval_data


def check_examples(
    program: Program, params: Tensors, buffers: Tensors, examples: Examples, metrics: Metrics
) -> None:
    """Refuse examples of another shape or dtype than the program's, and outputs that the metrics refuse.

    Raises:
        DataError: shapes or dtypes differ.
        ConfigError: the model's outputs do not fit the classes.
    """
    names, arrays = ("inputs", "targets"), (examples.inputs, examples.targets)
    rows = [torch.from_numpy(array[:2].copy()) for array in arrays]
    for name, own, found in zip(names, program.example or rows, rows, strict=True):
        if own.shape[1:] != found.shape[1:] or own.dtype != found.dtype:
            raise DataError(
                f"{name} are {found.dtype} of shape {list(found.shape[1:])} each, the program takes "
                f"{own.dtype} of shape {list(own.shape[1:])}",
                rule="examples look like the one the program was captured with",
                who="Trainer",
            )
    device = next((tensor.device for tensor in params.values()), torch.device("cpu"))
    with torch.no_grad():
        outputs = program.predict(params, buffers, rows[0].to(device))
    metrics.update(outputs, torch.zeros(len(rows[1])), rows[1].to(device))


def check_finite_step(step: int, numbers: Mapping[str, float], examples: Iterable[int]) -> None:
    """Refuse a step whose loss or gradient norm is not finite.

    Raises:
        MyceliaError: with the step and the ids of the batch's first 64 examples.
    """
    for name, value in numbers.items():
        if math.isfinite(value):
            continue
        ids = [str(example) for example in examples]
        shown = ", ".join(ids[:_SHOWN_IDS]) + (f", … ({len(ids)} in all)" if len(ids) > _SHOWN_IDS else "")
        raise MyceliaError(
            f"the {name} is {value} at step {step}, whose batch has the examples {shown}",
            rule="training stops where a loss or gradient is not finite",
            fix="lower the learning rate, set clip_norm, or look at these examples; the last checkpoint is "
            "intact",
            who="training",
        )
