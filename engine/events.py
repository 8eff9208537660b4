"""The events of a run.

A run's `events.jsonl` is its only record: progress bars, reports and comparisons are derived from it. `v`,
the schema version, changes when the meaning of what is there changes; new kinds and new fields do not change
it, and a reader passes over those that it does not know. `event_log` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "CheckpointSaved",
    "CohortProgress",
    "Evaluation",
    "Event",
    "Histogram",
    "Image",
    "Listener",
    "Outcome",
    "Outcomes",
    "Partition",
    "Privacy",
    "Resumed",
    "Round",
    "RunFinished",
    "RunStarted",
    "Scalars",
    "SecureSum",
    "Spread",
    "SystemLoad",
    "Text",
    "WarningRaised",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run.

    `t` is the time in Unix seconds; 0 stands for "now" and is filled in when the event is logged. A
    `transient` event is told to listeners and not written.
    """

    kind: ClassVar[str] = ""
    transient: ClassVar[bool] = False

    t: float = field(default=0.0, kw_only=True)


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The run begins; what lineage compares runs by.

    `config` is the resolved configuration, `environment` what `environment.describe()` says (versions,
    machine, code), `plan` the compile plan that runs, `parent` the run whose model this one starts from.
    `total` counts the `unit`s ("round" or "step") that are planned; 0 when that is not known.
    """

    kind: ClassVar[str] = "run_started"

    command: str
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    environment: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    data_sha256: str = ""
    partition_sha256: str = ""
    parent: str = ""
    total: int = 0
    unit: str = "round"


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run goes on from the checkpoint of `step` (a round, in a federation); what came later is redone."""

    kind: ClassVar[str] = "resumed"

    step: int
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scalars(Event):
    """Named numbers at a training step."""

    kind: ClassVar[str] = "scalars"

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CohortProgress(Event):
    """So many clients of a round are done; for progress bars only."""

    kind: ClassVar[str] = "cohort_progress"
    transient: ClassVar[bool] = True

    round: int
    done: int
    asked: int


@dataclass(frozen=True, slots=True)
class Round(Event):
    """A federated round is over; logged after the round's `Evaluation`, where it has one.

    Args:
        round: its number, from 1.
        seconds: wall time of each phase (select, configure, train, merge, evaluate, …).
        counts: clients by status (asked, survivors, dropped, …) and other counts (examples, sgd_steps).
        metrics: numbers about the training: loss and accuracy over the cohort, clip_share, update_norm, …
        bytes_up: bytes all clients sent in the round.
        bytes_down: bytes all clients received in the round.
        simulated_seconds: the round's length on the simulated clock; None without one.
    """

    kind: ClassVar[str] = "round"

    round: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    simulated_seconds: float | None = None


class Outcome(NamedTuple):
    """What became of one client in a round; written as an array without its trailing defaults."""

    client: int | str
    attempt: int = 1
    status: str = "accepted"
    phase: str = "train"
    cause: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Outcomes(Event):
    """What became of each client that a round asked."""

    kind: ClassVar[str] = "outcomes"

    round: int
    clients: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class SecureSum(Event):
    """How the sum of a round was made, or why there is none. Nothing in it is about one client's numbers.

    Args:
        round: its number, from 1.
        masked: whether there were masks.
        failed: the reason without a sum, else "".
        attempts: how many it took; 0 where the round ended before the sum began.
        asked: clients that were asked.
        survivors: clients in the sum.
        n_min: the fewest that a sum is opened for.
        dropped: clients that vanished, by phase of the protocol.
        faults: messages refused and clients that left, by reason.
        phase_ms: wall time of each phase.
        bytes_up: all that clients sent in the attempt that opened it.
        bytes_down: all that the server sent in it, without the model.
        upload_bytes: header and vector of one client.
        share_bytes: the shares of one client.
        settings: threat, neighbours, threshold, bits, dimension, weight_max and noise.
        transcript_sha256: hash of the session; "" without masks.
        clipped: share of the coordinates that were cut off, where that is told.
    """

    kind: ClassVar[str] = "secure_sum"

    round: int
    masked: bool = True
    failed: str = ""
    attempts: int = 0
    asked: int = 0
    survivors: int = 0
    n_min: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    phase_ms: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    upload_bytes: int = 0
    share_bytes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    transcript_sha256: str = ""
    clipped: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation(Event):
    """The model measured on a split, after a round or a step."""

    kind: ClassVar[str] = "evaluation"

    metrics: Mapping[str, float]
    split: str = "test"
    round: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Partition(Event):
    """How the examples are dealt out.

    Args:
        name: the partitioner.
        clients: how many there are.
        sizes: examples per client, in the order of the ids; of a large population an even sample.
        labels: the classes, in the order of the rows of `matrix`.
        matrix: examples by label (row) and client (column); for at most 200 clients, else empty.
        imbalance: measures such as the mean total-variation distance to the overall label shares.
    """

    kind: ClassVar[str] = "partition"

    name: str
    clients: int
    sizes: Sequence[int]
    labels: Sequence[str] = ()
    matrix: Sequence[Sequence[int]] = ()
    imbalance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spread(Event):
    """The model measured on each client's own data: `metrics[name][i]` belongs to `clients[i]`."""

    kind: ClassVar[str] = "spread"

    metrics: Mapping[str, Sequence[float]]
    clients: Sequence[int | str] = ()
    examples: Sequence[int] = ()
    round: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Histogram(Event):
    """A distribution: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    kind: ClassVar[str] = "histogram"

    name: str
    step: int
    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Image(Event):
    """A picture: a PNG or JPEG file, named relative to the run folder."""

    kind: ClassVar[str] = "image"

    name: str
    step: int
    path: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Text(Event):
    """A passage of text."""

    kind: ClassVar[str] = "text"

    name: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Privacy(Event):
    """The privacy spent so far: (ε, δ) at `level` ("example" or "client"), and what else is worth a curve.

    `statement` says all that ε depends on: relation, sampling, accountant, noise source, what it covers;
    `facts` has the same and more by name, at the end of a run.
    """

    kind: ClassVar[str] = "privacy"

    epsilon: float
    delta: float
    level: str = ""
    round: int | None = None
    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    statement: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SystemLoad(Event):
    """What the machine gives: memory of this process, and of its workers where it has some, in bytes."""

    kind: ClassVar[str] = "system"

    memory_bytes: int
    peak_memory_bytes: int = 0
    workers_memory_bytes: int = 0
    round: int | None = None
    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint of `step` is on the disk, at `path` relative to the run folder."""

    kind: ClassVar[str] = "checkpoint"

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class WarningRaised(Event):
    """Something the reader of the result should know; `who` is the client, phase or file it concerns."""

    kind: ClassVar[str] = "warning"

    message: str
    who: str = ""


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    """The run ends: `status` is "finished", "interrupted" or "failed", `result` what the command prints.

    A result that is the text "NaN", "Infinity" or "-Infinity" is read back as that number.
    """

    kind: ClassVar[str] = "run_finished"

    result: Mapping[str, Any] = field(default_factory=dict)
    status: str = "finished"
    error: str = ""


KINDS: Mapping[str, type[Event]] = {
    event.kind: event
    for event in (
        RunStarted, Resumed, Scalars, Round, Outcomes, SecureSum, Evaluation, Partition, Spread, Histogram,
        Image, Text, Privacy, SystemLoad, CheckpointSaved, WarningRaised, RunFinished,
    )
}  # fmt: skip
