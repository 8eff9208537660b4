"""client.toml: whom a device works for, with which data and model; and what its owner allows.

The policy is the owner's and stronger than anything a server asks. What it does not name is not allowed: an
empty list allows nothing, and only the word "any" allows everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, field_validator

from mycelia.aggregator.wire.channel import split_address
from mycelia.client.policy import ClientPolicy
from mycelia.engine.config import Named, Strict, load_config
from mycelia.engine.data.sources import beside
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.messages import Threat

__all__ = [
    "Asked", "ClientConfig", "ClientTable", "History", "Policy", "PolicyLimits", "Refusal",
    "load_client_config",
]  # fmt: skip

_HOURS: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")
_MB: Final = 10**6

Text = Annotated[str, Field(min_length=1, max_length=256)]
Place = Annotated[str, Field(min_length=1)]
"""A file or folder; relative to the file that names it."""
Names = Literal["any"] | tuple[Text, ...]
"""Those that are allowed; () allows none, "any" all."""
Most = Literal["any"] | Annotated[float, Field(ge=0)]
MostWhole = Literal["any"] | Annotated[int, Field(ge=0)]


class Asked(NamedTuple):
    """What a server asks for in one task.

    Attributes:
        run: its name.
        purpose: of the run.
        algorithm: by name.
        dataset: the device's data that it would be trained on, by its name in client.toml.
        model: the device's model, by its name in client.toml.
        schema_sha256: of the model's tensors, hexadecimal.
        secure_sum: whether updates are hidden in a sum.
        threat: the server that a secure sum guards against; "" without one.
        cohort: the fewest clients whose sum is opened; without a secure sum, the cohort.
        threshold: t/k of a secure sum, in [0, 1]; 0 without one.
        corrupt: share of corrupt clients that a secure sum assumes, [0, 1); 0 without one.
        issuers: how the clients of the cohort, or where it is unknown those of the roster, were enrolled.
        epsilon: that the run may spend of this device's data; None if it promises none.
        delta: with it; None if it promises none.
        local_epochs: passes over this device's data in one round, also where a task counts steps.
        local_steps: in one round, also where a task counts epochs.
        upload_bytes: that the update will have.
        trains: False for an evaluation: nothing that was learnt leaves the device, only its metrics.
    """

    run: str
    purpose: str
    algorithm: str
    dataset: str
    model: str = ""
    schema_sha256: str = ""
    secure_sum: bool = False
    threat: str = ""
    cohort: int = 0
    threshold: float = 0.0
    corrupt: float = 0.0
    issuers: frozenset[str] = frozenset()
    epsilon: float | None = None
    delta: float | None = None
    local_epochs: float = 0.0
    local_steps: int = 0
    upload_bytes: int = 0
    trains: bool = True


class History(NamedTuple):
    """What the device's journal says of the time before this task.

    Attributes:
        rounds_today: in which it took part, since midnight of local time; of all runs.
        rounds_total: the same, since ever.
        upload_today: bytes, since midnight.
        epsilon_spent: of this data, by runs other than the one that asks; see `epsilon` in `Asked`.
        delta_spent: the same.
    """

    rounds_today: int = 0
    rounds_total: int = 0
    upload_today: int = 0
    epsilon_spent: float = 0.0
    delta_spent: float = 0.0


class Refusal(NamedTuple):
    """Why a device does not do what it is asked, as it travels in Decline.

    Attributes:
        field: of the policy.
        asked: what was asked for.
        allowed: what the policy says.
    """

    field: str
    asked: str
    allowed: str


class PolicyLimits(Strict):
    """The most that is allowed; "any" where there is to be no limit."""

    epsilon: Most = "any"
    """ε that may be spent of a data set, over all runs; with a number, runs without a promise are refused."""
    delta: Most = "any"
    """The same for δ."""
    local_epochs: MostWhole = "any"
    """In one round, however the task counts."""
    local_steps: MostWhole = "any"
    """In one round, however the task counts."""
    rounds_per_day: MostWhole = "any"
    rounds_total: MostWhole = "any"
    upload_mb_per_day: Most = "any"
    """Millions of bytes."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """ε and δ belong together."""
        if (self.epsilon == "any") != (self.delta == "any"):
            missing = "delta" if self.delta == "any" else "epsilon"
            yield missing, "missing; ε says nothing without δ: give both"
        if isinstance(self.delta, float) and self.delta >= 1:
            yield "delta", "must be below 1"


class Policy(Strict):
    """What the device's owner allows."""

    purposes: Names
    """Of runs."""
    algorithms: Names
    """By name."""
    datasets: Names = "any"
    """Of those in client.toml; there is one, so that "any" is the one that the owner named."""
    models: Names = "any"
    """The same for models."""
    secure_sum: Literal["required", "any"] = "required"
    """required: updates leave the device under masks only; any: also plainly."""
    threat: Literal["passive", "active"] = "active"
    """The server that a secure sum has to guard against, at least."""
    issuer: Literal["offline", "any"] | None = None
    """How the cohort's clients were enrolled; left out: offline where threat is active, else any."""
    min_cohort: Annotated[int, Field(ge=1)] = 3
    """The fewest clients in a sum."""
    min_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The least share of a client's neighbours who together can open its masks."""
    corrupt: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of corrupt clients that a secure sum has to survive, at least."""
    limits: PolicyLimits = PolicyLimits()
    hours: Text = "any"
    """Of local time in which it trains, such as "20:00-06:00"; "any" at all times."""

    @field_validator("hours")
    @classmethod
    def _hours(cls, value: str) -> str:
        if value != "any":
            _minutes(value)
        return value

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """A required secure sum has three clients or more, and a word that stands for all is no list."""
        if self.secure_sum == "required" and self.min_cohort < 3:
            yield "min_cohort", "must be 3 or more where a secure sum is required"
        for name in ("purposes", "algorithms", "datasets", "models"):
            names = getattr(self, name)
            if names != "any" and "any" in names:
                yield name, f'"any" stands alone: {name} = "any", or a list of names'

    @property
    def issuers(self) -> frozenset[str]:
        """How the clients of a cohort may have been enrolled."""
        issuer = self.issuer or ("offline" if self.threat == "active" else "any")
        return frozenset({"offline"}) if issuer == "offline" else frozenset({"offline", "online"})

    def secure_policy(self) -> ClientPolicy:
        """The part that the secure sum's machine looks at again."""
        return ClientPolicy(
            n_min=max(3, self.min_cohort),
            threat=Threat[self.threat.upper()],
            corrupt=self.corrupt,
            threshold=self.min_threshold,
        )

    def refusal(self, asked: Asked, now: datetime, history: History) -> Refusal | None:
        """Why this is not done; None if it is allowed. The first reason in the order of the fields.

        Args:
            asked: by the server.
            now: local time.
            history: of the device.
        """
        return next(self._refusals(asked, now, history), None)

    def _refusals(self, asked: Asked, now: datetime, history: History) -> Iterator[Refusal]:
        yield from self._names(asked)
        if asked.trains:
            yield from self._sums(asked)
            yield from self._budget(asked, history)
            yield from self._work(asked, history)
        if self.hours != "any" and not _within(self.hours, now):
            yield Refusal("hours", f"{now:%H:%M}", self.hours)

    def _names(self, asked: Asked) -> Iterator[Refusal]:
        for field, name in (
            ("purposes", asked.purpose),
            ("algorithms", asked.algorithm),
            ("datasets", asked.dataset),
            ("models", asked.model),
        ):
            allowed = getattr(self, field)
            if allowed != "any" and name not in allowed:
                yield Refusal(field, name, ", ".join(allowed) or "none")

    def _sums(self, asked: Asked) -> Iterator[Refusal]:
        if not asked.secure_sum and self.secure_sum == "required":
            yield Refusal("secure_sum", "none", "required")
        if asked.cohort < self.min_cohort:
            yield Refusal("min_cohort", str(asked.cohort), f"at least {self.min_cohort}")
        if not asked.issuers or not asked.issuers <= self.issuers:
            yield Refusal(
                "issuer", ", ".join(sorted(asked.issuers)) or "unknown", ", ".join(sorted(self.issuers))
            )
        if not asked.secure_sum:
            return
        if asked.threat not in {"active", self.threat}:
            yield Refusal("threat", asked.threat or "none", self.threat)
        if not asked.threshold >= self.min_threshold:
            yield Refusal("min_threshold", f"{asked.threshold:g}", f"at least {self.min_threshold:g}")
        if not asked.corrupt >= self.corrupt:
            yield Refusal("corrupt", f"{asked.corrupt:g}", f"at least {self.corrupt:g}")

    def _budget(self, asked: Asked, history: History) -> Iterator[Refusal]:
        for name, wanted, spent in (
            ("epsilon", asked.epsilon, history.epsilon_spent),
            ("delta", asked.delta, history.delta_spent),
        ):
            most = getattr(self.limits, name)
            if most == "any":
                continue
            field = f"limits.{name}"
            if wanted is None:
                yield Refusal(field, "no bound", f"at most {most:g}")
            elif not 0 <= wanted + spent <= most:
                yield Refusal(field, f"{wanted:g}", f"at most {most:g}, of which {spent:g} is spent")

    def _work(self, asked: Asked, history: History) -> Iterator[Refusal]:
        limits = self.limits
        for name, count in (("local_epochs", asked.local_epochs), ("local_steps", asked.local_steps)):
            most = getattr(limits, name)
            if most != "any" and not count <= most:
                yield Refusal(f"limits.{name}", f"{count:g}", f"at most {most}")
        for name, before in (
            ("rounds_per_day", history.rounds_today),
            ("rounds_total", history.rounds_total),
        ):
            most = getattr(limits, name)
            if most != "any" and before >= most:
                yield Refusal(f"limits.{name}", str(before + 1), f"at most {most}")
        most = limits.upload_mb_per_day
        after = history.upload_today + asked.upload_bytes
        if most != "any" and after > most * _MB:
            yield Refusal("limits.upload_mb_per_day", f"{after / _MB:.6g}", f"at most {most:g}")


class ClientTable(Strict):
    """Whom the device works for, and with what."""

    server: Annotated[tuple[Text, ...], Field(min_length=1)]
    """`host:port` each; they are tried in random order."""
    identity: Place
    """The folder that `mycelia enrol request` made."""
    state: Place | None = None
    """The folder for journal and payloads; left out: state inside the identity folder."""
    model: Named
    """Its own, by name; no code comes from a server."""
    data: Named
    """What it trains on."""
    out: Place | None = None
    """The folder in which the finished model is kept; left out: model inside `state`."""
    name: Annotated[str, Field(max_length=200)] = ""
    """For its own messages."""

    @field_validator("server")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            split_address(address)
        return value

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Each server once."""
        if len(set(self.server)) != len(self.server):
            yield "server", "names a server twice"


class ClientConfig(Strict):
    """Everything that `mycelia client` is told."""

    client: ClientTable
    loss: Text | None = None
    """Left out: the one that the server names, cross-entropy or mse as the data has it."""
    policy: Policy

    @property
    def server(self) -> tuple[str, ...]:
        """`host:port` each."""
        return self.client.server

    @property
    def identity(self) -> Path:
        """The folder of keys."""
        return Path(self.client.identity)

    @property
    def state(self) -> Path:
        """The folder of journal and payloads."""
        return Path(self.client.state) if self.client.state else self.identity / "state"

    @property
    def out(self) -> Path:
        """The folder of the finished model."""
        return Path(self.client.out) if self.client.out else self.state / "model"

    @property
    def model(self) -> Named:
        """The device's own."""
        return self.client.model

    @property
    def data(self) -> Named:
        """What it trains on."""
        return self.client.data


def load_client_config(path: Path, overrides: Sequence[str] = ()) -> ClientConfig:
    """Read client.toml; its relative paths are those beside the file.

    Args:
        path: the file.
        overrides: `key=value` each, as in `load_config`.

    Returns:
        the configuration, with absolute paths.

    Raises:
        ConfigError: naming the file, and for every wrong setting at once key, value and rule.
    """
    config = load_config(ClientConfig, path, overrides)
    folder, table = path.parent.resolve(), config.client
    changed: dict[str, Any] = {
        name: str(folder / Path(place).expanduser())
        for name in ("identity", "state", "out")
        if (place := getattr(table, name)) is not None
    }
    changed["data"] = beside(table.data, folder)
    return config.model_copy(update={"client": table.model_copy(update=changed)})


def _minutes(hours: str) -> tuple[int, int]:
    """First and last minute of the day."""
    found = _HOURS.fullmatch(hours)
    if found is None or hours[:5] == hours[6:]:
        raise ConfigError(
            f"is {hours!r}", rule='two times of the day that differ, such as "20:00-06:00", or "any"'
        )
    first, last = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
    return first, last


def _within(hours: str, now: datetime) -> bool:
    """From the first minute on, and before the last; over midnight where the last is earlier."""
    first, last = _minutes(hours)
    minute = now.hour * 60 + now.minute
    return first <= minute < last if first < last else minute >= first or minute < last
