"""What a device tells people while it works; a listener is called with each as it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mycelia.aggregator.wire.position import Position

__all__ = [
    "Accepted",
    "ConnectedTo",
    "Declined",
    "Delivered",
    "Disconnected",
    "Failed",
    "KeysRenewed",
    "Listener",
    "Measured",
    "Notice",
    "Report",
    "Started",
    "Trained",
    "Uploaded",
    "Waiting",
]


@dataclass(frozen=True)
class ConnectedTo:
    """A server has welcomed this device.

    Attributes:
        server: its address.
        client: this device's id.
        tls: whether the connection is encrypted.
        expires: when this device's certificate ends, Unix time.
    """

    server: str
    client: int
    tls: bool
    expires: int


@dataclass(frozen=True)
class Disconnected:
    """There is no connection.

    Attributes:
        reason: for people, with what to do.
        wait_s: seconds until the next try.
    """

    reason: str
    wait_s: float


@dataclass(frozen=True)
class Waiting:
    """The server says when to come again.

    Attributes:
        delay_s: after so many seconds.
        reason: its words.
    """

    delay_s: float
    reason: str


@dataclass(frozen=True)
class Started:
    """Work was taken on.

    Attributes:
        at: which.
        rounds: of the run.
        masked: whether it is for a secure sum.
    """

    at: Position
    rounds: int
    masked: bool


@dataclass(frozen=True)
class Trained:
    """Training is done.

    Attributes:
        at: which round.
        rounds: of the run.
        rows: examples of this device.
        steps: local steps.
        loss: mean over what it was trained on; None where nothing says.
        seconds: that it took.
    """

    at: Position
    rounds: int
    rows: int
    steps: int
    loss: float | None
    seconds: float


@dataclass(frozen=True)
class Uploaded:
    """The server holds all of an update.

    Attributes:
        at: which round.
        size: bytes.
        masked: whether they mean nothing by themselves.
    """

    at: Position
    size: int
    masked: bool


@dataclass(frozen=True)
class Accepted:
    """The round is published, and this device's update is in it."""

    at: Position


@dataclass(frozen=True)
class Declined:
    """The owner's policy does not allow it.

    Attributes:
        at: which work.
        field: of the policy.
        asked: by the server.
        allowed: by the owner.
    """

    at: Position
    field: str
    asked: str
    allowed: str


@dataclass(frozen=True)
class Failed:
    """Work came to nothing.

    Attributes:
        at: which.
        reason: a code of the protocol, or "failed" for an error of this device's own.
        hint: what happened, and what to do.
        alarm: whether the server has said things that contradict each other, or did so to others.
    """

    at: Position
    reason: str
    hint: str = ""
    alarm: bool = False


@dataclass(frozen=True)
class Measured:
    """This device has measured a model.

    Attributes:
        at: which.
        examples: of its own.
        values: means over them.
    """

    at: Position
    examples: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Delivered:
    """The run is over.

    Attributes:
        run: its name.
        model: file with the final model.
        personal: file with this device's own; None where there is none.
    """

    run: str
    model: Path
    personal: Path | None = None


@dataclass(frozen=True)
class KeysRenewed:
    """This device has new keys.

    Attributes:
        expires: when their certificate ends, Unix time.
    """

    expires: int


Notice = (
    ConnectedTo | Disconnected | Waiting | Started | Trained | Uploaded | Accepted | Declined | Failed
    | Measured | Delivered | KeysRenewed
)  # fmt: skip
Listener = Callable[[Notice], None]


@dataclass
class Report:
    """What a device has done from its start to its end.

    Attributes:
        client: its id.
        accepted: rounds that its updates are in.
        declined: pieces of work that its policy refused.
        failed: pieces of work that came to nothing.
        bytes_up: of updates.
        delivered: by run, what is left of it.
    """

    client: int
    accepted: int = 0
    declined: int = 0
    failed: int = 0
    bytes_up: int = 0
    delivered: dict[str, Delivered] = field(default_factory=dict)

    def note(self, notice: Notice) -> None:
        """Count it."""
        match notice:
            case Accepted():
                self.accepted += 1
            case Declined():
                self.declined += 1
            case Failed():
                self.failed += 1
            case Uploaded():
                self.bytes_up += notice.size
            case Delivered():
                self.delivered[notice.run] = notice
            case _:
                pass
