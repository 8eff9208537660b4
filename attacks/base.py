"""What all attacks share: checks, the clean look, what was best on the way, the second look, and the result.

An attack moves points about; everything it has evaluated goes through `Search`, which remembers for each row
the nearest success and the point of highest loss. So no attack can lose a success that it has seen, count a
point outside the ball, or report its last iterate where an earlier one was better.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import NORMS, Norm, norm, project
from mycelia.attacks.result import AttackResult, Status
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive

__all__ = ["Attack", "Bounds", "Search"]

Bounds = tuple[float | Tensor, float | Tensor]
Keep = Literal["closest", "loss"]

_TOGETHER: Final = 2**22  # numbers that go through the model in one pass of `look_many`
_ON_LEVEL: Final = 1e-3  # of a step of the grid
_SLACK: Final = 1e-6  # relative: of a norm beyond eps, and of an input beyond its bounds


class Search:
    """Some rows under attack.

    Attributes:
        x: inputs, [m, …].
        goal: of these rows.
        norm: of the ball, or of what is made small.
        eps: radius; infinite where any change will do.
        low: smallest values, as x.
        high: largest values, as x.
        box: the bounds alone, smallest and largest values; `low` and `high` of a "fixed" linf attack are the
            ball's, too.
        draws: random numbers of these rows.
        classes: of the model; 0 where it gives labels only.
        clean: its outputs at x.
        best: for each row the nearest success, or where there is none the point of highest loss.
        broken: bool [m].
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        goal: Goal,
        p: Norm,
        eps: float,
        bounds: tuple[Tensor, Tensor],
        draws: Draws,
        clean: Tensor,
        *,
        kind: str,
        keep: Keep,
        most: int | None,
        eot: int = 1,
    ) -> None:
        m = len(x)
        self.x, self.goal, self.norm, self.eps, self.draws, self.clean = x, goal, p, eps, draws, clean
        self.classes = clean.shape[1] if clean.dim() == 2 else 0
        self.low, self.high = (bound.expand_as(x) for bound in bounds)
        self.box = self.low, self.high
        if kind == "fixed" and p == "linf":  # iterates inside these are inside the ball after rounding, too
            self.low = torch.maximum(self.low, _inwards(x, -eps))
            self.high = torch.minimum(self.high, _inwards(x, eps))
        self.lower, self.upper = self.low - x, self.high - x
        self._model, self._kind, self._keep, self._most, self._eot = model, kind, keep, most, eot
        self.best = x.clone()
        self.broken = torch.zeros(m, dtype=torch.bool, device=x.device)
        self.failed: dict[int, str] = {}
        self._out = torch.zeros_like(self.broken)
        self._distance = torch.full((m,), torch.inf, dtype=torch.float64, device=x.device)
        self._loss = torch.full((m,), -torch.inf, dtype=torch.float64, device=x.device)
        self.best_loss = torch.full((m,), torch.nan, dtype=torch.float64, device=x.device)
        self.best_step = torch.full((m,), -1, dtype=torch.int64, device=x.device)
        self.queries = torch.zeros(m, dtype=torch.int64, device=x.device)
        self.gradients = torch.zeros(m, dtype=torch.int64, device=x.device)

    @property
    def closest(self) -> bool:
        """Whether the closest success is wanted, not the highest loss."""
        return self._keep == "closest"

    # --- which rows -------------------------------------------------------------------------------

    @property
    def active(self) -> Tensor:
        """Indices of the rows to go on with: not out of budget, not failed, and not done."""
        rows = torch.arange(len(self.x), device=self.x.device)
        return rows[self.going_on(rows)]

    def going_on(self, rows: Tensor) -> Tensor:
        """Which of these rows are still active, bool [k]."""
        done = self._out[rows]
        if self._kind == "fixed" and self._keep == "closest":
            done = done | self.broken[rows]
        if self._most is not None:
            done = done | (self.queries[rows] >= self._most)
        return ~done

    def fail(self, rows: Tensor, reason: str) -> None:
        """These cannot be attacked; what was found so far counts all the same."""
        self._out[rows] = True
        for row in rows.tolist():
            self.failed.setdefault(row, reason)

    def left(self, rows: Tensor) -> Tensor:
        """Queries that each row may still make; a large number where there is no limit."""
        if self._most is None:
            return torch.full_like(rows, 2**62)
        return (self._most - self.queries[rows]).clamp(min=0)

    # --- what a model says ------------------------------------------------------------------------

    def look(self, points: Tensor, rows: Tensor, step: int, loss: Loss = "margin") -> tuple[Tensor, Tensor]:
        """Evaluate points, one for each of these rows, and remember what is good.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            loss: by which points without success are compared; "margin" for decision-based attacks has no
                meaning where there are labels only, and is −distance there.

        Returns:
            loss [k] and whether the goal is reached [k].
        """
        outputs = self._model(points)
        self.queries[rows] += 1
        goal = self.goal.of(rows)
        reached = goal.reached(outputs)
        if outputs.dim() == 2:
            losses = goal.loss(outputs, loss)
        else:
            losses = torch.where(reached, 1.0, -1.0).to(points.dtype)
        self._remember(points, rows, losses, reached, step)
        return losses, reached

    def look_many(
        self, points: Tensor, rows: Tensor, counts: Tensor, step: int, loss: Loss = "margin"
    ) -> tuple[Tensor, Tensor]:
        """Evaluate several points of each of these rows, and remember the best of each row.

        Args:
            points: [k, b, …], inside ball and box.
            rows: indices [k], each once.
            counts: how many of its points a row evaluates, [k]; the others have a loss of −inf.
            step: for `best_step`.
            loss: of scores.

        Returns:
            loss [k, b] and whether the goal is reached [k, b].
        """
        k, b = points.shape[:2]
        asked = torch.arange(b, device=rows.device) < counts[:, None]
        losses = torch.full((k, b), -torch.inf, dtype=points.dtype, device=points.device)
        reached = torch.zeros_like(asked)
        places = asked.flatten().nonzero()[:, 0]
        together = max(1, _TOGETHER // max(1, self.x[:1].numel()))
        for some in places.split(together) if len(places) else ():
            who = rows[some // b]
            outputs, goal = self.outputs(points.flatten(0, 1)[some], who), self.goal.of(who)
            losses.view(-1)[some] = _known(goal.loss(outputs, loss)).to(losses.dtype)
            reached.view(-1)[some] = goal.reached(outputs)
        near = norm(_change(points, self.x[rows][:, None]).flatten(0, 1), self.norm).view(k, b)
        best = losses.argmax(1)
        if self._keep == "closest":
            best = torch.where(reached.any(1), torch.where(reached, near, torch.inf).argmin(1), best)
        some = (counts > 0).nonzero()[:, 0]
        if len(some):
            best = best[some]
            self._remember(points[some, best], rows[some], losses[some, best], reached[some, best], step)
        return losses, reached

    def outputs(self, points: Tensor, rows: Tensor) -> Tensor:
        """Logits or labels at points that are no candidates; they are counted and not remembered.

        Args:
            points: [k, …]
            rows: indices [k]; a row may come several times.
        """
        self.queries.index_add_(0, rows, torch.ones_like(rows))
        return self._model(points)

    def gradient(
        self,
        points: Tensor,
        rows: Tensor,
        step: int,
        loss: Loss | Callable[[Tensor, Goal], Tensor] = "ce",
        *,
        candidates: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, raised towards the goal, and its gradient; the points are remembered like any other.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            loss: see `Goal.loss`.
            candidates: whether the points may be what is returned.

        Returns:
            gradient [k, …] (0 where it is not finite: these rows failed), loss [k], outputs [k, classes].
        """
        goal = self.goal.of(rows)
        found, losses, outputs = self._model.gradient(points, lambda z: goal.loss(z, loss))  # type: ignore[arg-type]
        if self._eot > 1:  # expectation over the transformations of a random model
            for _ in range(self._eot - 1):
                more, others, again = self._model.gradient(points, lambda z: goal.loss(z, loss))  # type: ignore[arg-type]
                found, losses, outputs = found + more, losses + others, outputs + again
            found, losses, outputs = found / self._eot, losses / self._eot, outputs / self._eot
        self.queries[rows] += self._eot
        self.gradients[rows] += self._eot
        if candidates:
            self._remember(points, rows, losses, goal.reached(outputs), step)
        total = found.flatten(1).sum(1) + losses  # one pass: not finite if anything is not
        if not bool(torch.isfinite(total).all()):
            bad = ~(torch.isfinite(found.flatten(1)).all(1) & torch.isfinite(losses))
            found = torch.where(bad.view(-1, *[1] * (found.dim() - 1)), torch.zeros_like(found), found)
            self.fail(rows[bad], "a gradient that is not finite")
        return found, losses, outputs

    def slopes(self, points: Tensor, rows: Tensor, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of several sums of logits from one forward pass; the points are remembered, too.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            weights: [k, c, classes], of the logits in each of c sums.

        Returns:
            gradients [k, c, …] (0 where one is not finite: these rows have failed), outputs [k, classes].
        """
        count = weights.shape[1]
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            traced = self._model.traced(leaf)
            found = torch.stack(
                [
                    torch.autograd.grad((traced * weights[:, k]).sum(), leaf, retain_graph=k + 1 < count)[0]
                    for k in range(count)
                ],
                1,
            )
        outputs = traced.detach()
        self.queries[rows] += 1
        self.gradients[rows] += count
        goal = self.goal.of(rows)
        self._remember(points, rows, goal.loss(outputs, "margin"), goal.reached(outputs), step)
        sound = torch.isfinite(found.flatten(1).sum(1) + outputs.sum(1))  # one pass, as above
        if not bool(sound.all()):
            sound = torch.isfinite(found.flatten(1)).all(1) & torch.isfinite(outputs).all(1)
            found = torch.where(_wide(sound, found), found, torch.zeros_like(found))
            self.fail(rows[~sound], "a gradient that is not finite")
        return found, outputs

    def inside(self, points: Tensor, rows: Tensor) -> Tensor:
        """The nearest points of ball and box."""
        if self.norm == "linf":
            return torch.minimum(torch.maximum(points, self.low[rows]), self.high[rows])
        x = self.x[rows]
        if self.eps == torch.inf:
            return torch.minimum(torch.maximum(points, self.low[rows]), self.high[rows])
        if x.element_size() == 2:  # a sum of halves may be rounded out of the ball
            lower, upper = (bound[rows].float() - x.float() for bound in (self.low, self.high))
            delta = project(points.float() - x.float(), self.norm, self.eps, lower, upper)
            return _towards(x, x.float() + delta)
        delta = project(points - x, self.norm, self.eps, self.lower[rows], self.upper[rows])
        return torch.minimum(torch.maximum(x + delta, self.low[rows]), self.high[rows])

    def _remember(self, points: Tensor, rows: Tensor, losses: Tensor, reached: Tensor, step: int) -> None:
        distance = norm(_change(points, self.x[rows]), self.norm)
        fixed = self._kind == "fixed"
        fits = distance <= self.eps * (1 + _SLACK)
        if self.norm != "linf":  # linf iterates are clamped
            low, high = self.low[rows], self.high[rows]
            fits &= ((points >= low) & (points <= high)).flatten(1).all(1)
        values = _known(losses.double())
        success = reached & (fits | (not fixed))
        before, known = self.broken[rows], self._distance[rows]
        if self._keep == "loss":
            better = (values > self._loss[rows]) & fits
        else:
            closer = success & (distance < known)
            tie = success & before & (distance == known)
            if bool(tie.any()):  # fewer or smaller changes that the norm does not see
                which = rows[tie]
                found, held = (_change(each, self.x[which]) for each in (points[tie], self.best[which]))
                closer[tie] = norm(found, "l2") < norm(held, "l2")
            higher = ~success & ~before & (fits | (not fixed)) & (values > self._loss[rows])
            better = closer | higher
        if bool(better.any()):
            chosen = rows[better]
            self.best[chosen] = points[better].to(self.best.dtype)
            self.best_loss[chosen] = losses.double()[better]
            self.best_step[chosen] = step
            self._distance[chosen] = torch.where(success[better], distance[better], self._distance[chosen])
        self._loss[rows] = torch.where(
            fits | (not fixed), torch.maximum(self._loss[rows], values), self._loss[rows]
        )
        if self._keep == "loss":
            self.broken[rows] = torch.where(better, success, before)
        else:
            self.broken[rows] = before | success


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
        inputs = _inputs(x)
        radius = self._radius(eps)
        low, high = _bounds(bounds, inputs)
        self._check_call(target, inputs, goal, batch, keep, queries, quantise, votes)
        passes = votes or int(getattr(self, "eot", 1))
        inputs, sound = _clipped(inputs, low, high)
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
        clean = model(torch.where(_wide(sound, x), x, torch.zeros_like(x))) if m else x.new_zeros(0, 2)
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
            search._distance <= eps * (1 + _SLACK) if self.kind == "minimum" else search.broken
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
        given = torch.where(_wide(sound, x), found.x_adv, torch.zeros_like(x))
        reached = torch.zeros(n, dtype=torch.int64, device=x.device)
        for _ in range(votes):
            for rows in torch.arange(n, device=x.device).split(batch) if n else ():
                reached[rows] += goal.of(rows).reached(model(given[rows]))
        verified = (2 * reached > votes) & sound
        lost = found.is_(Status.BROKEN) & ~verified
        status = torch.where(lost, int(Status.HELD), found.status).to(torch.int8)
        reason = tuple(
            "not reproduced" if gone else text for gone, text in zip(lost.tolist(), found.reason, strict=True)
        )
        delta = torch.where(_wide(sound, x), found.x_adv.double() - x.double(), 0.0)
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
        beyond = norm(moved, self.norm) > eps * (1 + _SLACK)
        grid = torch.where(_wide(beyond, x), towards, nearest)
        points = torch.minimum(torch.maximum((low + grid * step).to(x.dtype), low), high)
        points = torch.where(level & (grid == origin.round()), x, points)
        outside = (norm(_change(points, x), self.norm) > eps * (1 + _SLACK)) & changed
        points = torch.where(_wide(outside, x), found.x_adv, points)
        before = int(found.is_(Status.BROKEN).sum())
        found = self._verified(
            model, replace(found, x_adv=torch.where(_wide(changed, x), points, found.x_adv)), x, goal, batch,
            votes,
        )  # fmt: skip
        lost = [text == "not reproduced" for text in found.reason]
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


def _known(losses: Tensor) -> Tensor:
    """One that is not a number is lower than any other: it neither wins a comparison nor hides what comes."""
    return torch.where(losses.isnan(), -torch.inf, losses)


def _wide(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (x.dim() - 1))


def _change(points: Tensor, x: Tensor) -> Tensor:
    """The difference in double precision; that of halves is taken there: their own is rounded too much."""
    return points.double() - x.double() if x.element_size() == 2 else (points - x).double()


def _inwards(x: Tensor, by: float) -> Tensor:
    """The sum in the precision of x, on the near side."""
    if x.element_size() == 2:
        return _towards(x, x.double() + by)
    moved = x + by
    beyond = (moved.double() - x.double()).abs() > abs(by)
    return torch.where(beyond, torch.nextafter(moved, x), moved)


def _towards(x: Tensor, wanted: Tensor) -> Tensor:
    """Values of 16 bits as near as can be to those that are wanted, and no further from x than they."""
    near = wanted.to(x.dtype)
    beyond = (near.double() - x.double()).abs() > (wanted.double() - x.double()).abs()
    bits = near.view(torch.int16).int()
    up = x.double() > near.double()
    # Bits of floats count up with their size; from zero the next is the smallest one of either sign.
    step = torch.where((near > 0) == up, 1, -1)
    after = torch.where(near == 0, torch.where(up, 1, 1 - 2**15), bits + step)
    return torch.where(beyond, after.to(torch.int16).view(x.dtype), near)


def _inputs(x: Any) -> Tensor:
    found = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if not isinstance(found, Tensor):
        raise DataError(f"x is a {type(x).__name__}", rule="a tensor or an array [n, …]", who="x")
    if not found.is_floating_point():
        raise DataError(
            f"x is {found.dtype}",
            rule="floating point: a gradient step on integers would be rounded away",
            fix="x.float() / 255, with eps in the same units; or bounds=(0, 255) with x.float()",
            who="x",
        )
    if found.dim() < 2:
        raise DataError(
            f"x has shape {list(found.shape)}", rule="[n, …]: rows first", fix="x[:, None]", who="x"
        )
    return found.detach()


def _bounds(bounds: Bounds, x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    try:
        low, high = (
            bound if bound.dim() == x.dim() else bound.expand(1, *x.shape[1:]) for bound in (low, high)
        )
        torch.broadcast_shapes(low.shape, high.shape, x.shape if len(x) else (1, *x.shape[1:]))
    except RuntimeError as error:
        raise ConfigError(
            f"bounds of {list(low.shape)} and {list(high.shape)}",
            rule=f"they broadcast to x, {list(x.shape)}",
            who="bounds",
        ) from error
    if bool((low >= high).any()) or bool(low.isnan().any() | high.isnan().any()):
        raise ConfigError(f"bounds {bounds}", rule="the lower one is below the upper one", who="bounds")
    return low, high


def _clipped(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs inside their bounds, and which rows are finite."""
    sound = torch.isfinite(x.flatten(1)).all(1)
    if not len(x):
        return x, sound
    width = torch.where(torch.isfinite(high - low), high - low, torch.ones_like(low))
    beyond = ((x < low - _SLACK * width) | (x > high + _SLACK * width)) & _wide(sound, x)
    if bool(beyond.any()):
        rows = beyond.flatten(1).any(1).nonzero()[:, 0].tolist()
        seen = x[sound]
        raise DataError(
            f"x lies between {float(seen.min()):g} and {float(seen.max()):g}, beyond bounds "
            f"{float(low.min()):g} to {float(high.max()):g} in {len(rows)} rows (first: {rows[0]})",
            rule="inputs lie inside their bounds",
            fix="bounds=(low, high) as the data has them; normalise in the model (with_normalisation)",
            who="x",
        )
    clipped = torch.minimum(torch.maximum(x, low), high)
    return torch.where(_wide(sound, x), clipped, x), sound


def _keys(x: Tensor, goal: Goal, ids: Any) -> Tensor:
    labels = goal.labels.to(x.device)
    if ids is None:
        return row_keys(x, labels)
    named = torch.as_tensor(ids, device=x.device)
    if named.shape != (len(x),) or named.is_floating_point():
        raise DataError(f"ids of {list(named.shape)}", rule="one integer per row", who="ids")
    return row_keys(named.to(torch.int64)[:, None], labels)
