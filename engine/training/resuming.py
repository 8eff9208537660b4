"""What a run that has begun says of itself, and where it goes on."""

from __future__ import annotations

from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.environment import describe
from mycelia.engine.errors import ConfigError
from mycelia.engine.events import Resumed, RunStarted
from mycelia.engine.run import CHECKPOINTS, Run

__all__ = ["COMMAND", "begun", "last_checkpoint"]

COMMAND = "train"


def begun(run: Run) -> RunStarted | None:
    """The event with which a training began; None for a run that has not.

    Raises:
        ConfigError: the run is of another command.
    """
    started = next(iter(run.events({RunStarted.kind})), None)
    if not isinstance(started, RunStarted):
        return None
    if started.command != COMMAND:
        raise ConfigError(
            f"the run was made by `mycelia {started.command}`",
            rule="a run goes on with the command that began it",
            fix=f"mycelia {started.command} --resume {run.path}",
            who=str(run.path),
        )
    return started


def last_checkpoint(run: Run) -> Checkpoint | None:
    """The newest intact checkpoint; None when the run stopped before its first one and begins anew."""
    if any((run.path / CHECKPOINTS).glob("step-*")):
        return run.load_checkpoint()
    run.log(Resumed(step=0, environment=describe()))
    return None
