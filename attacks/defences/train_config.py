"""The settings of `mycelia train` with a `[defence]` block, which trains on attacked inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mycelia.attacks.defences.registry import build
from mycelia.attacks.defences.training import TrainingDefence
from mycelia.engine.config import Named
from mycelia.engine.errors import ConfigError
from mycelia.privacy.central_config import PrivateTrainConfig

__all__ = ["DefendedTrainConfig", "wrong_with"]


class DefendedTrainConfig(PrivateTrainConfig):
    """Central training of one model on one data set, private or adversarial where it has the block for it."""

    unavailable: ClassVar[frozenset[str]] = frozenset()

    defence: Named | None = None
    """A name of `attacks/defences/registry.py`, with its options; its presence changes what is trained on."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Options that the defence refuses, and what it rules out."""
        yield from super().conflicts()
        if self.defence is None:
            return
        if self.privacy is not None:
            yield (
                "defence",
                "a private step is on the examples as they are, and on attacked ones there is none; take out "
                "[defence] or [privacy]",
            )
        yield from wrong_with(self.defence)

    def training_defence(self) -> TrainingDefence | None:
        """What the block names."""
        return None if self.defence is None else build(self.defence.name, **self.defence.options)


def wrong_with(block: Named) -> Iterable[tuple[str, str]]:
    """What a `[defence]` block has wrong, as `Strict.conflicts` says it."""
    try:
        build(block.name, **block.options)
    except ConfigError as error:
        key = error.who if error.who.startswith("defence.") else "defence"
        yield key, "; ".join(filter(None, (error.found, error.rule, error.fix)))
