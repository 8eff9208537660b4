"""The pipeline: what happens to an update between the device and the merge, in an order that is checked.

A stage has a device half, which changes a client's update, or a server half, which changes the sum, or both.
It says what it needs to have happened before and what it gives; a pipeline whose stages do not fit together
is refused when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.errors import ConfigError
from mycelia.engine.sums import Total, Update

__all__ = ["ORDER", "Pipeline", "Stage"]

ORDER = ("clip", "compress", "quantise", "share", "mask", "sum", "unmask", "noise", "merge")
"""Where stages may stand; each at most once."""


@dataclass(frozen=True)
class Stage:
    """One stage; both halves leave what they are given alone unless they are overridden.

    Class attributes:
        place: its place, one of `ORDER`.
        needs: places of stages without which it has no meaning.
    """

    place: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def device(self, update: Update) -> Update:
        """The device half."""
        return update

    def server(self, total: Total, round: int) -> Total:
        """The server half."""
        del round
        return total


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

    def device(self, update: Update) -> Update:
        """All device halves, in order."""
        for stage in self.stages:
            update = stage.device(update)
        return update

    def server(self, total: Total, round: int) -> Total:
        """All server halves, in order."""
        for stage in self.stages:
            total = stage.server(total, round)
        return total

    def devices(self) -> Pipeline:
        """The part that travels to devices: it has no server half, and no secret of the server."""
        return Pipeline(tuple(stage for stage in self.stages if type(stage).device is not Stage.device))
