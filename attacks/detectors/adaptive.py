"""An attack that knows of the detector: the model and the detector are one target.

Carlini, Wagner: "Adversarial examples are not easily detected: bypassing ten detection methods", AISec 2017;
Tramèr, Carlini, Brendel, Madry: "On adaptive attacks to adversarial example defenses", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.detectors.base import Detector
from mycelia.attacks.goals import Goal
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.result import AttackResult, Status
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import derive

__all__ = ["FLAGGED", "Guarded", "Unnoticed", "attack_guarded"]

FLAGGED: Final = 2**31 - 1
"""The label of a flagged row, where the model gives labels only."""
_FAR: Final = 1e6  # units: an excess beyond is this large


class Guarded(Model):
    """A model and its detector as one classifier, which has one class more: "flagged".

    The logit of that class is the largest of the others plus the excess of the score over the threshold, in
    the detector's units, so that it wins exactly where the detector flags.

    Args:
        model: see `as_model`.
        detector: fitted, and not stateful.
        weight: of the excess, above 0.

    Raises:
        ConfigError: a detector without a threshold, or one whose score depends on earlier queries.
    """

    def __init__(self, model: object, detector: Detector, weight: float = 1.0) -> None:
        if detector.stateful or any(each.stateful for each in detector.parts if isinstance(each, Detector)):
            raise ConfigError(
                "a detector whose scores depend on earlier queries",
                rule="model and detector are one target only if a row's score is its own",
                fix="measure how many queries an attack needs and how many are flagged: query_metrics",
                who="Guarded",
            )
        if not weight > 0:
            raise ConfigError(f"weight is {weight}", rule="above 0", who="Guarded.weight")
        self._limit, self._detector, self._weight = detector.limit, detector, weight
        self._model = as_model(model)
        self.name = f"{self._model.name} with {type(detector).__name__}"
        self.offers = self._model.offers - (set() if detector.differentiable else {"gradient"})

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [n, classes + 1], or labels [n], of which `FLAGGED` is one."""
        with torch.no_grad():
            outputs = self._model(x)
            excess = self._excess(x)
        if outputs.dim() == 1:
            return torch.where(excess > 0, FLAGGED, outputs)
        return _joined(outputs, excess)

    def traced(self, x: Tensor) -> Tensor:
        """See `Model.traced`."""
        if "gradient" not in self.offers:
            return super().traced(x)
        return _joined(self._model.traced(x), self._excess(x))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """See `Model.quiet`."""
        with self._model.quiet(), self._detector.quiet():
            yield

    def _excess(self, x: Tensor) -> Tensor:
        found = self._detector.traced(x).double()
        found = torch.where(found.isnan(), torch.inf, found)
        return (self._weight / self._detector.unit * (found - self._limit)).clamp(-_FAR, _FAR)


def _joined(outputs: Tensor, excess: Tensor) -> Tensor:
    top = outputs.amax(1)
    column = top + excess.to(outputs.dtype)
    with torch.no_grad():  # rounding must not hide on which side of the threshold a score lies
        above = torch.nextafter(top, torch.full_like(top, torch.inf))
        exact = torch.where(excess > 0, torch.maximum(column, above), torch.minimum(column, top))
    column = exact + (column - column.detach())
    return torch.cat([outputs, column[:, None]], 1)


@dataclass(frozen=True, eq=False)
class Unnoticed(Goal):
    """Another goal, reached by a row that the detector of a `Guarded` model does not flag.

    Whatever loss is named, what is raised is built of margins: below 0 they are what is missing of the goal
    plus what the score is above the threshold; from 0 on the smaller of what there is to spare. A function
    is given the logits of all classes, "flagged" being the last one.

    Attributes:
        goal: what is wanted of the model.
        targeted: as that is.
    """

    goal: Goal
    targeted: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "targeted", self.goal.targeted)

    @property
    def labels(self) -> Tensor:
        """See `Goal.labels`."""
        return self.goal.labels

    def of(self, rows: Tensor) -> Unnoticed:
        """See `Goal.of`."""
        return Unnoticed(self.goal.of(rows))

    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        """See `Goal.loss`."""
        if callable(loss):
            return self.goal.loss(outputs, loss)
        scores = outputs[:, :-1]
        spare = scores.amax(1) - outputs[:, -1]
        margin = self.goal.loss(scores, "margin")
        lacking = margin.clamp(max=0) + spare.clamp(max=0)
        return torch.where((margin > 0) & (spare >= 0), torch.minimum(margin, spare), lacking)

    def reached(self, outputs: Tensor) -> Tensor:
        """See `Goal.reached`."""
        if outputs.dim() == 1:
            return self.goal.reached(outputs) & (outputs != FLAGGED)
        scores = outputs[:, :-1]
        return self.goal.reached(scores) & (outputs[:, -1] <= scores.amax(1))


def attack_guarded(
    attack: Attack,
    model: object,
    detector: Detector,
    x: Tensor,
    goal: Goal,
    *,
    eps: float | None = None,
    rng: int = 0,
    weights: Sequence[float] = (1.0, 0.1, 0.01),
    **more: Any,
) -> AttackResult:
    """Attack model and detector together: a row is broken when it reaches the goal and is not flagged.

    Args:
        attack: what it needs, model and detector must have: a detector that is not `differentiable` gives no
            gradients. One whose steps shrink (APGD) suits a threshold that leaves little room.
        model: see `as_model`.
        detector: fitted, and not stateful.
        x: inputs [n, …].
        goal: what is wanted of the model, for each row.
        eps: see `Attack.run`.
        rng: seed.
        weights: of the detector against the model, above 0, at least one; with a small one the model is
            fooled first and the detector then. Rows that hold at one of them are attacked again at the next
            one; `queries` and `gradients` are summed.
        more: other arguments of `Attack.run`.

    Returns:
        see `Attack.run`; CLEAN_WRONG or ALREADY_TARGET are rows that reach the goal unflagged as they are.

    Raises:
        ConfigError: no weights, a stateful detector, or one that lacks what the attack needs.
    """
    if not weights:
        raise ConfigError("no weights", rule="at least one", who="attack_guarded")
    wanted = Unnoticed(goal)
    found: AttackResult | None = None
    for place, weight in enumerate(weights):
        seed = rng if not place else derive(rng, f"attacks/detectors/guarded/{place}")
        target = Guarded(model, detector, weight)
        if found is None:
            found = attack.run(target, x, wanted, eps=eps, rng=seed, **more)
            continue
        left = (found.is_(Status.HELD) | found.is_(Status.FAILED)).nonzero()[:, 0]
        if not len(left):
            break
        again = attack.run(target, x[left], wanted.of(left), eps=eps, rng=seed, **_of(more, left, len(x)))
        found = _merged(found, again, left)
    if found is None:  # pragma: no cover - there is a first weight
        raise ConfigError("no weights", rule="at least one", who="attack_guarded")
    return found


def _of(more: dict[str, Any], rows: Tensor, n: int) -> dict[str, Any]:
    """Arguments that have a value for each row, of some rows."""
    found = dict(more)
    if found.get("ids") is not None:
        found["ids"] = torch.as_tensor(found["ids"])[rows.cpu()]
    if "bounds" in found:
        found["bounds"] = tuple(
            each[rows] if isinstance(each, Tensor) and each.dim() > 1 and len(each) == n and n > 1 else each
            for each in found["bounds"]
        )
    return found


def _merged(first: AttackResult, second: AttackResult, rows: Tensor) -> AttackResult:
    """The first result with those rows replaced that the second one broke."""
    better = second.is_(Status.BROKEN)
    chosen = rows[better]
    fields: dict[str, Any] = {}
    for name in ("x_adv", "status", "loss", "best_step", "verified"):
        value = getattr(first, name).clone()
        value[chosen] = getattr(second, name)[better]
        fields[name] = value
    for name in ("queries", "gradients"):
        value = getattr(first, name).clone()
        value[rows] += getattr(second, name)
        fields[name] = value
    distance = {}
    for p, values in first.distance.items():
        distance[p] = values.clone()
        distance[p][chosen] = second.distance[p][better]
    reason = list(first.reason)
    for row, source in zip(chosen.tolist(), better.nonzero()[:, 0].tolist(), strict=True):
        reason[row] = second.reason[source]
    return replace(
        first,
        **fields,
        distance=distance,
        reason=tuple(reason),
        unreproduced=first.unreproduced + second.unreproduced,
        seconds=first.seconds + second.seconds,
    )
