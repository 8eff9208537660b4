"""Losses by name, each giving one number per example: `loss(outputs, targets) -> [B]`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import chosen, is_reference, resolve

__all__ = ["LOSSES", "Loss", "bce", "cross_entropy", "get", "mae", "mse"]

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax cross-entropy in nats of logits against integer classes.

    Shapes: `[B, C]` against `[B]`; token sequences `[B, T, C]` against `[B, T]`, the mean over T; maps
    `[B, C, H, W]` against `[B, H, W]`, the mean over H and W.

    Raises:
        ConfigError: the shapes do not fit, or the targets are not integers.
    """
    if outputs.ndim != targets.ndim + 1 or targets.is_floating_point():
        raise _mismatch(
            "cross-entropy", outputs, targets, "outputs [B, C] against integer targets [B]", fix=_REGRESSION
        )
    if outputs.ndim == 3:
        outputs = outputs.transpose(1, 2)
    return _mean(F.cross_entropy(outputs, targets, reduction="none"))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, the mean over all axes but the first; `[B, 1]` fits targets `[B]`."""
    outputs, targets = _aligned("mse", outputs, targets)
    return _mean(F.mse_loss(outputs, targets, reduction="none"))


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, the mean over all axes but the first; `[B, 1]` fits targets `[B]`."""
    outputs, targets = _aligned("mae", outputs, targets)
    return _mean(F.l1_loss(outputs, targets, reduction="none"))


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits against targets in [0, 1], the mean over all axes but the first.

    `[B, 1]` fits targets `[B]`; `[B, L]` against `[B, L]` is multi-label.
    """
    outputs, targets = _aligned("bce", outputs, targets)
    return _mean(F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"))


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "mse": mse, "mae": mae, "bce": bce}

_REGRESSION = "use mse or mae for real targets"


def get(name: str) -> Loss:
    """The loss of that name, or a `package.module:function`.

    Raises:
        ConfigError: no such loss; the message lists the names.

    >>> get("mse").__name__
    'mse'
    """
    if is_reference(name):
        return resolve(name, kind="loss")
    return chosen(LOSSES, name, kind="loss", who="loss", also="package.module:function")


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _aligned(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one shape and the outputs' dtype: broadcasting [B, 1] against [B] would give [B, B]."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.ndim != targets.ndim or outputs.shape[1:] != targets.shape[1:]:
        raise _mismatch(name, outputs, targets, "outputs and targets have one shape", fix=_CLASSES)
    return outputs, targets.to(outputs.dtype)


_CLASSES = "use cross-entropy for class labels, or a model with one output"


def _mismatch(name: str, outputs: Tensor, targets: Tensor, rule: str, *, fix: str) -> ConfigError:
    # Symbolic batch sizes print as symbols, which is what a reader of a capture error wants to see.
    found = f"outputs {list(outputs.shape)} do not fit targets {list(targets.shape)} of {targets.dtype}"
    return ConfigError(found, rule=rule, fix=fix, who=f"loss {name}")
