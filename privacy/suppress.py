"""Suppress-privacy, **a heuristic**: small weights are set to zero while a model is trained.

What a model does not hold cannot be read from it, and attacks tend to get worse with it. But nothing bounds
what is left: there is no ε here and no budget, and whatever prints a suppressed run says so. Weights are
thinned out by a cubic schedule (Zhu & Gupta, "To prune, or not to prune", 2017, equation 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["Suppression", "Suppressor"]


@dataclass(frozen=True)
class Suppressor:
    """How weights are suppressed; `attach` does it.

    Attributes:
        sparse_start: share of the weights that is zero at `start`, in [0, 1).
        sparse_end: share from `end` on, in [0, 1), at least `sparse_start`.
        start: the step t₀ from which weights are suppressed.
        end: the step t₁ from which the share stays, above `start`.
        clamp: largest size of a weight, above 0; None for any.
        noise: half the width of uniform noise on the weights that are kept, at least 0.

    Raises:
        ConfigError: a value out of range.
    """

    sparse_start: float = 0.0
    sparse_end: float = 0.9
    start: int = 0
    end: int = 1000
    clamp: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        for fine, found, rule in (
            (0 <= self.sparse_start <= self.sparse_end < 1,
             f"sparse_start is {self.sparse_start}, sparse_end {self.sparse_end}",
             "0 <= sparse_start <= sparse_end < 1"),
            (0 <= self.start < self.end, f"start is {self.start}, end {self.end}", "0 <= start < end"),
            (self.clamp is None or 0 < self.clamp < math.inf, f"clamp is {self.clamp}", "above 0 and finite"),
            (0 <= self.noise < math.inf, f"noise is {self.noise}", "at least 0 and finite"),
        ):  # fmt: skip
            if not fine:
                raise ConfigError(found, rule=rule, who="Suppressor")

    def sparsity(self, step: int) -> float:
        """s₁ + (s₀ − s₁)(1 − (t − t₀)/(t₁ − t₀))³ between the ends, and 0 before.

        >>> round(Suppressor(sparse_end=0.8, end=10).sparsity(5), 6)
        0.7
        """
        if step < self.start:
            return 0.0
        left = 1 - min(1.0, (step - self.start) / (self.end - self.start))
        return self.sparse_end + (self.sparse_start - self.sparse_end) * left**3

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ledger: Ledger | None = None,
        source: NoiseSource | None = None,
    ) -> Suppression:
        """Suppress the weights of a model while any optimiser trains it; neither is wrapped.

        Weights are its trainable tensors of two or more dimensions. On an optimiser that is private too,
        call it after `mycelia.privacy.attach.attach`: it then acts on what is private already.

        Args:
            model: the model.
            optimizer: any `torch.optim` optimiser of its parameters.
            ledger: of the run, which then says that a heuristic was used.
            source: of the noise; the operating system's by default.

        Raises:
            ConfigError: the model has no such weights.
        """
        return Suppression(self, model, optimizer, ledger, source or NoiseSource.os())

    def __str__(self) -> str:
        more = "" if self.clamp is None else f", weights within ±{self.clamp:g}"
        more += f", uniform noise of ±{self.noise:g}" if self.noise else ""
        return (
            f"suppress-privacy (a heuristic, without ε): sparsity {self.sparse_start:g} to "
            f"{self.sparse_end:g} over steps {self.start} to {self.end}{more}"
        )


class Suppression:
    """The handle that `Suppressor.attach` returns.

    Attributes:
        suppressor: what is done.
        steps: updates seen; set it when a run goes on.
    """

    def __init__(
        self,
        suppressor: Suppressor,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger | None,
        source: NoiseSource,
    ) -> None:
        self.suppressor, self.steps = suppressor, 0
        self._model, self._source = model, source
        self._kept: dict[str, Tensor] = {}
        if not self._weights():
            raise ConfigError(
                "the model has no trainable tensor of two dimensions or more",
                rule="weights are suppressed, and biases are not",
                who="Suppressor",
            )
        if ledger is not None:
            ledger.note(str(suppressor))
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def sparsity(self) -> float:
        """The share of the weights that is zero now."""
        weights = self._weights().values()
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        return zeros / sum(weight.numel() for weight in weights)

    def epsilon(self, delta: float) -> NoReturn:
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"ε at δ = {delta:g} of suppressed weights",
            rule="a heuristic has no ε",
            fix="train with noise and clipping (mycelia.privacy.attach), or measure an attack",
            who="Suppressor",
        )

    def report(self, scores: Mapping[str, tuple[float, float]] | None = None) -> str:
        """What was done and what it was found to be good for, as lines.

        Args:
            scores: of attacks by name: without and with suppression, in the attack's own unit.
        """
        lines = [f"{self.suppressor}", f"{self.steps} updates, {self.sparsity:.1%} of the weights are zero"]
        lines += [
            f"{name}: {before:.4g} without, {after:.4g} with it"
            for name, (before, after) in (scores or {}).items()
        ]
        if not scores:
            lines.append("no attack was measured: nothing is known about what it protects")
        return "\n".join(lines)

    def detach(self) -> None:
        """Stop; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()

    def _weights(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad and p.dim() >= 2}

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Choose what is kept, and mask the gradients alike."""
        del optimizer, args, kwargs
        sparsity = self.suppressor.sparsity(self.steps)
        self._kept = {name: _largest(weight, sparsity) for name, weight in self._weights().items()}
        for name, weight in self._weights().items():
            if weight.grad is not None:
                weight.grad.masked_fill_(~self._kept[name], 0.0)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Noise and clamp the weights, and mask them: momentum moves them without a gradient."""
        del optimizer, args, kwargs
        how = self.suppressor
        for name, weight in self._weights().items():
            kept = self._kept[name]
            if how.noise and self.steps >= how.start:
                stream = self._source.generator("suppression", self.steps, name)
                drawn = torch.from_numpy(stream.random(weight.numel())).view(weight.shape)
                weight.add_(((2 * drawn - 1) * how.noise).to(weight))
            if how.clamp is not None and self.steps >= how.start:
                weight.clamp_(-how.clamp, how.clamp)
            weight.masked_fill_(~kept, 0.0)
        self.steps += 1


def _largest(weight: Tensor, sparsity: float) -> Tensor:
    """Where the largest weights are, bool [*shape]: all but a share of them."""
    dropped = math.floor(sparsity * weight.numel())
    kept = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    if dropped:
        kept[weight.abs().flatten().topk(dropped, largest=False).indices] = False
    return kept.view(weight.shape)
