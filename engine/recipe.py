"""How every process builds the same Program from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mycelia.engine.capture import capture
from mycelia.engine.data import Dataset
from mycelia.engine.errors import ConfigError
from mycelia.engine.losses import get
from mycelia.engine.models import build
from mycelia.engine.program import Program
from mycelia.engine.transforms.compile import example_batch

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """A Program by name: calling it captures the model with its loss.

    Attributes:
        model: a name of `engine/models.py`, or `package.module:function`.
        options: the model's options.
        loss: a name of `engine/losses.py`, or `package.module:function`.
        input_shape: of one example.
        classes: number of classes, None for regression.
        example: two examples of zeros (inputs, targets), for their shapes and dtypes.
        seed: of the initial values.
    """

    model: str
    options: Mapping[str, Any]
    loss: str
    input_shape: tuple[int, ...]
    classes: int | None
    example: tuple[torch.Tensor, torch.Tensor] = field(repr=False)
    seed: int = 0

    @classmethod
    def of(cls, dataset: Dataset, model: str, options: Mapping[str, Any], loss: str, seed: int) -> Recipe:
        """The recipe for a data set's shapes."""
        example = example_batch(dataset.train.inputs, dataset.train.targets, 2)
        if example is None:  # pragma: no cover - two rows are always a batch
            raise ValueError("no example")
        shape = tuple(int(size) for size in dataset.train.inputs.shape[1:])
        return cls(model, dict(options), loss, shape, dataset.classes, example, seed)

    def __call__(self) -> Program:
        """Build the model and capture it."""
        model = build(self.model, self.input_shape, self.classes, seed=self.seed, **self.options)
        program = capture(model, get(self.loss), self.example)
        self._check_outputs(program)
        return program

    def _check_outputs(self, program: Program) -> None:
        """One class per output: a label beyond the outputs would only be met in training."""
        params, buffers = program.init()
        with torch.no_grad():
            outputs = program.predict(params, buffers, self.example[0])
        if self.classes is None or not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
            return
        binary = self.classes == 2 and outputs.shape[1] == 1
        if outputs.shape[1] < self.classes and not binary:
            raise ConfigError(
                f"the model has {outputs.shape[1]} outputs and the data {self.classes} classes",
                rule="one output per class",
                fix="build the model with the data's number of classes",
                who=f"model {self.model}",
            )
