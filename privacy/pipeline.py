"""The pipeline: what happens to an update between the device and the merge, in an order that is checked.

A stage has a device half, which changes a client's update, or a server half, which changes the sum, or both.
It says what it needs to have happened before and what it gives; a pipeline whose stages do not fit together
is refused when it is built.

What the server halves keep from round to round is public: it travels to the devices with the model, under
names that begin with `PREFIX`, and it is part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["ORDER", "PREFIX", "Pipeline", "Sent", "Stage"]

ORDER = (
    "clip", "compress", "quantise", "device-noise", "record", "mask", "sum", "unmask", "noise", "merge",
)  # fmt: skip
"""Where stages may stand; each at most once."""

PREFIX = "privacy."
"""How the names of a pipeline's public tensors begin, which keeps them apart from an algorithm's."""


class Sent(NamedTuple):
    """What a device half knows beside the update.

    Attributes:
        client: who made the update.
        round: number of the round whose model it was trained on.
        public: what came with the model.
    """

    client: int | str
    round: int
    public: Mapping[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """One stage; both halves leave what they are given alone unless they are overridden.

    Class attributes:
        place: its place, one of `ORDER`.
        needs: places of stages without which it has no meaning.
    """

    place: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def terms(self) -> Mapping[str, TermSpec]:
        """What the device half adds to an update, by name; the server half takes it out again."""
        return {}

    def begin(self) -> Tensors:
        """The public tensors of the stage before the first round; shapes and dtypes never change."""
        return {}

    def device(self, update: Update, sent: Sent) -> Update:
        """The device half."""
        del sent
        return update

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The server half: the new sum, and those public tensors that change for the next round.

        Args:
            total: the sum.
            public: the public tensors that this round's devices had.
            round: number of the round.
        """
        del public, round
        return total, {}


@dataclass(frozen=True)
class Pipeline:
    """Stages in order.

    Attributes:
        stages: in the order of `ORDER`.

    Raises:
        ConfigError: an unknown place, a wrong order, a place taken twice, or a stage without what it needs.
    """

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        places = [stage.place for stage in self.stages]
        if unknown := [place for place in places if place not in ORDER]:
            raise ConfigError(f"a stage {unknown[0]!r}", rule=f"one of {', '.join(ORDER)}", who="pipeline")
        if sorted(set(places), key=ORDER.index) != places:
            raise ConfigError(
                f"the stages {', '.join(places)}",
                rule=f"each once, in the order {', '.join(ORDER)}",
                who="pipeline",
            )
        for stage in self.stages:
            missing = [place for place in stage.needs if place not in places]
            if missing:
                raise ConfigError(
                    f"{stage.place} without {missing[0]}",
                    rule=f"{stage.place} needs {', '.join(stage.needs)} before it",
                    fix=f"add {missing[0]}: without it nothing bounds what one client can do to the sum",
                    who="pipeline",
                )

    @property
    def serves(self) -> bool:
        """Whether any stage has a server half: then a sum of nobody is treated like any other."""
        return any(type(stage).server is not Stage.server for stage in self.stages)

    def terms(self) -> dict[str, TermSpec]:
        """What the device halves add to an update."""
        return {name: spec for stage in self.stages for name, spec in stage.terms().items()}

    def begin(self) -> Tensors:
        """The public tensors before the first round."""
        return {name: tensor for stage in self.stages for name, tensor in stage.begin().items()}

    def device(self, update: Update, sent: Sent) -> Update:
        """All device halves, in order."""
        for stage in self.stages:
            update = stage.device(update, sent)
        return update

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """All server halves, in order; the new sum and the public tensors of the next round."""
        after = dict(public)
        for stage in self.stages:
            total, changed = stage.server(total, public, round)
            after |= changed
        return total, after

    def devices(self) -> Pipeline:
        """The part that travels to devices: it has no server half, and no secret of the server."""
        return Pipeline(tuple(stage for stage in self.stages if type(stage).device is not Stage.device))
