"""Which piece of work a frame belongs to."""

from __future__ import annotations

from typing import NamedTuple, Self

from mycelia.aggregator.wire import federation_pb2 as pb

__all__ = ["Position"]


class Position(NamedTuple):
    """A run, a round of it, and an attempt at that round; later ones compare greater within a run.

    Attributes:
        run: its name, 1 to 256 bytes.
        round: from 0.
        attempt: from 0.
    """

    run: str
    round: int
    attempt: int

    @classmethod
    def of(cls, message: pb.Position) -> Self:
        """What a frame says."""
        return cls(message.run, message.round, message.attempt)

    def to_wire(self) -> pb.Position:
        """As a frame says it."""
        return pb.Position(run=self.run, round=self.round, attempt=self.attempt)

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt} of {self.run}"
