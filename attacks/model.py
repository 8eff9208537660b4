"""What an attack may ask of a model: scores or labels, and gradients with respect to inputs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mycelia.attacks.input_passes import input_pass
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["Model", "Normalised", "Outputs", "as_model", "with_normalisation"]

Outputs = Literal["logits", "probabilities", "labels"]
_KINDS = ("logits", "probabilities", "labels")


class Model(ABC):
    """A model as attacks see it.

    Attributes:
        offers: what may be asked for: "gradient", "score", "label".
        name: for reports.
    """

    offers: frozenset[str] = frozenset({"score", "label"})
    name: str = "model"

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Logits [n, classes], or labels [n], without a gradient.

        Args:
            x: inputs [n, …].
        """

    def traced(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of which a gradient with respect to x may be taken.

        Raises:
            ConfigError: this model has none.
        """
        raise ConfigError(
            f"{self.name} gives no gradients", rule='an attack that needs "score" or "label"', who="model"
        )

    def gradient(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of each row's loss with respect to that row.

        Args:
            x: inputs [n, …], floating point.
            loss: of logits [n, classes], a number per row.

        Returns:
            gradient [n, …], losses [n], logits [n, classes], all detached.
        """
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            outputs = self.traced(leaf)
            losses = loss(outputs)
            (found,) = torch.autograd.grad(losses.sum(), leaf)
        return found, losses.detach(), outputs.detach()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Evaluation mode without parameter gradients; afterwards all is as it was, whatever happened."""
        yield


class ModuleModel(Model):
    """A PyTorch module.

    Args:
        module: gives logits or probabilities, [n, classes].
        outputs: which of these.
        binary_logit: one logit, of class 1.
    """

    offers = frozenset({"gradient", "score", "label"})

    def __init__(self, module: nn.Module, outputs: Outputs = "logits", *, binary_logit: bool = False) -> None:
        self.module, self._outputs, self._binary = module, outputs, binary_logit
        self.name = type(module).__name__

    def __call__(self, x: Tensor) -> Tensor:
        """See `Model.__call__`."""
        with torch.no_grad():
            return self.traced(x)

    def traced(self, x: Tensor) -> Tensor:
        """See `Model.traced`."""
        found = input_pass(self.module, x)
        return _scores(found, len(x), self._outputs, binary_logit=self._binary, who=self.name)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """See `Model.quiet`."""
        modes = [(each, each.training) for each in self.module.modules()]
        wanted = [(each, each.requires_grad, each.grad) for each in self.module.parameters()]
        buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        try:
            self.module.eval()
            for parameter, _, _ in wanted:
                parameter.requires_grad_(False)
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, requires, grad in wanted:
                parameter.requires_grad_(requires)
                parameter.grad = grad
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    owner._buffers[name] = buffer  # a forward pass may have put another one in its place
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


class ProgramModel(Model):
    """A Program with its parameters.

    Args:
        program: of a classifier.
        params: as `program.init` gives them.
        buffers: of the same.
        outputs: logits or probabilities.
    """

    offers = frozenset({"gradient", "score", "label"})
    name = "program"

    def __init__(
        self, program: Program, params: Tensors, buffers: Tensors, outputs: Outputs = "logits"
    ) -> None:
        self._program, self._outputs = program, outputs
        self._params = {name: value.detach() for name, value in params.items()}
        self._buffers = {name: value.detach() for name, value in buffers.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """See `Model.__call__`."""
        with torch.no_grad():
            return self.traced(x)

    def traced(self, x: Tensor) -> Tensor:
        """See `Model.traced`."""
        found = input_pass(lambda given: self._program.predict(self._params, self._buffers, given), x)
        return _scores(found, len(x), self._outputs, binary_logit=False, who=self.name)


class CallableModel(Model):
    """A function from inputs to scores or labels; it gets arrays of the kind and dtype that an attack has.

    Args:
        function: of inputs [n, …].
        outputs: what it gives.
        numpy: whether it takes NumPy arrays.
        name: for reports.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        outputs: Outputs = "logits",
        *,
        numpy: bool = False,
        name: str = "",
    ) -> None:
        self._function, self._outputs, self._numpy = function, outputs, numpy
        self.name = name or getattr(function, "__name__", type(function).__name__)
        if outputs == "labels":
            self.offers = frozenset({"label"})

    def __call__(self, x: Tensor) -> Tensor:
        """See `Model.__call__`."""
        given = x.detach()
        found = self._function(given.cpu().numpy() if self._numpy else given)
        values = torch.as_tensor(np.asarray(found) if not isinstance(found, Tensor) else found.detach())
        if self._outputs == "labels":
            return _label_row(values.to(x.device), len(x), self.name)
        return _scores(values.to(x.device), len(x), self._outputs, binary_logit=False, who=self.name)


def as_model(
    obj: object,
    outputs: Outputs = "logits",
    *,
    binary_logit: bool = False,
    numpy: bool = False,
    params: Tensors | None = None,
    buffers: Tensors | None = None,
) -> Model:
    """Anything that predicts, as a `Model`.

    Args:
        obj: a `Model`; a PyTorch module; a `Program` with `params` and `buffers`; a scikit-learn estimator;
            or a function of inputs.
        outputs: what it gives: "logits", "probabilities" or "labels".
        binary_logit: a module with one logit, that of class 1.
        numpy: a function takes NumPy arrays.
        params: of a Program.
        buffers: of a Program.

    Raises:
        ConfigError: it is none of these, or `outputs` is not one of the three.
    """
    if outputs not in _KINDS:
        raise ConfigError(f"outputs {outputs!r}", rule=f"one of {', '.join(_KINDS)}", who="as_model")
    if isinstance(obj, Model):
        return obj
    if isinstance(obj, Program):
        if params is None:
            raise ConfigError(
                "a Program without parameters",
                rule="params and buffers go with it",
                fix="program.init()",
                who="as_model",
            )
        return ProgramModel(obj, params, buffers or {}, outputs)
    if isinstance(obj, nn.Module):
        if outputs == "labels":
            return CallableModel(obj, outputs)
        return ModuleModel(obj, outputs, binary_logit=binary_logit)
    for method, kind in (
        ("decision_function", "logits"),
        ("predict_proba", "probabilities"),
        ("predict", "labels"),
    ):
        if hasattr(obj, method) and hasattr(obj, "fit"):
            return CallableModel(_estimator(obj, method), kind, numpy=True, name=type(obj).__name__)  # type: ignore[arg-type]
    if callable(obj):
        return CallableModel(obj, outputs, numpy=numpy)
    raise ConfigError(
        f"{type(obj).__name__} is no model",
        rule="an nn.Module, a Program, a scikit-learn estimator, or a function of inputs",
        fix="model_of(path) for a run folder or an ONNX file" if isinstance(obj, str | Path) else "",
        who="as_model",
    )


def with_normalisation(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """The same model for inputs that are not normalised, so that eps is in their units.

    Args:
        model: takes (x − mean) / std.
        mean: of each channel, the second axis of x.
        std: the same, above 0.
    """
    if len(mean) != len(std) or not all(value > 0 for value in std):
        raise ConfigError(
            f"mean of {len(mean)}, std {list(std)}",
            rule="one of each per channel, std above 0",
            who="mean, std",
        )
    return nn.Sequential(Normalised(mean, std), model)


class Normalised(nn.Module):
    """(x − mean) / std, as a first layer; see `with_normalisation`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        """The same in units of its own."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, std = self.get_buffer("mean").to(x.dtype), self.get_buffer("std").to(x.dtype)
        return (x - mean.view(shape)) / std.view(shape)


def _estimator(estimator: Any, method: str) -> Callable[[Any], Any]:
    """Rows are flat; a decision function of two classes is one column, that of the second."""

    def predict(x: Any) -> Any:
        found = getattr(estimator, method)(np.asarray(x).reshape(len(x), -1))
        if method == "decision_function" and np.ndim(found) == 1:
            return np.stack([-found / 2, found / 2], 1)
        if method == "predict":
            return np.searchsorted(estimator.classes_, found)
        return found

    return predict


def _scores(found: Any, n: int, outputs: Outputs, *, binary_logit: bool, who: str) -> Tensor:
    if not isinstance(found, Tensor) or not found.is_floating_point():
        what = f"{found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise DataError(f"the model gives {what}", rule="floating point scores [n, classes]", who=who)
    if binary_logit and found.shape in ((n, 1), (n,)):
        logit = found.reshape(n)
        return torch.stack([torch.zeros_like(logit), logit], 1)
    if found.dim() != 2 or len(found) != n or found.shape[1] < 2:
        single = found.shape in ((n, 1), (n,))
        raise DataError(
            f"outputs of shape {list(found.shape)} for {n} rows",
            rule="[n, classes] with at least two classes",
            fix="binary_logit=True, if it is the logit of class 1" if single else "",
            who=who,
        )
    if outputs == "probabilities":
        return found.clamp(min=torch.finfo(found.dtype).tiny).log()
    return found


def _label_row(found: Tensor, n: int, who: str) -> Tensor:
    if found.dim() == 2 and found.is_floating_point():
        found = found.argmax(1)
    if found.shape != (n,):
        raise DataError(f"labels of shape {list(found.shape)} for {n} rows", rule="[n]", who=who)
    return found.to(torch.int64)
