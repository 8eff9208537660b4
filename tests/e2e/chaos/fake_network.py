"""A clock and a network that exist in numbers alone, and what is drawn to go wrong on them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SHARE: Final = 0.3
"""With which each kind of fault befalls each device in a round, and the server."""
KINDS: Final = ("kill", "delay", "duplicate", "corrupt", "reorder")
_LINE_S: Final = 0.05
_EVENTS: Final = 20_000


class Crashed(Exception):
    """The server is killed; what it had not done is lost."""


@dataclass
class Network:
    """Delivers in the order of time; nothing else happens.

    Attributes:
        dice: decide.
        now: seconds; also by the wall.
        name: of what is played, for messages.
    """

    dice: random.Random
    name: str
    now: float = 1_000_000.0
    events: int = 0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Something happens at a time, or now if that is over."""
        self._number += 1
        heapq.heappush(self._due, (max(when, self.now), self._number, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def line(self) -> float:
        """How long a message takes."""
        return self.dice.uniform(0.2, 1.0) * _LINE_S

    def play(self, over: Callable[[], bool], seconds: float) -> None:
        """Until it is over; which it is in bounded time, and after a bounded number of events."""
        begun, ends = self.events, self.now + seconds
        while not over():
            assert self._due, f"{self.name}: it hangs, nothing is to come"
            when, _, what = heapq.heappop(self._due)
            assert when <= ends, f"{self.name}: it takes more than {seconds:g} s"
            self.now = when
            self.events += 1
            assert self.events - begun < _EVENTS, f"{self.name}: it takes more than {_EVENTS} events"
            what()


@dataclass
class Faults:
    """What befalls one device in a round: each kind once, at a message that is drawn.

    Attributes:
        at: number of the device's message, from 0, that each fault hits.
    """

    at: dict[str, int]
    seen: int = 0

    @classmethod
    def draw(cls, dice: random.Random, messages: int, kinds: Iterable[str] = KINDS) -> Faults:
        return cls({kind: dice.randrange(messages) for kind in kinds if dice.random() < SHARE})

    def next(self) -> set[str]:
        """The faults of the next message."""
        found = {kind for kind, number in self.at.items() if number == self.seen}
        self.seen += 1
        return found


def carry(
    network: Network,
    faults: set[str],
    message: Any,
    deliver: Callable[[Any], None],
    damaged: Callable[[Any], Any],
    late_s: Sequence[float],
) -> None:
    """One message over the network.

    Args:
        network: with the dice.
        faults: that befall it.
        message: as it was sent.
        deliver: what the other side does with it.
        damaged: what comes of it in the place of the message.
        late_s: how late it is at least and at most, if it is.
    """
    dice, seconds = network.dice, network.line()
    if "delay" in faults:
        seconds += dice.uniform(*late_s)
    if "reorder" in faults:
        seconds += dice.uniform(1, 10) * _LINE_S  # those behind it overtake it
    if "corrupt" in faults:
        network.after(seconds, lambda: deliver(damaged(message)))
        if dice.random() < 0.3:
            return  # the connection is not made again in this round
        seconds += dice.uniform(1.0, 4.0)  # it breaks, and the message is sent on the next one
    network.after(seconds, lambda: deliver(message))
    if "duplicate" in faults:
        network.after(seconds + dice.uniform(0.0, late_s[1]), lambda: deliver(message))
