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

import numpy as np
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import Optimizer, State, adam, adamw, sgd
from mycelia.engine.optimizers.base import Kernel, from_rule
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["PrivateUpdate", "dp_adam", "dp_adam_bc", "dp_adamw", "dp_sgd", "privatise"]

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
        return {
            name: self.mechanism.add(value, std, self.source, "noise", step, name, bound=self.bound)
            / self.expected_batch
            for name, value in total.items()
        }

    def variance(self, step: int, decay: float) -> float:
        """Noise in a bias-corrected moving average of squared gradients after update `step`.

        A constant σ gives (σ / B)²; under a schedule each step's own variance decays like the average does.

        Args:
            step: the newest update, from 0.
            decay: of the average, in [0, 1).
        """
        if not callable(self.std):
            return (self.std_at(0) / self.expected_batch) ** 2
        span = step + 1 if decay == 0 else min(step + 1, math.ceil(math.log(1e-17) / math.log(decay)) + 1)
        ages = np.arange(span)
        variances = np.array([self.std_at(step - int(age)) ** 2 for age in ages])
        share = (1 - decay) * decay**ages / (1 - decay ** (step + 1))
        return float((share * variances).sum()) / self.expected_batch**2


def privatise(optimizer: Optimizer, noise: PrivateUpdate) -> Optimizer:
    """The optimiser on private means: its `update` takes sums of clipped gradients.

    Args:
        optimizer: any; its state counts the steps, which name the noise.
        noise: how a sum becomes a private mean.
    """

    def update(total: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        return optimizer.update(noise.mean(total, _step(state)), state, params)

    def update_(total: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        return optimizer.update_(noise.mean(total, _step(state)), state, params)

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
    """Adam whose second moment is freed of the noise's own (Tang et al., AAAI 2024, algorithm 1).

    The noise adds (σ/B)² to the expectation of a squared mean gradient, so
    w <- w - lr m̂ / sqrt(max(v̂ - (σ/B)², floor)).

    Args:
        noise: how a sum becomes a private mean.
        lr: rate, at least 0, or a schedule.
        betas: decay of m and of v, each in [0, 1).
        floor: smallest second moment, above 0; it bounds the step where noise is all there is.

    Raises:
        ConfigError: a value out of range.
    """
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}", rule="betas is a pair of numbers", who="dp_adam_bc")
    for index in (0, 1):
        check_number("dp_adam_bc", f"betas[{index}]", betas[index], below=1)
    if not 0 < floor < math.inf:
        raise ConfigError(f"floor is {floor}", rule="positive and finite", who="dp_adam_bc")

    def rule(count: Tensor) -> Kernel:
        bias = noise.variance(int(count) - 1, betas[1])
        first, second = 1 - betas[0] ** count, 1 - betas[1] ** count

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            del param
            m = torch.lerp(slots["m"], grad, 1 - betas[0], out=into.get("m"))
            decayed = torch.mul(slots["v"], betas[1], out=into.get("v"))
            v = torch.addcmul(decayed, grad, grad, value=1 - betas[1], out=into.get("v"))
            return m / first / (v / second - bias).clamp(min=floor).sqrt(), {"m": m, "v": v}

        return kernel

    return privatise(from_rule("adam-bc", lr, {"m": 0.0, "v": 0.0}, rule), noise)


def _step(state: State) -> int:
    return int(cast(Tensor, state["step"]))
