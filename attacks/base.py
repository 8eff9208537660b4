"""What all attacks share: checks, the clean look, the search, the second look, and the result."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import NORMS, Norm, norm, wide
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.search import SLACK, Keep, Search, change
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive

__all__ = ["Attack", "Curve"]

_LOST: Final = "not reproduced"
_ON_LEVEL: Final = 1e-3  # of a step of the grid


@dataclass(frozen=True)
class Attack(ABC):
    """An attack: settings and nothing else. Model, data, goal, radius and randomness are arguments of a call.

    A class says what it `needs` of a model ("gradient", "score" or "label", or "score or label"), its `kind`
    ("fixed": stay inside eps; "minimum": the smallest change), and its `norms`; whether it can be `targeted`.
    """

    needs: ClassVar[str] = "gradient"
    kind: ClassVar[str] = "fixed"
    norms: ClassVar[tuple[Norm, ...]] = ("linf",)
    targeted: ClassVar[bool] = True

    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if self.norm not in self.norms:
            raise ConfigError(
                f"norm {self.norm!r}",
                rule=f"one of {', '.join(self.norms)}",
                who=f"{type(self).__name__}.norm",
            )
        self.check()

    @property
    def needed(self) -> str:
        """What these settings ask of a model: one of `needs`, where that names several."""
        return self.needs

    def check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming the setting.
        """

    @abstractmethod
    def search(self, search: Search) -> None:
        """Attack the rows of a search; what is found is what the search has seen."""

    def run(
        self,
        model: object,
        x: Any,
        goal: Goal,
        *,
        eps: float | None = None,
        rng: int = 0,
        bounds: Bounds = (0.0, 1.0),
        batch: int = 256,
        ids: Any = None,
        keep: Keep = "closest",
        queries: int | None = None,
        quantise: int | None = None,
        votes: int | None = None,
    ) -> AttackResult:
        """Attack every row of x.

        Args:
            model: see `as_model`.
            x: inputs [n, …], floating point, a tensor or an array.
            goal: what is wanted of each row.
            eps: radius in raw input units, at least 0; needed by attacks of kind "fixed".
            rng: seed; the same one gives the same bits on a CPU.
            bounds: smallest and largest value of an input; numbers, or tensors that broadcast to x.
            batch: rows at a time.
            ids: integers [n] that name the rows for random draws; by default their bytes and goals do.
            keep: "closest" success; or the point of highest "loss" in the ball, for training.
            queries: forward passes that a row may take; None: the attack's own limits.
            quantise: bits to which results are rounded, to see how many successes survive that.
            votes: passes of the second look, more than half of which a success has to reach the goal in; for
                random models. None: as many as gradients are averaged over (`eot`), one where they are not.

        Returns:
            what became of every row. One that cannot be attacked stops no other one.

        Raises:
            ConfigError: a setting that is out of range, or a model that lacks what the attack needs.
            DataError: inputs that are not floating point, beyond their bounds, or not as many as goals.
        """
        began = time.perf_counter()
        numpy = isinstance(x, np.ndarray)
        target = as_model(model, numpy=numpy)
        inputs = inputs_of(x)
        radius = self._radius(eps)
        low, high = bounds_of(bounds, inputs)
        self._check_call(target, inputs, goal, batch, keep, queries, quantise, votes)
        passes = votes or int(getattr(self, "eot", 1))
        inputs, sound = clipped(inputs, low, high)
        goal = goal.of(torch.arange(len(inputs), device=inputs.device))
        keys = _keys(inputs, goal, ids)
        draws = Draws(rng, type(self).__name__, keys)
        with target.quiet():
            parts = [
                self._some(target, inputs[rows], sound[rows], goal.of(rows), radius, (low, high),
                           draws.of(rows), keep, queries, rows)
                for rows in torch.arange(len(inputs), device=inputs.device).split(batch)
            ]  # fmt: skip
            result = self._result(parts, inputs, eps, rng)
            result = self._verified(target, result, inputs, goal, batch, passes)
            if passes > 1 and queries is None and keep == "closest" and self.kind == "fixed":
                lost = [row for row, text in enumerate(result.reason) if text == _LOST]
                if lost:
                    unlucky = torch.tensor(lost, device=inputs.device)
                    parts = [
                        self._some(target, inputs[rows], sound[rows], goal.of(rows), radius, (low, high),
                                   draws.of(rows), "loss", None, rows)
                        for rows in unlucky.split(batch)
                    ]  # fmt: skip
                    again = self._result(parts, inputs[unlucky], eps, rng)
                    again = self._verified(target, again, inputs[unlucky], goal.of(unlucky), batch, passes)
                    result = _recovered(result, unlucky, again)
            if quantise is not None:
                result = self._quantised(
                    target, result, inputs, goal, radius, (low, high), quantise, batch, passes
                )
        return replace(result, seconds=time.perf_counter() - began)

    def curve(
        self, model: object, x: Any, goal: Goal, *, eps: Sequence[float], rng: int = 0, **more: Any
    ) -> Curve:
        """Several radii, each with random draws of its own.

        Args:
            model: see `run`.
            x: see `run`.
            goal: see `run`.
            eps: radii; results come in increasing order.
            rng: seed.
            more: arguments of `run`.
        """
        radii = sorted({float(each) for each in eps})
        results = tuple(
            self.run(model, x, goal, eps=each, rng=derive(rng, f"attacks/curve/{each!r}"), **more)
            for each in radii
        )
        return Curve(tuple(radii), results)

    # --- inside -----------------------------------------------------------------------------------

    def _radius(self, eps: float | None) -> float:
        who = f"{type(self).__name__}.run"
        if eps is None:
            if self.kind == "fixed":
                raise ConfigError(
                    "no eps", rule="this attack stays inside a ball of radius eps", fix="eps=0.1", who=who
                )
            return torch.inf
        if not 0 <= eps < torch.inf:
            raise ConfigError(f"eps is {eps}", rule="at least 0 and finite, in units of the inputs", who=who)
        return float(eps)

    def _check_call(
        self,
        model: Model,
        x: Tensor,
        goal: Goal,
        batch: int,
        keep: str,
        queries: int | None,
        quantise: int | None,
        votes: int | None,
    ) -> None:
        who = f"{type(self).__name__}.run"
        if not isinstance(goal, Goal):
            raise ConfigError(
                f"a {type(goal).__name__} for a goal", rule="a Goal", fix="Untargeted(y)", who=who
            )
        if len(goal) != len(x):
            raise DataError(f"{len(x)} inputs, a goal of {len(goal)} rows", rule="one for each", who=who)
        if goal.targeted and not self.targeted:
            raise ConfigError(
                "a targeted goal", rule="this attack is untargeted", fix="Untargeted(y)", who=who
            )
        if self.needed not in model.offers:
            from mycelia.attacks import attacks_that_need

            usable = sorted({name for offer in model.offers for name in attacks_that_need(offer)})
            raise ConfigError(
                f"{model.name} offers {', '.join(sorted(model.offers))}",
                rule=f"this attack needs a {self.needed}",
                fix=f"these would run: {', '.join(usable)}",
                who=who,
            )
        if any(each is not None and each < 1 for each in (batch, queries, votes)) or (
            quantise is not None and not 1 <= quantise <= 16
        ):
            raise ConfigError(
                f"batch {batch}, queries {queries}, quantise {quantise}, votes {votes}",
                rule="batch, queries and votes at least 1, quantise 1 to 16 bits",
                who=who,
            )
        if keep not in ("closest", "loss"):
            raise ConfigError(f"keep {keep!r}", rule='"closest" or "loss"', who=who)

    def _some(
        self, model: Model, x: Tensor, sound: Tensor, goal: Goal, eps: float, bounds: tuple[Tensor, Tensor],
        draws: Draws, keep: Keep, queries: int | None, rows: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """A batch."""
        m = len(x)
        clean = model(torch.where(wide(sound, x), x, torch.zeros_like(x))) if m else x.new_zeros(0, 2)
        if m and clean.dim() == 2 and int(goal.labels.max()) >= clean.shape[1]:
            row = int(goal.labels.argmax())
            raise DataError(
                f"class {int(goal.labels[row])} in row {int(rows[row])}, {clean.shape[1]} outputs",
                rule="classes count from 0 to outputs − 1",
                who=f"{type(self).__name__}.run",
            )
        readable = sound & (predicted(clean) >= 0)
        there = goal.reached(clean) & readable
        status = torch.full((m,), int(Status.HELD), dtype=torch.int8, device=x.device)
        status[there] = int(Status.ALREADY_TARGET if goal.targeted else Status.CLEAN_WRONG)
        status[~readable] = int(Status.FAILED)
        reason = [""] * m
        for row in (~readable).nonzero()[:, 0].tolist():
            reason[row] = (
                "the model's output is not finite" if bool(sound[row]) else "an input that is not finite"
            )
        found: dict[str, Any] = {
            "x_adv": x.clone(), "status": status, "reason": reason,
            "loss": torch.full((m,), torch.nan, dtype=torch.float64, device=x.device),
            "queries": torch.ones(m, dtype=torch.int64, device=x.device),
            "gradients": torch.zeros(m, dtype=torch.int64, device=x.device),
            "best_step": torch.full((m,), -1, dtype=torch.int64, device=x.device),
        }  # fmt: skip
        todo = (readable & ~there).nonzero()[:, 0]
        if not len(todo) or (self.kind == "fixed" and eps == 0):
            return found
        box = tuple(bound.expand_as(x)[todo] if len(bound) == m else bound for bound in bounds)
        if len(bounds[0]) not in (1, m):  # bounds of every row of the call
            box = tuple(bound[rows][todo] for bound in bounds)
        search = Search(
            model, x[todo], goal.of(todo), self.norm, eps, box, draws.of(todo), clean[todo],  # type: ignore[arg-type]
            kind=self.kind, keep=keep, most=queries, eot=getattr(self, "eot", 1),
        )  # fmt: skip
        self.search(search)
        within = search.broken & (
            search._distance <= eps * (1 + SLACK) if self.kind == "minimum" else search.broken
        )
        status[todo] = torch.where(within, int(Status.BROKEN), int(Status.HELD)).to(torch.int8)
        for row, why in search.failed.items():
            if not bool(search.broken[row]):
                status[todo[row]] = int(Status.FAILED)
                reason[int(todo[row])] = why
        failed = status[todo] == int(Status.FAILED)
        seen = search.best_step >= 0
        unseen = ~seen & ~failed
        for row in unseen.nonzero()[:, 0].tolist():
            status[todo[row]] = int(Status.FAILED)
            reason[int(todo[row])] = "the budget was gone before a first candidate"
        good = seen & ~failed
        found["x_adv"][todo[good]] = search.best[good]
        for name in ("best_step", "queries", "gradients"):
            found[name][todo] += getattr(search, name) + (1 if name == "best_step" else 0)
        found["loss"][todo] = search.best_loss
        return found

    def _result(
        self, parts: Sequence[dict[str, Any]], x: Tensor, eps: float | None, seed: int
    ) -> AttackResult:
        def joined(name: str, dtype: torch.dtype) -> Tensor:
            values = [part[name] for part in parts]
            return torch.cat(values) if values else torch.zeros(0, dtype=dtype, device=x.device)

        x_adv = torch.cat([part["x_adv"] for part in parts]) if parts else x.clone()
        return AttackResult(
            x_adv=x_adv,
            status=joined("status", torch.int8),
            reason=tuple(text for part in parts for text in part["reason"]),
            distance={},
            loss=joined("loss", torch.float64),
            queries=joined("queries", torch.int64),
            gradients=joined("gradients", torch.int64),
            best_step=joined("best_step", torch.int64),
            verified=torch.zeros(len(x), dtype=torch.bool, device=x.device),
            unreproduced=0,
            eps=eps,
            attack=self,
            norm=self.norm,
            seed=seed,
            seconds=0.0,
        )

    def _verified(
        self, model: Model, found: AttackResult, x: Tensor, goal: Goal, batch: int, votes: int
    ) -> AttackResult:
        """Look once more at exactly what is returned, in batches of the same size; most votes decide."""
        n = len(x)
        sound = torch.isfinite(found.x_adv.flatten(1)).all(1) if n else found.verified
        given = torch.where(wide(sound, x), found.x_adv, torch.zeros_like(x))
        reached = torch.zeros(n, dtype=torch.int64, device=x.device)
        for _ in range(votes):
            for rows in torch.arange(n, device=x.device).split(batch) if n else ():
                reached[rows] += goal.of(rows).reached(model(given[rows]))
        verified = (2 * reached > votes) & sound
        lost = found.is_(Status.BROKEN) & ~verified
        status = torch.where(lost, int(Status.HELD), found.status).to(torch.int8)
        reason = tuple(
            _LOST if gone else text for gone, text in zip(lost.tolist(), found.reason, strict=True)
        )
        delta = torch.where(wide(sound, x), found.x_adv.double() - x.double(), 0.0)
        return replace(
            found,
            status=status,
            reason=reason,
            verified=verified,
            unreproduced=found.unreproduced + int(lost.sum()),
            votes=votes,
            distance={p: norm(delta, p) if n else delta.new_zeros(0) for p in NORMS},
        )

    def _quantised(
        self, model: Model, found: AttackResult, x: Tensor, goal: Goal, eps: float,
        bounds: tuple[Tensor, Tensor], bits: int, batch: int, votes: int,
    ) -> AttackResult:  # fmt: skip
        """The same on a grid of so many bits, where that is in the ball; who is still broken."""
        low, high = bounds
        if not bool(torch.isfinite(high - low).all()):
            raise ConfigError(
                "quantise without bounds", rule="the grid lies between finite bounds", who="quantise"
            )
        step = (high - low).double() / (2**bits - 1)
        place = (found.x_adv.double() - low) / step
        origin = (x.double() - low) / step
        nearest = place.round()
        towards = torch.where(place >= origin, place.floor(), place.ceil())
        towards = torch.where((towards - origin) * (place - origin) < 0, origin.round(), towards)
        changed = found.is_(Status.BROKEN) | found.is_(Status.HELD)
        level = (origin - origin.round()).abs() < _ON_LEVEL  # there, what is not moved keeps its bits
        moved = torch.where(level & (nearest == origin.round()), 0.0, (nearest - origin) * step)
        beyond = norm(moved, self.norm) > eps * (1 + SLACK)
        grid = torch.where(wide(beyond, x), towards, nearest)
        points = torch.minimum(torch.maximum((low + grid * step).to(x.dtype), low), high)
        points = torch.where(level & (grid == origin.round()), x, points)
        outside = (norm(change(points, x), self.norm) > eps * (1 + SLACK)) & changed
        points = torch.where(wide(outside, x), found.x_adv, points)
        before = int(found.is_(Status.BROKEN).sum())
        found = self._verified(
            model, replace(found, x_adv=torch.where(wide(changed, x), points, found.x_adv)), x, goal, batch,
            votes,
        )  # fmt: skip
        lost = [text == _LOST for text in found.reason]
        reason = tuple(
            f"no point of {bits} bits is in the ball"
            if out
            else f"lost by rounding to {bits} bits"
            if gone
            else text
            for out, gone, text in zip(outside.tolist(), lost, found.reason, strict=True)
        )
        status = torch.where(outside, int(Status.HELD), found.status).to(torch.int8)
        found = replace(found, status=status)
        share = None if not before else int(found.is_(Status.BROKEN).sum()) / before
        return replace(found, reason=reason, survive_8bit=share)


def _recovered(first: AttackResult, lost: Tensor, again: AttackResult) -> AttackResult:
    """A success on a random model may be luck, and ends the search all the same.

    Such rows were attacked once more for the highest loss, which no luck ends: who is broken there is broken.
    """
    broken = again.is_(Status.BROKEN)
    rows = lost[broken]
    found: dict[str, Any] = {"unreproduced": first.unreproduced - len(rows)}
    for name in ("x_adv", "status", "loss", "best_step", "verified"):
        found[name] = getattr(first, name).clone()
        found[name][rows] = getattr(again, name)[broken]
    for name in ("queries", "gradients"):
        found[name] = getattr(first, name).index_add(0, lost, getattr(again, name))
    found["distance"] = {
        p: values.index_copy(0, rows, again.distance[p][broken]) for p, values in first.distance.items()
    }
    known = set(rows.tolist())
    found["reason"] = tuple("" if row in known else text for row, text in enumerate(first.reason))
    return replace(first, **found)


@dataclass(frozen=True)
class Curve:
    """An attack at several radii.

    Attributes:
        eps: increasing.
        results: at each of them.
    """

    eps: tuple[float, ...]
    results: tuple[AttackResult, ...]

    @property
    def raw(self) -> tuple[float | None, ...]:
        """Success rates as they came."""
        return tuple(result.success_rate for result in self.results)

    @property
    def nested(self) -> tuple[Tensor, ...]:
        """Statuses in which what was broken at a smaller radius counts as broken."""
        found: list[Tensor] = []
        broken: Tensor | None = None
        for result in self.results:
            mine = result.is_(Status.BROKEN)
            broken = mine if broken is None else broken | mine
            found.append(torch.where(broken, int(Status.BROKEN), result.status).to(torch.int8))
        return tuple(found)


def _keys(x: Tensor, goal: Goal, ids: Any) -> Tensor:
    labels = goal.labels.to(x.device)
    if ids is None:
        return row_keys(x, labels)
    named = torch.as_tensor(ids, device=x.device)
    if named.shape != (len(x),) or named.is_floating_point():
        raise DataError(f"ids of {list(named.shape)}", rule="one integer per row", who="ids")
    return row_keys(named.to(torch.int64)[:, None], labels)
