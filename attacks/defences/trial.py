"""A defence tried on two examples, so that a mistake is known before anything is trained or written."""

from __future__ import annotations

import numpy as np
import torch

from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.model import as_model
from mycelia.engine.data import Dataset
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Program

__all__ = ["try_on"]


def try_on(defence: TrainingDefence, program: Program, dataset: Dataset) -> None:
    """Attack the examples with the smallest and the largest input.

    Raises:
        ConfigError: data without classes, a model whose outputs are no scores for them, or one that the
            defence refuses.
        DataError: inputs that are not floating point, or beyond the bounds of the defence.
    """
    if dataset.classes is None:
        raise ConfigError(
            f"{dataset.name} has no classes",
            rule="an attack changes which class a model gives",
            fix="take out [defence], or use data with classes",
            who="defence",
        )
    defence.check_program(program)
    examples = dataset.train
    flat = examples.inputs.reshape(len(examples), -1)
    rows = np.array([flat.min(1).argmin(), flat.max(1).argmax()])
    inputs, targets = (torch.from_numpy(array[rows]) for array in (examples.inputs, examples.targets))
    params, buffers = program.init()
    defence.craft(Batch(as_model(program, params=params, buffers=buffers), inputs, targets, rows, 0))
