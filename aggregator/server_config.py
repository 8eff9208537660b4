"""server.toml: what a server serves, where, and with whose keys; and the run, as a scenario says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, field_validator

from mycelia.aggregator.config import FederationConfig, RoundConfig
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.wire.channel import is_loopback, split_address
from mycelia.aggregator.wire.offers import MAX_PAYLOAD
from mycelia.engine.config import Named, Strict, load_config, to_toml
from mycelia.engine.data.sources import beside, is_path
from mycelia.engine.errors import ConfigError

__all__ = [
    "DataExample", "LimitsTable", "PayloadTable", "RunTable", "ServerConfig", "ServerRound", "ServerTable",
    "StatusTable", "StoreTable", "check_together", "load_server_config", "run_settings",
]  # fmt: skip

OVER_SELECT: Final = 1.25
_SHARED: Final = ("server", "store", "limits", "payload", "status")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Text = Annotated[str, Field(min_length=1, max_length=256)]
Place = Annotated[str, Field(min_length=1)]
"""A file or folder; relative to the file that names it."""


def _address(value: str) -> str:
    split_address(value)
    return value


class ServerTable(Strict):
    """Where it listens, and who it is."""

    listen: Text = "0.0.0.0:8443"
    """`host:port` for devices."""
    enrol_listen: Text | None = None
    """`host:port` for devices without a certificate; it needs `operator`."""
    keys: Place
    """The folder that `mycelia enrol server` made."""
    roster: Place
    """The operator's newest roster.bin; it is read again when it changes."""
    operator: Place | None = None
    """The operator's folder, with which the server enrols and renews devices by itself. Whoever holds it can
    invent devices; entries made here say so."""

    _addresses = field_validator("listen", "enrol_listen")(lambda value: value and _address(value))

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Ports and folders that need each other."""
        if self.enrol_listen is not None and self.operator is None:
            yield "enrol_listen", "a server enrols devices with the operator's folder; name it: operator"
        port = 0 if self.enrol_listen is None else split_address(self.enrol_listen)[1]
        if port and port == split_address(self.listen)[1]:
            yield "enrol_listen", "has the port of listen; devices are enrolled on one of its own"


class StoreTable(Strict):
    """Where rounds and models are kept."""

    url: Place = "sqlite:///mycelia.db"
    """A SQLite file, for one server; or `postgresql://user@host/name`, for several."""
    blobs: Place = "blobs/"
    """A folder, which several servers share; "rows": in PostgreSQL."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Kinds of databases, and what they can do."""
        kind = self.url.partition(":")[0].partition("+")[0]
        if kind not in {"sqlite", "postgresql"}:
            yield "url", "must be sqlite:///FILE or postgresql://USER@HOST/NAME"
        elif kind == "sqlite" and self.url.partition("://")[2] in {"", "/", "/:memory:"}:
            yield "url", "a round has to outlive the process; name a file: sqlite:///mycelia.db"
        if kind == "postgresql" and re.search(r"://[^@/]*:[^@/]*@", self.url):
            yield "url", "holds a password; leave it out and use PGPASSFILE or ~/.pgpass"
        if self.blobs == "rows" and kind != "postgresql":
            yield "blobs", "rows are kept in PostgreSQL; with SQLite name a folder"


class RunTable(Strict):
    """One run."""

    name: Text
    """Of the run, unique among those of the store."""
    purpose: Text
    """What it is for; devices take part in purposes that their owners listed."""
    max_failed_rounds: Annotated[int, Field(ge=1)] | None = None
    """Failed rounds in a row after which it stops; left out: round.max_failed_rounds."""
    population: Annotated[int, Field(ge=0)] = 0
    """How many devices there are, for selection and ε; 0: those that are enrolled when the run begins."""
    max_examples: Annotated[int, Field(ge=1, lt=2**53)] = 100_000
    """The most examples that one device may have."""
    examples: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of all devices together, as far as that is public; 0: unknown."""
    out: Place | None = None
    """The run folder; left out: runs/NAME beside the file."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """A name that is part of paths and of the wire."""
        if not _NAME.fullmatch(self.name):
            yield "name", "must be 1 to 64 letters, digits, dots, dashes or underlines"
        if not self.purpose.isprintable():
            yield "purpose", "must print"
        if self.population and self.examples > self.population * self.max_examples:
            yield "examples", f"more than {self.population} devices of {self.max_examples} examples have"


class ServerRound(RoundConfig):
    """Rounds with devices that may not answer."""

    over_select: Annotated[float, Field(ge=1, le=10)] = OVER_SELECT
    """Asks cohort × over_select clients, rounded up, and closes with the first `cohort` updates."""


class LimitsTable(Strict):
    """What devices and addresses may ask; see `mycelia.aggregator.limits.Limits`."""

    streams: Annotated[int, Field(ge=1)] = Limits.streams
    handshakes: Annotated[float, Field(gt=0)] = Limits.handshakes
    address_streams: Annotated[int, Field(ge=1)] = Limits.address_streams
    address_handshakes: Annotated[float, Field(gt=0)] = Limits.address_handshakes
    address_failures: Annotated[float, Field(gt=0)] = Limits.address_failures
    frames: Annotated[float, Field(gt=0)] = Limits.frames
    frame_bytes: Annotated[float, Field(gt=0)] = Limits.frame_bytes

    def limits(self) -> Limits:
        """The same for the service."""
        return Limits(**self.model_dump())


class PayloadTable(Strict):
    """How large what devices send may be, in bytes."""

    max: Annotated[int, Field(ge=2**20, le=2**50)] = MAX_PAYLOAD
    """Of one payload."""
    spool_max: Annotated[int, Field(ge=0, le=2**60)] = 0
    """Of all that wait on the disk; 0: four models and 1 GiB."""


class StatusTable(Strict):
    """The status page and the metrics."""

    listen: Text = "127.0.0.1:8445"
    token_file: Place | None = None
    """A file of mode 0600 with the token that browsers must show."""

    _addresses = field_validator("listen")(_address)

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Only this machine sees the page without a token."""
        if self.token_file is None and not is_loopback(split_address(self.listen)[0]):
            yield "listen", "is not on this machine; name a token_file, or listen on 127.0.0.1"


class DataExample(Strict):
    """What one example looks like, where the server has none."""

    inputs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=8)]
    """The shape of one input."""
    dtype: Literal["float32", "float64", "float16", "int64", "int32", "uint8"] = "float32"
    """Of the inputs."""
    classes: Annotated[int, Field(ge=1)] | None = None
    """Number of classes; left out: regression."""
    targets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=8)] = ()
    """The shape of one target; left out: one number."""
    target_dtype: Literal["int64", "float32", "float64"] | None = None
    """Of the targets; left out: int64 for classes, else float32."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Labels are whole numbers."""
        if self.classes is not None and self.target_dtype not in {None, "int64"}:
            yield "target_dtype", "labels of classes are int64; leave it out, or leave classes out"

    def batch(self, size: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Inputs [size, …] and targets [size, …] of zeros, to build a model with."""
        kind = self.target_dtype or ("float32" if self.classes is None else "int64")
        return np.zeros((size, *self.inputs), self.dtype), np.zeros((size, *self.targets), kind)


class ServerConfig(FederationConfig):
    """Everything that `mycelia serve` is told about one run and its server."""

    data: Named | None = None  # type: ignore[assignment]
    """The server's own data, of which the test part measures the model; left out: devices measure it."""
    round: ServerRound = ServerRound()
    server: ServerTable
    store: StoreTable = StoreTable()
    run: RunTable
    limits: LimitsTable = LimitsTable()
    payload: PayloadTable = PayloadTable()
    status: StatusTable | None = None
    """Its presence asks for the status page."""
    example: DataExample | None = None
    """What an example looks like, where there is no `data`."""

    @property
    def max_weight(self) -> float:
        """The largest weight of a device; where nothing says it, its largest number of examples."""
        if self.privacy is not None:
            return self.privacy.weight_max or 1.0
        return self.update.max_weight or float(self.run.max_examples)

    @property
    def classes(self) -> int | None:
        """Number of classes as `example` says it, None for regression or where `data` says it."""
        return None if self.example is None else self.example.classes

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """What a deployment cannot know, or cannot do."""
        yield from super().conflicts()
        if self.data is None and self.example is None:
            yield (
                "example",
                "missing; without data it says what an example looks like: inputs, dtype, classes",
            )
        if self.data is not None and self.example is not None:
            yield "example", "data says already what an example looks like; leave one of them out"
        both = "max_failed_rounds" in self.round.model_fields_set
        if both and self.run.max_failed_rounds not in {None, self.round.max_failed_rounds}:
            yield "run.max_failed_rounds", "contradicts round.max_failed_rounds; leave one of them out"
        population = self.run.population
        if 0 < population < self.cohort:
            yield "run.population", f"is {population}, and a round has a cohort of {self.cohort}"
        privacy = self.privacy
        if privacy is None:
            return
        if privacy.unit == "example" and not self.run.examples:
            yield (
                "run.examples",
                "missing; noise in local steps goes by the mean number of examples, and a server does not "
                "know how many there are",
            )


def load_server_config(path: Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Read server.toml; its relative paths are those beside the file.

    Args:
        path: the file.
        overrides: `key=value` each, as in `load_config`.

    Returns:
        the configuration, with absolute paths, and `max_failed_rounds` in both of its places.

    Raises:
        ConfigError: naming the file, and for every wrong setting at once key, value and rule.
    """
    return _anchored(load_config(ServerConfig, path, overrides), path.parent)


def _anchored(config: ServerConfig, folder: Path) -> ServerConfig:
    """The same with paths that do not depend on the current folder."""

    def at(place: str | None) -> str | None:
        return None if place is None else str(folder.resolve() / Path(place).expanduser())

    server, store, run, status = config.server, config.store, config.run, config.status
    failed = run.max_failed_rounds or config.round.max_failed_rounds
    url = store.url
    file = re.fullmatch(r"(sqlite(?:\+pysqlite)?):///([^/?].*)", url)
    changed: Mapping[str, Any] = {
        "server": server.model_copy(
            update={name: at(getattr(server, name)) for name in ("keys", "roster", "operator")}
        ),
        "store": store.model_copy(
            update={
                "url": f"{file[1]}:///{at(file[2])}" if file else url,
                "blobs": store.blobs if store.blobs == "rows" else at(store.blobs),
            }
        ),
        "data": None if config.data is None else beside(config.data, folder.resolve()),
        "run": run.model_copy(update={"out": at(run.out or f"runs/{run.name}"), "max_failed_rounds": failed}),
        "round": config.round.model_copy(update={"max_failed_rounds": failed}),
        "status": None if status is None else status.model_copy(update={"token_file": at(status.token_file)}),
    }
    return config.model_copy(update=changed)


def run_settings(config: FederationConfig) -> bytes:
    """What all servers of a run agree on: all but where each listens and keeps its own things and data."""
    if not isinstance(config, ServerConfig):
        return to_toml(config).encode()
    own: dict[str, object] = dict.fromkeys(_SHARED)
    if config.data is not None and is_path(config.data.name):
        own["data"] = None
    return to_toml(
        config.model_copy(update=own | {"run": config.run.model_copy(update={"out": None})})
    ).encode()


def check_together(configs: Sequence[ServerConfig]) -> None:
    """Refuse files that cannot be served by one server.

    Args:
        configs: one for each run, with absolute paths.

    Raises:
        ConfigError: there are none; their tables about the server differ; two runs share a name or a folder.
    """
    if not configs:
        raise ConfigError("no run", rule="at least one file", fix="--config server.toml", who="--config")
    first, *others = configs
    for other in others:
        for table in _SHARED:
            if getattr(other, table) != getattr(first, table):
                raise ConfigError(
                    f"the runs {first.run.name!r} and {other.run.name!r} differ in [{table}]",
                    rule=f"the runs of one server agree on {', '.join(_SHARED)}",
                    fix=f"write the same [{table}] into both files, or start two servers",
                    who=table,
                )
    for what in ("name", "out"):
        found = [getattr(config.run, what) for config in configs]
        twice = sorted({value for value in found if found.count(value) > 1})
        if twice:
            raise ConfigError(
                f"two runs have the {what} {twice[0]!r}",
                rule="each run has its own name and folder",
                fix=f"change run.{what} in one of the files",
                who=f"run.{what}",
            )
