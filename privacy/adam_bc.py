"""Adam for noised gradients, in the shape of `torch.optim`: the noise leaves the second moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycelia.engine.errors import ConfigError
from mycelia.engine.schedules import check_number

__all__ = ["AdamBC"]


class AdamBC(torch.optim.Optimizer):
    """Adam with corrected bias (Tang et al., AAAI 2024, algorithm 1); see `optimizers.adam_bc`.

    It has to know the variance of the noise in every gradient it is given: `attach` tells it before each
    step.

    Args:
        params: as for any optimiser of `torch.optim`.
        lr: rate, at least 0.
        betas: decay of the two moments, each in [0, 1).
        floor: smallest second moment, above 0; it bounds the step where noise is all there is.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Sequence[float] = (0.9, 0.999), floor: float = 5e-8
    ) -> None:
        check_number("AdamBC", "lr", lr)
        for index in (0, 1):
            check_number("AdamBC", f"betas[{index}]", betas[index], below=1)
        if not 0 < floor < math.inf:
            raise ConfigError(f"floor is {floor}", rule="positive and finite", who="AdamBC")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "floor": floor})
        self._variance: float | None = None

    def expect(self, variance: float) -> None:
        """Say what the noise in the coming step's gradients has for a variance."""
        self._variance = variance

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; gradients are private means.

        Args:
            closure: only for the signature of `torch.optim`; private steps have none.

        Raises:
            ConfigError: the noise of this step is not known, or a closure was given.
        """
        if closure is not None or self._variance is None:
            raise ConfigError(
                "a step with a closure" if closure else "a step without known noise",
                rule="each step's noise is told before the step",
                fix="use the optimiser through mycelia.privacy.attach",
                who="AdamBC",
            )
        variance, self._variance = self._variance, None
        for group in self.param_groups:
            lr, (first, second) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                state["exp_avg_sq"].sub_((1 - second) * variance)
                squares = state["exp_avg_sq"] / (1 - second ** state["step"])
                rate = lr / (1 - first ** state["step"])
                parameter.addcdiv_(state["exp_avg"], squares.clamp_(min=group["floor"]).sqrt_(), value=-rate)
