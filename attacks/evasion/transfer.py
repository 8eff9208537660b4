"""Examples crafted on other models and tried on this one.

Papernot, McDaniel, Goodfellow: "Transferability in machine learning", 2016; several models together: Dong et
al.: "Boosting adversarial attacks with momentum", CVPR 2018, section 3.4 (the mean of logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.draws import Draws
from mycelia.attacks.evasion.momentum import MIM
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import NORMS, Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import derive

__all__ = ["Transfer"]

_OF_ATTACK: Final = cast(Norm, "")  # no norm was given: that of the attack


@dataclass(frozen=True)
class Transfer(Attack):
    """An attack on source models, of which the target is only asked for its label.

    One example is crafted on each source model, and with several models one on the mean of their logits. Each
    is the point of highest loss there, also where a source model is fooled earlier or is wrong from the
    start. The target sees each once: `queries` counts these looks, not the passes of source models,
    and `best_step` is the place of the source model, from 1 on.

    Attributes:
        source_models: one or more; what `as_model` takes.
        attack: of kind "fixed"; None: MIM.
        norm: of the ball; by default that of the attack.
    """

    needs: ClassVar[str] = "label"
    norms: ClassVar[tuple[Norm, ...]] = NORMS

    norm: Norm = field(default=_OF_ATTACK, kw_only=True)
    source_models: Any = ()
    attack: Attack | None = None

    def __post_init__(self) -> None:
        given = self.source_models
        # A single module may be iterable, too.
        sources = tuple(given) if isinstance(given, list | tuple) else (given,)
        object.__setattr__(self, "source_models", sources)
        if self.norm == _OF_ATTACK:
            object.__setattr__(self, "norm", "linf" if self.attack is None else self.attack.norm)
        super().__post_init__()

    def check(self) -> None:
        """See `Attack.check`."""
        if not self.source_models:
            raise ConfigError(
                "no source models", rule="examples are crafted on other models", fix="Transfer([model])",
                who="Transfer",
            )  # fmt: skip
        attack = self.crafted_by
        if attack.kind != "fixed" or attack.norm != self.norm:
            raise ConfigError(
                f"{type(attack).__name__}, {attack.kind}, in {attack.norm}, for examples in {self.norm}",
                rule='an attack of kind "fixed" of the same norm',
                fix=f"MIM(norm={self.norm!r})",
                who="Transfer.attack",
            )

    @property
    def crafted_by(self) -> Attack:
        """The attack on the source models."""
        return MIM(norm=self.norm) if self.attack is None else self.attack

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        sources = [as_model(each) for each in self.source_models]
        for source in sources:
            if self.crafted_by.needed not in source.offers:
                raise ConfigError(
                    f"the source model {source.name} offers {', '.join(sorted(source.offers))}",
                    rule=f"{type(self.crafted_by).__name__} needs a {self.crafted_by.needed}",
                    who="Transfer",
                )
        if len(sources) > 1 and all("score" in source.offers for source in sources):
            sources.append(_Together(sources))
        for place, source in enumerate(sources):
            rows = search.active
            if not len(rows):
                return
            points, found = self._crafted(search, source, rows, place)
            if bool(found.any()):
                search.look(points[found], rows[found], place + 1)
        never = (search.best_step < 0) & (search.queries == 0)
        search.fail(never.nonzero()[:, 0], "no source model gave an example")

    def _crafted(self, search: Search, source: Model, rows: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Points of highest loss on a source model, and for which rows there is one."""
        attack, x = self.crafted_by, search.x[rows]
        low, high = search.box
        seed = derive(search.draws.seed, f"attacks/transfer/{place}")
        with source.quiet():
            clean = source(x)
            goal = search.goal.of(rows)
            if clean.dim() == 2 and int(goal.labels.max()) >= clean.shape[1]:
                raise ConfigError(
                    f"{source.name} has {clean.shape[1]} classes, the goal names {int(goal.labels.max())}",
                    rule="source models know the classes of the goal, which count from 0",
                    who="Transfer",
                )
            inner = Search(
                source, x, goal, self.norm, search.eps, (low[rows], high[rows]),
                Draws(seed, type(attack).__name__, search.draws.keys[rows]), clean,
                kind="fixed", keep="loss", most=None, eot=getattr(attack, "eot", 1),
            )  # fmt: skip
            attack.search(inner)
        return inner.best, inner.best_step >= 0


class _Together(Model):
    """The mean of the logits of several models."""

    name = "source models together"

    def __init__(self, models: list[Model]) -> None:
        self._models = list(models)
        self.offers = frozenset.intersection(*(each.offers for each in models))

    def __call__(self, x: Tensor) -> Tensor:
        return _mean([each(x) for each in self._models])

    def traced(self, x: Tensor) -> Tensor:
        return _mean([each.traced(x) for each in self._models])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._models:
                stack.enter_context(each.quiet())
            yield


def _mean(logits: list[Tensor]) -> Tensor:
    shapes = {each.shape for each in logits}
    if len(shapes) > 1:
        raise ConfigError(
            f"source models with {', '.join(str(each.shape[-1]) for each in logits)} classes",
            rule="the same classes in all of them",
            who="Transfer",
        )
    return torch.stack(logits).mean(0)
