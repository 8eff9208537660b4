"""A detector that has learnt the difference between activations of benign and of adversarial inputs.

Metzen, Genewein, Fischer, Bischoff: "On detecting adversarial perturbations", ICLR 2017, section 3.2: a small
classifier on a layer's activations. Here it is a least-squares readout of the activations and of random
rectified features of them, because each row can be left out of its training in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.base import Attack
from mycelia.attacks.detectors.activations import activations
from mycelia.attacks.detectors.base import Detector, as_rows
from mycelia.attacks.goals import Untargeted, predicted
from mycelia.attacks.layers import layer_output
from mycelia.attacks.model import as_model
from mycelia.attacks.result import Status
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["ActivationClassifier", "ridge_left_out"]

_RIDGES: Final = tuple(10.0**power for power in range(-8, 3))  # of the largest squared singular value
_LEAST: Final = 1e-14  # share of a row's residual that its own fit leaves


def ridge_left_out(
    z: Tensor, y: Tensor, weight: Tensor, ridge: float, partner: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted ridge regression with a free intercept, and what it says of rows that it was not given.

    Minimises Σ wᵢ(yᵢ − a − zᵢ·b)² + ridge·|b|². Without row i its residual is rᵢ/(1 − hᵢ), h being its
    leverage (Allen: "The relationship between variable selection and data augmentation", Technometrics 1974);
    without two rows their residuals are (I − H)⁻¹r of the two.

    Args:
        z: float64 [n, d].
        y: float64 [n].
        weight: above 0, [n], of sum 1.
        ridge: above 0.
        partner: the row that is left out together with each row, int64 [n]: a row's partner has that row as
            its own, or it is the row itself; None: no row has another one.

    Returns:
        intercept a [], slope b [d], predictions for each row by the fit without it [n].
    """
    alone = torch.arange(len(z), device=z.device)
    return _Ridge(z, y, weight, alone if partner is None else partner).at(ridge)


class _Ridge:
    """One decomposition for all strengths."""

    def __init__(self, z: Tensor, y: Tensor, weight: Tensor, partner: Tensor) -> None:
        self._y, self._root, self._partner, root = y, weight.sqrt(), partner, weight.sqrt()
        self._alone = partner == torch.arange(len(z), device=z.device)
        self._centre, self._middle = weight @ z, weight @ y
        scaled = (z - self._centre) * root[:, None]
        self._u, self.sizes, self._v = torch.linalg.svd(scaled, full_matrices=False)
        self._target = (y - self._middle) * root

    def at(self, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `ridge_left_out`."""
        kept = self.sizes.square() / (self.sizes.square() + ridge)
        along = self._u.T @ self._target
        residual = self._target - self._u @ (kept * along)
        own = (1 - (self._u.square() @ kept + self._root.square())).clamp(min=_LEAST)
        cross = (self._u * self._u[self._partner]) @ kept + self._root * self._root[self._partner]
        cross, other = torch.where(self._alone, 0.0, cross), torch.where(self._alone, 1.0, own[self._partner])
        both = other * residual + cross * residual[self._partner]
        left = both / (own * other - cross.square()).clamp(min=_LEAST**2) / self._root
        slope = self._v.T @ (self.sizes / (self.sizes.square() + ridge) * along)
        return self._middle - self._centre @ slope, slope, self._y - left


@dataclass(frozen=True, eq=False)
class _Readout:
    """Activations [n, d] to scores [n]: all that was learnt, in float64."""

    mean: Tensor
    spread: Tensor
    inner: Tensor
    offset: Tensor
    intercept: Tensor
    slope: Tensor

    def features(self, seen: Tensor) -> Tensor:
        """The activations in units of their deviations, and the random features of these."""
        u = (seen.double() - self.mean.to(seen.device)) / self.spread.to(seen.device)
        hidden = (u @ self.inner.to(seen.device) + self.offset.to(seen.device)).relu()
        return torch.cat([u, hidden], 1)

    def __call__(self, seen: Tensor) -> Tensor:
        return self.features(seen) @ self.slope.to(seen.device) + self.intercept.to(seen.device)


@dataclass(frozen=True, eq=False)
class ActivationClassifier(Detector):
    """How much a row's activations are like those of attacked inputs: near −1 benign, near 1 attacked.

    Both kinds weigh the same. The strength of the ridge penalty is that of the smallest squared error on rows
    left out, and the threshold is set on benign scores that do not know their own row: the larger of the
    scores with and without it. The attacked row that was made of it is left out with it: it says much about
    it, and false alarms would be many more than the rate.

    Attributes:
        model: has the layer.
        layer: name of a submodule, as `named_modules` has it.
        attack: makes the attacked inputs from the benign ones, against the model's own predictions, where
            `fit` is given none; rows that it breaks are learnt from.
        eps: its radius; None for attacks of kind "minimum".
        hidden: random features, at least 0; 0: a linear classifier.
        bounds: of inputs, for the attack.
        attacked: attacked inputs [m, …]; see `fit`.
        origin: int64 [m]; see `fit`.
        readout: what was learnt; None before `fit`.
    """

    model: nn.Module
    layer: str
    attack: Attack | None = None
    eps: float | None = None
    hidden: int = 256
    bounds: Bounds = field(default=(0.0, 1.0), kw_only=True)
    attacked: Tensor | None = field(default=None, kw_only=True, repr=False)
    origin: Tensor | None = field(default=None, kw_only=True, repr=False)
    readout: _Readout | None = field(default=None, kw_only=True, repr=False)
    left_out: Tensor | None = field(default=None, kw_only=True, repr=False)

    def check(self) -> None:
        """See `Detector.check`."""
        if self.hidden < 0:
            raise ConfigError(f"hidden is {self.hidden}", rule="at least 0", who="ActivationClassifier")

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (as_model(self.model),)

    def fit(self, benign: Any, fpr: float, rng: int = 0, *, attacked: Any = None, origin: Any = None) -> Self:
        """See `Detector.fit`.

        Args:
            benign: inputs [n, …].
            fpr: rate of false alarms.
            rng: seed, also of the attack.
            attacked: inputs [m, …] that fool the model, m at least 1; None: `attack` makes them.
            origin: integers [m]: the benign row that each was made of, −1 where it was none of these; each
                at most once. None: they were made of other rows.

        Raises:
            ConfigError: neither attacked inputs nor an attack, or see `Detector.fit`.
            DataError: an attack that breaks no row, origins that are not as described, or see `Detector.fit`.
        """
        if attacked is not None:
            given = as_rows(attacked)
            known = torch.full((len(given),), -1) if origin is None else torch.as_tensor(origin)
            some = known[known >= 0]
            if known.shape != given.shape[:1] or known.is_floating_point() or len(some.unique()) < len(some):
                raise DataError(
                    f"origins of {list(known.shape)}, {len(some) - len(some.unique())} of them repeated",
                    rule="a benign row, or -1, for each attacked row; each row at most once",
                    who="origin",
                )
            return replace(self, attacked=given, origin=known).fit(benign, fpr, rng)
        return super().fit(benign, fpr, rng)

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """See `Detector.prepared`; the classifier is trained."""
        sound = torch.isfinite(benign.flatten(1)).all(1)
        if not bool(sound.any()):
            raise DataError("no finite benign rows", rule="at least one", who="benign")
        rows = benign[sound]
        if self.attacked is None:
            attacked, origin = self._made(rows, rng)
        else:
            attacked, origin = self._given(sound)
            attacked = attacked.to(rows)
        if not len(attacked):
            raise DataError(
                "no attacked rows to learn from",
                rule="at least one that is finite and fools the model",
                fix="a stronger attack, a larger eps, or fit(…, attacked=rows)",
                who="ActivationClassifier",
            )
        seen = torch.cat(
            [activations(self.model, self.layer, each, batch=self.batch) for each in (rows, attacked)]
        ).double()
        sizes = torch.tensor([len(rows), len(attacked)], device=seen.device)
        partner = torch.arange(len(seen), device=seen.device)
        made = (origin >= 0).nonzero()[:, 0]
        partner[origin[made]], partner[len(rows) + made] = len(rows) + made, origin[made]
        readout, left = self._learnt(seen, sizes, partner, rng)
        left_out = torch.full((len(benign),), torch.inf, dtype=torch.float64, device=benign.device)
        left_out[sound] = left[: len(rows)]
        return replace(self, seed=rng, readout=readout, left_out=left_out)

    def benign_scores(self, benign: Tensor) -> Tensor:
        """See `Detector.benign_scores`."""
        scores = self.score(benign)
        return scores if self.left_out is None else torch.maximum(scores, self.left_out)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        if self.readout is None:
            raise ConfigError(
                "a classifier that has learnt nothing",
                rule="it is fitted before it scores",
                fix="detector = detector.fit(benign, fpr=0.01, attacked=rows)",
                who="ActivationClassifier",
            )
        return self.readout(layer_output(self.model, self.layer, x))

    def _made(self, benign: Tensor, rng: int) -> tuple[Tensor, Tensor]:
        """Attacked inputs of those benign rows that the attack breaks, and which ones these are."""
        if self.attack is None:
            raise ConfigError(
                "neither attacked inputs nor an attack",
                rule="it learns from both kinds",
                fix="fit(…, attacked=rows), or ActivationClassifier(model, layer, PGD(), eps)",
                who="ActivationClassifier",
            )
        model = as_model(self.model)
        with model.quiet(), torch.no_grad():
            own = torch.cat([predicted(model(some)) for some in benign.split(self.batch)])
        result = self.attack.run(
            model, benign, Untargeted(own), eps=self.eps, rng=rng, bounds=self.bounds, batch=self.batch
        )
        broken = result.is_(Status.BROKEN).nonzero()[:, 0]
        return result.x_adv[broken], broken

    def _given(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        """Given attacked inputs that are finite, and their places among the benign rows that are sound."""
        if self.attacked is None or self.origin is None:
            raise ConfigError(
                "attacked inputs without origins",
                rule="fit takes both",
                fix="fit(…, attacked=rows)",
                who="ActivationClassifier",
            )
        fine = torch.isfinite(self.attacked.flatten(1)).all(1)
        origin = self.origin.to(sound.device, torch.int64)[fine.to(sound.device)]
        if bool((origin >= len(sound)).any()):
            raise DataError(
                f"origin {int(origin.max())} of {len(sound)} benign rows", rule="one of these", who="origin"
            )
        place = torch.where(sound, sound.cumsum(0) - 1, -1)
        return self.attacked[fine], torch.where(origin >= 0, place[origin.clamp(min=0)], -1)

    def _learnt(self, seen: Tensor, sizes: Tensor, partner: Tensor, rng: int) -> tuple[_Readout, Tensor]:
        """From activations, benign ones first; and what is said of each row without it and its partner."""
        y = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=seen.device).repeat_interleave(sizes)
        weight = (0.5 / sizes.double()).repeat_interleave(sizes)
        mean = weight @ seen
        spread = (weight @ (seen - mean).square()).sqrt()
        # What never moves tells nothing, and rounding must not make it large.
        spread = torch.where(spread > 1e-9 * (1 + mean.abs()), spread, torch.inf)
        d = seen.shape[1]
        draw = generator(rng, "attacks/detectors/classifier")
        inner = torch.from_numpy(draw.standard_normal((d, self.hidden))) / math.sqrt(d)
        offset = torch.from_numpy(draw.standard_normal(self.hidden))
        raw = _Readout(
            mean, spread, inner.to(seen.device), offset.to(seen.device), mean.new_zeros(()), mean.new_zeros(d)
        )
        ridge = _Ridge(raw.features(seen), y, weight, partner)
        scale = max(float(ridge.sizes[0]) ** 2, torch.finfo(torch.float64).tiny / _RIDGES[0])
        fits = [ridge.at(each * scale) for each in _RIDGES]
        errors = [float(weight @ (left - y).square()) for _, _, left in fits]
        intercept, slope, left = fits[errors.index(min(errors))]
        return replace(raw, intercept=intercept, slope=slope), left
