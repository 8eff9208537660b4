"""How simulated devices behave: whether they can be reached, how fast they are, and where they drop out.

Everything is a pure function of (seed, round, client), and of the simulated time where there are day and
night, so that a run repeats exactly and a resumed one goes on as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from mycelia.engine.config import Strict
from mycelia.simulations.streams import normals, uniforms

__all__ = ["Availability", "Behaviour", "Dropout", "Fates", "Network", "Speed", "Stragglers"]

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_DAY_S = 86_400.0
_BITS_PER_MBIT = 1e6
_STAGES = {1: "configure", 2: "train", 3: "upload"}
_SECURE_STAGES = {1: "configure", 5: "sharing", 2: "train", 3: "upload", 6: "agree", 7: "unmask"}
"""In the order in which a device passes them; 4 is a driver's own."""


class Dropout(Strict):
    """Devices that vanish: an exact share of each cohort (a bare number), or a rate for each phase."""

    share: Share = 0.0
    """round(share × cohort) of those asked, half up, spread evenly over the phases: three, and six under a
    secure sum. In a run whose ε is about who is in a cohort, by each one's own coin instead."""
    configure: Share = 0.0
    sharing: Share = 0.0
    """Secure sums alone, as are the last two: before its shares are sent."""
    train: Share = 0.0
    upload: Share = 0.0
    agree: Share = 0.0
    """With its update in the sum, before it says who survived."""
    unmask: Share = 0.0
    """With its update in the sum, before it helps to open that."""

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        return {"share": data} if isinstance(data, int | float) and not isinstance(data, bool) else data

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Exact or random, not both."""
        if self.share and any(getattr(self, name) for name in _SECURE_STAGES.values()):
            yield "share", "give the share of the cohort or rates for the phases, not both"

    @property
    def secure(self) -> bool:
        """Whether devices vanish in phases that only a secure sum has."""
        return any(getattr(self, name) for name in {*_SECURE_STAGES.values()} - {*_STAGES.values()})


class Availability(Strict):
    """The probability that a device can be reached. A bare number is the one for day and night."""

    day: Share = 1.0
    night: Share = 1.0
    day_hours: Annotated[float, Field(gt=0, le=24)] = 12.0
    """Length of a device's day, which begins at a time of its own."""

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        number = isinstance(data, int | float) and not isinstance(data, bool)
        return {"day": data, "night": data} if number else data


class Speed(Strict):
    """Local steps per second, log-normal over devices."""

    steps_per_s: Amount = 0.0
    """The median; 0: training takes no simulated time."""
    sigma: Amount = 0.0
    """Standard deviation of the natural logarithm."""


class Stragglers(Strict):
    """Devices that are slow for one round, because something else runs on them."""

    share: Share = 0.0
    slowdown: Annotated[float, Field(ge=1)] = 10.0

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        return {"share": data} if isinstance(data, int | float) and not isinstance(data, bool) else data


class Network(Strict):
    """Bandwidth, log-normal over devices, and latency."""

    down_mbit: Amount = 0.0
    """The median in Mbit/s; 0: the download takes no simulated time."""
    up_mbit: Amount = 0.0
    sigma: Amount = 0.0
    latency_s: Amount = 0.0
    """From asking a device to its answer."""


class Fates(NamedTuple):
    """What will become of the devices just asked; arrays of one length n, times in seconds after asking."""

    clients: np.ndarray[Any, np.dtype[np.int64]]
    stage: np.ndarray[Any, np.dtype[np.int8]]
    """0: its update arrives; otherwise it vanishes in 1 configure, 2 train, 3 upload. In a secure sum also in
    5 sharing, and behind its update in 6 agree, 7 unmask."""
    available: np.ndarray[Any, np.dtype[np.bool_]]
    """False: it could not be reached at all (stage 1)."""
    ready_s: Floats
    """When it has answered that it will train."""
    end_s: Floats
    """When its update arrives, or when it vanishes."""

    def loss(self, position: int) -> tuple[Literal["configure", "train"], str]:
        """The round's phase and the cause, for a device that vanishes."""
        stage = int(self.stage[position])
        if not self.available[position]:
            return "configure", "not available"
        return ("configure" if stage in (1, 5) else "train"), f"dropped out in {_SECURE_STAGES[stage]}"


class Behaviour(Strict):
    """How the devices of a population behave; as it stands, all answer at once and none fails."""

    dropout: Dropout = Dropout()
    availability: Availability = Availability()
    speed: Speed = Speed()
    stragglers: Stragglers = Stragglers()
    network: Network = Network()

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Settings that would change nothing."""
        timed = self.speed.steps_per_s > 0
        if self.speed.sigma and not timed:
            yield "speed.sigma", "needs speed.steps_per_s: without it training takes no simulated time"
        if self.stragglers.share and not timed:
            yield "stragglers", "needs speed.steps_per_s: without it training takes no simulated time"
        if self.network.sigma and not (self.network.down_mbit or self.network.up_mbit):
            yield "network.sigma", "needs network.down_mbit or up_mbit: without them nothing takes time"

    @cached_property
    def ideal(self) -> bool:
        """Whether every device answers at once and none fails."""
        return not (
            any(self.dropout.model_dump().values())
            or min(self.availability.day, self.availability.night) < 1
            or self.speed.steps_per_s
            or self.network.down_mbit
            or self.network.up_mbit
            or self.network.latency_s
        )

    def independent(self) -> Behaviour:
        """The same with a drop-out by each device's own coin, so that none decides over another."""
        third = self.dropout.share / 3
        if not third:
            return self
        upload = min(1.0, third / (1 - 2 * third))
        rates = Dropout(configure=third, train=third / (1 - third), upload=upload)
        return self.model_copy(update={"dropout": rates})

    def available(
        self, seed: int, clients: np.ndarray[Any, Any], *, round: int, now_s: float = 0.0
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the clients [n] can be reached in this round, at this simulated time."""
        of_day, of_night = self.availability.day, self.availability.night
        if min(of_day, of_night) == 1:
            return np.ones(len(clients), dtype=np.bool_)
        chance: Floats | float = of_day
        if of_day != of_night:
            hours = (now_s / _DAY_S + uniforms(seed, "time-zone", clients)) % 1 * 24
            chance = np.where(hours < self.availability.day_hours, of_day, of_night)
        return uniforms(seed, "available", clients, round=round) < chance

    def fates(
        self,
        seed: int,
        clients: np.ndarray[Any, Any],
        *,
        round: int,
        attempt: int = 1,
        steps: np.ndarray[Any, Any] | int = 0,
        bytes_down: int = 0,
        bytes_up: int = 0,
        now_s: float = 0.0,
        secure: bool = False,
    ) -> Fates:
        """What becomes of the clients asked together.

        Args:
            seed: the root seed.
            clients: [n] ids; their order changes nothing.
            round: the round's number.
            attempt: 1 at first; a device asked again has new luck.
            steps: local steps, [n] or one number.
            bytes_down: size of the model sent.
            bytes_up: size of the update.
            now_s: simulated time, for day and night.
            secure: whether there are the phases of a secure sum.
        """
        clients = np.asarray(clients, dtype=np.int64)
        n = len(clients)
        if self.ideal:
            zeros = np.zeros(n)
            return Fates(clients, np.zeros(n, np.int8), np.ones(n, np.bool_), zeros, zeros)
        available = self.available(seed, clients, round=round, now_s=now_s)
        stage, done = self._dropout(seed, clients, round, attempt, _SECURE_STAGES if secure else _STAGES)
        stage = np.where(available, stage, 1).astype(np.int8)
        ready = np.full(n, self.network.latency_s)
        down, train, up = self._durations(seed, clients, round, attempt, steps, bytes_down, bytes_up)
        # A device vanishes a random part of the way through its stage.
        train = train * np.where(stage == 2, done, 1.0)
        up = up * np.where(stage == 3, done, 1.0) * (stage != 2)
        end = np.where((stage == 1) | (stage == 5), ready, ready + down + train + up)
        return Fates(clients, stage, available, ready, end)

    def _dropout(
        self, seed: int, clients: np.ndarray[Any, Any], round: int, attempt: int, stages: Mapping[int, str]
    ) -> tuple[np.ndarray[Any, np.dtype[np.int8]], Floats]:
        stage = np.zeros(len(clients), dtype=np.int8)
        luck = uniforms(seed, f"dropout/{attempt}", clients, round=round)
        if self.dropout.share:
            lost = np.lexsort((clients, luck))[: int(self.dropout.share * len(clients) + 0.5)]
            order = np.array([*stages], dtype=np.int8)
            # six phases are many for a small cohort: each round begins with another, and all have their turn
            stage[lost] = np.resize(np.roll(order, -round) if len(order) > len(_STAGES) else order, len(lost))
        else:
            # One number decides all of them: it is compared with the chance of being gone by the end of each.
            by = 1 - np.cumprod([1 - getattr(self.dropout, name) for name in stages.values()])
            stage = np.array([*stages, 0], dtype=np.int8)[np.searchsorted(by, luck, side="right")]
        return stage, uniforms(seed, f"dropout-moment/{attempt}", clients, round=round)

    def _durations(
        self,
        seed: int,
        clients: np.ndarray[Any, Any],
        round: int,
        attempt: int,
        steps: np.ndarray[Any, Any] | int,
        bytes_down: int,
        bytes_up: int,
    ) -> tuple[Floats, Floats, Floats]:
        none = np.zeros(len(clients))
        speed, network, stragglers = self.speed, self.network, self.stragglers
        train = none
        if speed.steps_per_s:
            spread = np.exp(-speed.sigma * normals(seed, "speed", clients)) if speed.sigma else 1.0
            train = np.broadcast_to(steps / speed.steps_per_s * spread, none.shape).astype(np.float64)
        if stragglers.share:
            slow = uniforms(seed, f"straggler/{attempt}", clients, round=round) < stragglers.share
            train = np.where(slow, train * stragglers.slowdown, train)
        wide = np.exp(-network.sigma * normals(seed, "bandwidth", clients)) if network.sigma else 1.0 + none
        down = bytes_down * 8 / (network.down_mbit * _BITS_PER_MBIT) * wide if network.down_mbit else none
        up = bytes_up * 8 / (network.up_mbit * _BITS_PER_MBIT) * wide if network.up_mbit else none
        return down, train, up
