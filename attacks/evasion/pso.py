"""Particle swarms (Kennedy, Eberhart: "Particle swarm optimization", ICNN 1995) over the changes of an input.

The reduction after a success follows AdversarialPSO (Mosli, Wright, Yuan, Pan: "They might NOT be giants",
ESORICS 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.losses import Loss
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["PSO"]


@dataclass(frozen=True)
class PSO(Attack):
    """A swarm for each row; after success, single coordinates go back to the input while it lasts.

    v ← w·v + c₁·r₁·(own best − p) + c₂·r₂·(swarm's best − p), p ← clamp(p + v), with w falling linearly and a
    new r for every coordinate; |v| is at most `fastest` · eps; below the
    width of the ball a swarm settles before it has crossed it.

    Attributes:
        norm: "linf".
        particles: at least 2.
        steps: at least 1; each takes as many queries as there are particles.
        inertia: w at the first and the last step.
        own: c₁.
        social: c₂.
        fastest: share of eps.
        patience: steps without a rise of a swarm's best loss after which its particles are thrown anew; only
            that best is kept.
        reduce: queries per row that is broken, each of which takes one more coordinate back to the input's
            value, or is taken back itself; 0 leaves the change as it is.
        loss: what is raised.
    """

    needs: ClassVar[str] = "score"

    particles: int = 20
    steps: int = 100
    inertia: tuple[float, float] = (0.8, 0.6)
    own: float = 1.5
    social: float = 1.5
    fastest: float = 2.0
    patience: int = 15
    reduce: int = 64
    loss: Loss = "margin"

    def check(self) -> None:
        """See `Attack.check`."""
        rates = min(*self.inertia, self.own, self.social) >= 0 and self.fastest > 0
        if self.particles < 2 or min(self.steps, self.patience) < 1 or self.reduce < 0 or not rates:
            raise ConfigError(
                f"particles {self.particles}, steps {self.steps}, patience {self.patience}, "
                f"reduce {self.reduce}, inertia {self.inertia}, own {self.own}, social {self.social}, "
                f"fastest {self.fastest}",
                rule="at least 2 particles, a step and a patience of 1, fastest above 0, others at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        self._fly(search)
        if self.reduce and search.closest:
            self._reduce(search)

    def _fly(self, search: Search) -> None:
        rows, k = search.active, self.particles
        places, speed = self._thrown(search, rows, 0)
        best = places
        best_loss, _ = search.look_many(places, rows, search.left(rows).clamp(max=k), 0, self.loss)
        stalled = torch.zeros_like(rows)
        first, last = self.inertia
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            rows, places, speed, best, best_loss, stalled = (
                each[on] for each in (rows, places, speed, best, best_loss, stalled)
            )
            if not len(rows):
                return
            draws, shape, dtype = search.draws.of(rows), places.shape[1:], places.dtype
            at, top = torch.arange(len(rows), device=rows.device), best_loss.argmax(1)
            weight = first + (last - first) * (step - 1) / max(1, self.steps - 1)
            own = self.own * draws.uniform("own", shape, step=step, dtype=dtype)
            social = self.social * draws.uniform("social", shape, step=step, dtype=dtype)
            speed = weight * speed + own * (best - places) + social * (best[at, top][:, None] - places)
            speed = speed.clamp(-self.fastest * search.eps, self.fastest * search.eps)
            places = _clamped(search, places + speed, rows)
            counts = search.left(rows).clamp(max=k)
            losses, _ = search.look_many(places, rows, counts, step, self.loss)
            wide = (slice(None), slice(None), *[None] * (places.dim() - 2))
            best = torch.where((losses > best_loss)[wide], places, best)
            rose = losses.amax(1) > best_loss.amax(1)
            best_loss = torch.maximum(best_loss, losses)
            stalled = torch.where(rose, 0, stalled + 1)
            anew = (stalled >= self.patience).nonzero()[:, 0]
            if len(anew):
                places[anew], speed[anew] = self._thrown(search, rows[anew], step)
                others = torch.arange(k, device=rows.device) != best_loss[anew].argmax(1)[:, None]
                best_loss[anew] = torch.where(others, -torch.inf, best_loss[anew])
                stalled[anew] = 0

    def _thrown(self, search: Search, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Particles at corners of the ball, [k, particles, …], and their speeds."""
        x, draws, shape = search.x[rows], search.draws.of(rows), (self.particles, *search.x.shape[1:])
        places = x[:, None] + search.eps * draws.signs("place", shape, step=step, dtype=x.dtype)
        speed = min(self.fastest, 1.0) * search.eps
        speeds = speed * (2 * draws.uniform("speed", shape, step=step, dtype=x.dtype) - 1)
        return _clamped(search, places, rows), speeds

    def _reduce(self, search: Search) -> None:
        rows = search.broken.nonzero()[:, 0]
        if not len(rows):
            return
        points, x = search.best[rows].flatten(1), search.x[rows].flatten(1)
        keys = search.draws.of(rows).uniform("reduce", (x.shape[1],))
        order = torch.where(points != x, keys, torch.inf).argsort(dim=1, stable=True)
        changed = (points != x).sum(1)
        for turn in range(min(self.reduce, x.shape[1])):
            todo = ((changed > turn) & (search.left(rows) > 0)).nonzero()[:, 0]
            if not len(todo):
                return
            at = order[todo, turn][:, None]
            trial = points[todo].scatter(1, at, x[todo].gather(1, at))
            _, hit = search.look(trial.view(-1, *search.x.shape[1:]), rows[todo], self.steps + 1, self.loss)
            points[todo[hit]] = trial[hit]


def _clamped(search: Search, places: Tensor, rows: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(places, search.low[rows][:, None]), search.high[rows][:, None])
