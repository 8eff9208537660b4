"""Feature adversaries: inputs whose inner representation is that of another input.

Sabour, Cao, Faghri, Fleet: "Adversarial manipulation of deep representations", ICLR 2016, equation 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.adam_pgd import AdamPGD
from mycelia.attacks.goals import Goal
from mycelia.attacks.layers import layer_output
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import Model, ModuleModel
from mycelia.attacks.norms import norm as length
from mycelia.attacks.result import AttackResult
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["FeatureAdversary", "FeatureResult"]


@dataclass(frozen=True, eq=False)
class FeatureResult:
    """How near each input has come to its guide.

    Attributes:
        x_adv: as x, in ball and box: where its representation is nearest, of all points visited.
        before: Euclidean distance of the representations of x and guide, float64 [n]; NaN where not finite.
        after: the same of x_adv and guide; at most `before`.
        layer: its name.
        run: what the attack says of each row; statuses are HELD, or FAILED with a reason.
    """

    x_adv: Tensor
    before: Tensor
    after: Tensor
    layer: str
    run: AttackResult

    @property
    def ratio(self) -> Tensor:
        """After over before, [n]: 0 is the guide's representation, 1 that of x; NaN where both are 0."""
        return self.after / self.before


@dataclass(frozen=True)
class FeatureAdversary:
    """Moves the representation of x at a layer towards that of a guide, inside a ball around x.

    The paper minimises the squared distance by L-BFGS in an linf ball; here any attack along gradients does.

    Attributes:
        layer: name of a submodule, as `named_modules` has it; its output is the representation.
        attack: of kind "fixed", along gradients; its norm is that of the ball.
    """

    layer: str
    attack: Attack = field(default_factory=lambda: AdamPGD(steps=200, random_start=False))

    def __post_init__(self) -> None:
        if self.attack.kind != "fixed" or self.attack.needed != "gradient":
            raise ConfigError(
                f"{type(self.attack).__name__}, {self.attack.kind}, needs a {self.attack.needed}",
                rule='an attack of kind "fixed" along gradients',
                fix="AdamPGD(steps=200, random_start=False)",
                who="FeatureAdversary.attack",
            )

    def run(
        self,
        module: nn.Module,
        x: Any,
        guide: Any,
        *,
        eps: float,
        rng: int = 0,
        bounds: Bounds = (0.0, 1.0),
        batch: int = 256,
        ids: Any = None,
    ) -> FeatureResult:
        """Attack every row of x.

        Args:
            module: has the layer; it is not touched.
            x: inputs [n, …], floating point, a tensor or an array.
            guide: as x: the input of which each row takes the representation.
            eps: radius in raw input units, at least 0.
            rng: seed, of an attack that draws.
            bounds: smallest and largest value of an input; see `Attack.run`.
            batch: rows at a time.
            ids: integers [n] that name the rows for random draws; see `Attack.run`.

        Raises:
            ConfigError: no such layer, or see `Attack.run`.
            DataError: guides that are not as the inputs, or a layer that gives no row of numbers for each.
        """
        inputs, guides = inputs_of(x), inputs_of(guide)
        if inputs.shape != guides.shape:
            raise DataError(
                f"inputs of {list(inputs.shape)}, guides of {list(guides.shape)}",
                rule="one guide for each input, of its shape",
                who="FeatureAdversary.run",
            )
        inputs, _ = clipped(inputs, *bounds_of(bounds, inputs))
        model = _Representation(module, self.layer)
        with model.quiet():
            wanted, given = (_features(model, each, batch) for each in (guides, inputs))
            result = self.attack.run(
                model,
                inputs,
                _Near(wanted),
                eps=eps,
                rng=rng,
                bounds=bounds,
                batch=batch,
                ids=ids,
                keep="loss",
            )
            x_adv = result.x_adv
            before, after = (
                length(each.double() - wanted.double(), "l2")
                for each in (given, _features(model, x_adv, batch))
            )
        further = (after > before).view(-1, *[1] * (x_adv.dim() - 1))  # all steps have led away
        x_adv = torch.where(further, inputs, x_adv)
        return FeatureResult(x_adv, before, torch.minimum(after, before), self.layer, result)


class _Near(Goal):
    """To have these representations, [n, d]; the loss is minus the squared distance to them."""

    targeted = False

    def __init__(self, wanted: Tensor) -> None:
        self._wanted = wanted

    @property
    def labels(self) -> Tensor:
        return torch.zeros(len(self._wanted), dtype=torch.int64, device=self._wanted.device)

    def of(self, rows: Tensor) -> _Near:
        return _Near(self._wanted[rows])

    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        return -(outputs - self._wanted).square().sum(1)

    def reached(self, outputs: Tensor) -> Tensor:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)


class _Representation(Model):
    """The flattened output of a layer in place of scores."""

    offers = frozenset({"gradient", "score"})

    def __init__(self, module: nn.Module, layer: str) -> None:
        self.name = f"{type(module).__name__}.{layer}"
        self._module, self._layer = module, layer

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.traced(x)

    def traced(self, x: Tensor) -> Tensor:
        return layer_output(self._module, self._layer, x)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with ModuleModel(self._module).quiet():
            yield


def _features(model: _Representation, x: Tensor, batch: int) -> Tensor:
    """[n, d]; rows that are not finite are taken as they come."""
    return torch.cat([model(part) for part in x.split(batch)])
