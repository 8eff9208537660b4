"""What `mycelia serve` says while it runs, for people: a line for each thing that happened."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mycelia.cli.output import note
from mycelia.engine.events import Evaluation, Event, Round, RunFinished, SecureSum, WarningRaised

if TYPE_CHECKING:
    from mycelia.aggregator.server_config import ServerConfig
    from mycelia.aggregator.serving import Started
    from mycelia.aggregator.status import Board

__all__ = ["Lines"]


class Lines:
    """Lines on stderr.

    Args:
        configs: of the runs.
    """

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        self._rounds = {config.run.name: config.rounds for config in configs}
        self._one = len(configs) == 1
        self._cohort = configs[0].cohort
        self._total = configs[0].rounds
        self._round: Round | None = None
        self._said = ""
        self.live = sys.stderr.isatty()

    def started(self, facts: Started) -> None:
        """The server is up."""
        note(f"listening on {facts.listen}" + (f", enrolment on {facts.enrol}" if facts.enrol else ""))
        note(f"status page {facts.status}" if facts.status else f"status page {facts.status_off}")

    def event(self, event: Event) -> None:
        """Something was written down in a run folder."""
        match event:
            case Round():
                self._flush()
                self._round = event
            case Evaluation(metrics=metrics):
                self._flush(metrics)
            case SecureSum(failed=failed) if failed:
                gone = ", ".join(f"{count} in {phase}" for phase, count in event.dropped.items())
                note(
                    f"round {event.round}/{self._total}  no sum: {failed}"
                    + (f"; vanished: {gone}" if gone else "")
                )
            case WarningRaised(message=message, who=who):
                note(f"{who}: {message}", "warning")
            case RunFinished():
                self._flush()
            case _:
                pass

    async def watch(self, board: Board) -> None:
        """Who is there, while a round waits for devices."""
        version, before = 0, -1
        while True:
            version = await board.changed(version, 3600.0)
            snapshot = board.snapshot()
            waiting = [run for run in snapshot["runs"] if run["phase"] == "waiting"]
            here = snapshot["devices"]["connected"]
            if waiting and here != before:
                note(f"waiting for {self._cohort} clients: {here} connected")
                before = here

    def _flush(self, metrics: object = None) -> None:
        """A round's line, with the accuracy if it was measured."""
        found, self._round = self._round, None
        if found is None:
            return
        survivors, asked = found.counts["survivors"], found.counts["asked"]
        line = f"round {found.round}/{self._total}  {survivors} of {asked} in the sum"
        if isinstance(metrics, dict):
            if "accuracy" in metrics:
                line += f"  accuracy {metrics['accuracy']:.1%}"
            elif "loss" in metrics:
                line += f"  loss {metrics['loss']:.4g}"
        elif "loss" in found.metrics:
            line += f"  train loss {found.metrics['loss']:.4g}"
        note(line)
