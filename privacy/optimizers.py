"""Private optimisers as pure functions: noise first, then the optimiser, and nothing in between.

They are `mycelia.engine.optimizers.Optimizer` objects whose `update` takes the *sum of clipped gradients* of
a logical batch in the place of a gradient. It adds the noise of its step, divides by the public expected
batch, and hands the result on, so moments and other state see nothing that is not private already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import Optimizer, State, adam, adamw, sgd
from mycelia.engine.optimizers.base import Kernel, from_rule
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource

__all__ = [
    "NoiseAware",
    "PrivateUpdate",
    "adam_bc",
    "dp_adam",
    "dp_adam_bc",
    "dp_adamw",
    "dp_sgd",
    "privatise",
]

Std = float | Callable[[int], float]


@dataclass(frozen=True)
class PrivateUpdate:
    """How a sum of clipped gradients becomes a private mean.

    Attributes:
        mechanism: the noise.
        std: σ in model units, or a function of the step (from 0) that gives it.
        expected_batch: the public number of examples the sum is divided by, q times the number of examples;
            never the number drawn.
        source: where the noise comes from.
        bound: the clip bound, which sets the grid of a discrete mechanism.

    Raises:
        ConfigError: a number out of range.
    """

    mechanism: Mechanism
    std: Std
    expected_batch: float
    source: NoiseSource
    bound: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("expected_batch", self.expected_batch), ("bound", self.bound)):
            if not (0 < value < math.inf):
                raise ConfigError(f"{name} is {value}", rule="positive and finite", who="private update")
        self.std_at(0)

    def std_at(self, step: int) -> float:
        """σ of a step.

        Raises:
            ConfigError: it is negative or not finite.
        """
        std = float(self.std(step) if callable(self.std) else self.std)
        if not (0 <= std < math.inf):
            raise ConfigError(
                f"the noise of step {step} has std {std}", rule="finite and at least 0", who="private update"
            )
        return std

    def mean(self, total: Tensors, step: int) -> Tensors:
        """(total + noise) / expected batch, by parameter; the same step gives the same noise.

        Args:
            total: sum of clipped gradients by parameter.
            step: number of the update, from 0; names the noise.
        """
        std = self.std_at(step)
        means: Tensors = {}
        for names in _groups(total):
            parts = [total[name].reshape(-1) for name in names]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            noised = self.mechanism.add(flat, std, self.source, "noise", step, names[0], bound=self.bound)
            each = (noised / self.expected_batch).split([len(part) for part in parts])
            means |= {name: part.view(total[name].shape) for name, part in zip(names, each, strict=True)}
        return means


_GROUP = 1 << 16


def _groups(total: Tensors) -> list[list[str]]:
    """Names of tensors whose noise is drawn together: a draw has a cost of its own, and a copy has too."""
    groups: list[list[str]] = []
    held, kind = 0, None
    for name, tensor in total.items():
        if not groups or kind != (tensor.dtype, tensor.device) or held + tensor.numel() > _GROUP:
            groups.append([])
            held, kind = 0, (tensor.dtype, tensor.device)
        groups[-1].append(name)
        held += tensor.numel()
    return groups


@dataclass(frozen=True)
class NoiseAware(Optimizer):
    """An optimiser that has to know the noise in each gradient; its own `update` refuses, not knowing it.

    Attributes:
        knowing: the optimiser for one update, from the variance of the noise in its gradient.
    """

    knowing: Callable[[float], Optimizer]


def privatise(optimizer: Optimizer, noise: PrivateUpdate) -> Optimizer:
    """The optimiser on private means: its `update` takes sums of clipped gradients.

    Args:
        optimizer: any; its state counts the steps, which name the noise.
        noise: how a sum becomes a private mean.
    """

    def at(step: int) -> Optimizer:
        if isinstance(optimizer, NoiseAware):
            return optimizer.knowing((noise.std_at(step) / noise.expected_batch) ** 2)
        return optimizer

    def update(total: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        step = _step(state)
        return at(step).update(noise.mean(total, step), state, params)

    def update_(total: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        step = _step(state)
        return at(step).update_(noise.mean(total, step), state, params)

    return Optimizer(f"dp-{optimizer.name}", optimizer.init, update, update_)


def dp_sgd(noise: PrivateUpdate, lr: float | Schedule, **options: Any) -> Optimizer:
    """DP-SGD (Abadi et al., CCS 2016, algorithm 1).

    Args:
        noise: how a sum becomes a private mean.
        lr: rate, at least 0, or a schedule.
        options: see `mycelia.engine.optimizers.sgd`.
    """
    return privatise(sgd(lr, **options), noise)


def dp_adam(noise: PrivateUpdate, lr: float | Schedule = 1e-3, **options: Any) -> Optimizer:
    """Adam on private means; the noise inflates its second moment, see `dp_adam_bc`.

    Args:
        noise: how a sum becomes a private mean.
        lr: rate, at least 0, or a schedule.
        options: see `mycelia.engine.optimizers.adam`.
    """
    return privatise(adam(lr, **options), noise)


def dp_adamw(noise: PrivateUpdate, lr: float | Schedule = 1e-3, **options: Any) -> Optimizer:
    """AdamW on private means; the decay reads the parameters alone, so it costs no privacy.

    Args:
        noise: how a sum becomes a private mean.
        lr: rate, at least 0, or a schedule.
        options: see `mycelia.engine.optimizers.adamw`.
    """
    return privatise(adamw(lr, **options), noise)


def dp_adam_bc(
    noise: PrivateUpdate,
    lr: float | Schedule = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    floor: float = 5e-8,
) -> Optimizer:
    """`adam_bc` on private means.

    Args:
        noise: how a sum becomes a private mean.
        lr: rate, at least 0, or a schedule.
        betas: see `adam_bc`.
        floor: see `adam_bc`.

    Raises:
        ConfigError: a value out of range.
    """
    return privatise(adam_bc(lr, betas, floor), noise)


def adam_bc(
    lr: float | Schedule = 1e-3, betas: Sequence[float] = (0.9, 0.999), floor: float = 5e-8
) -> NoiseAware:
    """Adam whose second moment is freed of the noise's own (Tang et al., AAAI 2024, algorithm 1).

    Independent noise adds its variance s² to the expectation of a squared mean gradient, so
    v <- beta2 v + (1 - beta2) (g² - s²) and w <- w - lr m̂ / sqrt(max(v̂, floor)), with the s of each update.

    Args:
        lr: rate, at least 0, or a schedule.
        betas: decay of m and of v, each in [0, 1).
        floor: smallest second moment, above 0; it bounds the step where noise is all there is.

    Raises:
        ConfigError: a value out of range.
    """
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}", rule="betas is a pair of numbers", who="adam-bc")
    for index in (0, 1):
        check_number("adam-bc", f"betas[{index}]", betas[index], below=1)
    check_number("adam-bc", "floor", floor, low=torch.finfo(torch.float32).tiny)

    def knowing(variance: float) -> Optimizer:
        def rule(count: Tensor) -> Kernel:
            first, second = 1 - betas[0] ** count, 1 - betas[1] ** count

            def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
                del param
                m = torch.lerp(slots["m"], grad, 1 - betas[0], out=into.get("m"))
                decayed = torch.mul(slots["v"], betas[1], out=into.get("v"))
                squared = torch.addcmul(decayed, grad, grad, value=1 - betas[1], out=into.get("v"))
                v = torch.sub(squared, (1 - betas[1]) * variance, out=into.get("v"))
                return m / first / (v / second).clamp(min=floor).sqrt(), {"m": m, "v": v}

            return kernel

        return from_rule("adam-bc", lr, {"m": 0.0, "v": 0.0}, rule)

    def unknown(*_: object) -> tuple[Tensors, State]:
        raise ConfigError(
            "an update without known noise",
            rule="each update is told the variance of the noise in its gradient",
            fix="use it where gradients are private, or adam",
            who="adam-bc",
        )

    return NoiseAware("adam-bc", knowing(0.0).init, unknown, unknown, knowing)


def _step(state: State) -> int:
    return int(cast(Tensor, state["step"]))
