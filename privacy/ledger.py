"""The ledger: every release, written down before it happens, in a chain that shows when it was tampered with.

On disk a ledger is JSON lines: a header, then an event or "one more like the last" a line, each with a hash
over itself and the line before. Lines are only ever added. A checkpoint keeps the ledger's `head`; a ledger
that does not pass through it is missing, shortened or edited, and stops the resume. Going back to an older
checkpoint removes nothing: what was released has been released.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.privacy.accounting import UNSTATED, Statement, curve, state
from mycelia.privacy.events import Event
from mycelia.privacy.sampling import Poisson

__all__ = ["FILE", "Head", "Ledger", "from_opacus"]

FILE = "privacy.jsonl"
"""The ledger's name in a run folder."""

_VERSION = 1


@dataclass(frozen=True)
class Head:
    """Where a ledger's chain stands; what a checkpoint keeps of it.

    Attributes:
        lines: lines written, the header included.
        hash: of the last one.
    """

    lines: int
    hash: str


class Ledger:
    """The releases of one run, in order.

    Made in memory by the constructor, or with a file by `create` and `load`.

    Args:
        noise_source: where noise and draws come from, as every statement says it.
    """

    def __init__(self, noise_source: str = UNSTATED) -> None:
        self._start({"v": _VERSION, "ledger": secrets.token_hex(8), "noise_source": noise_source})

    def _start(self, header: Mapping[str, Any]) -> None:
        self.id = str(header["ledger"])
        self.noise_source = str(header["noise_source"])
        self.path: Path | None = None
        self.steps = 0
        self._file = -1
        self._events: list[Event] = []
        self._heuristics: list[str] = []
        self._releases: dict[tuple[str, int], str] = {}  # fingerprint by stream and step
        self._head = Head(0, "")
        self._lines: list[str] = []
        self._add_line(dict(header))

    @classmethod
    def create(cls, path: Path, noise_source: str = UNSTATED) -> Self:
        """An empty ledger in a new file.

        Raises:
            ConfigError: the file exists.
            MyceliaError: it cannot be written.
        """
        ledger = cls(noise_source)
        ledger.keep(path)
        return ledger

    @classmethod
    def load(cls, path: Path, head: Head | None = None, *, write: bool = False) -> Self:
        """The ledger of a file, checked line by line.

        Args:
            path: the file.
            head: where a checkpoint says it was; it may have grown since.
            write: whether to go on with it; a line that a crash left unfinished is then removed, since its
                release never came.

        Raises:
            DataError: the file is missing, or was shortened or edited.
        """
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise _broken(path, f"the ledger cannot be read: {error.strerror}") from error
        whole, _, unfinished = raw.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        ledger = cls.__new__(cls)
        passed = False
        for number, line in enumerate(lines, 1):
            values = _parse(path, number, line)
            found = values.pop("hash", None)
            if number == 1:
                if values.get("v") != _VERSION or not {"ledger", "noise_source"} <= values.keys():
                    raise _broken(path, "the first line is no header of a ledger")
                ledger._start(values)
            else:
                ledger._take(path, number, values)
                ledger._add_line(values)
            if found != ledger._head.hash:
                raise _broken(path, f"line {number} does not follow from the one before")
            passed = passed or head == ledger._head
        if not lines:
            raise _broken(path, "the ledger is empty")
        if head is not None and not passed:
            raise _broken(path, f"it does not pass through line {head.lines} of the checkpoint")
        if write:
            if unfinished:
                os.truncate(path, len(raw) - len(unfinished))
            ledger._open(path)
        ledger.path = path
        return ledger

    @property
    def head(self) -> Head:
        """Where the chain stands."""
        return self._head

    @property
    def events(self) -> tuple[Event, ...]:
        """The events in order, equal neighbours as one."""
        return tuple(self._events)

    @property
    def last(self) -> Event | None:
        """The last event, with its neighbours."""
        return self._events[-1] if self._events else None

    @property
    def heuristics(self) -> tuple[str, ...]:
        """What else the run did to look private; none of it has an ε."""
        return tuple(self._heuristics)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def record(self, event: Event, release: str = "", stream: str = "") -> bool:
        """Write an event down; call it before the release.

        A step that is done again with the same streams and the same inputs releases the same numbers, and
        counts once; with anything else it counts again.

        Args:
            event: what is about to be released.
            release: what the released numbers depend on besides the event, such as a hash of the stream's
                name and the parameters; empty when that is not known.
            stream: public name of the secret that noise and draw come from. Under one name a step can be
                released again with the same inputs alone: two sums with one noise tell their difference.

        Returns:
            Whether it counts.

        Raises:
            DataError: the step was released from this stream with other inputs; it must not be again.
            MyceliaError: it cannot be written; the release must not happen.
        """
        if self.holds(event, release, stream):
            return False
        if stream and self.released(stream, event.step):
            raise DataError(
                f"step {event.step} was released before, from the same noise and with other inputs",
                rule="a noise is used once: two sums with the same noise tell their difference",
                fix="go on with the data, model and settings of before, or with a new NoiseSource",
                who="ledger",
            )
        print_ = _fingerprint(event, release) if release else ""
        line: dict[str, Any]
        again = event.count == 1 and self.last is not None and event.continues(self.last)
        line = {"again": 1} if again else event.to_json()
        line |= {name: text for name, text in (("release", print_), ("stream", stream)) if text}
        self._write(line)
        self._append(event, print_, stream)
        return True

    def holds(self, event: Event, release: str, stream: str = "") -> bool:
        """Whether this very release is in it, so that doing it again tells nothing new; see `record`."""
        return bool(release) and self._releases.get((stream, event.step)) == _fingerprint(event, release)

    def released(self, stream: str, step: int) -> bool:
        """Whether a step was released from a stream."""
        return (stream, step) in self._releases

    def follows(self, head: Head) -> bool:
        """Whether its chain passes through a head."""
        if not 1 <= head.lines <= len(self._lines):
            return False
        return self._lines[head.lines - 1].endswith(f'"hash":"{head.hash}"}}')

    def note(self, heuristic: str) -> None:
        """Write down that the run also used something that has no ε, once.

        Args:
            heuristic: what, as reports name it.

        Raises:
            MyceliaError: it cannot be written.
        """
        if heuristic not in self._heuristics:
            self._write({"heuristic": heuristic})
            self._heuristics.append(heuristic)

    def merge(self, other: Ledger) -> None:
        """Add the releases of another ledger over the same data, such as an earlier run's.

        Raises:
            ConfigError: it is this ledger, or was merged before.
        """
        origins = {self.id, *(event.origin for event in self._events)}
        coming = [replace(event, origin=event.origin or other.id) for event in other]
        if twice := origins & {other.id, *(event.origin for event in coming)}:
            raise ConfigError(
                f"the ledger {sorted(twice)[0]} is in it already",
                rule="a release counts once",
                fix="merge each ledger once",
                who="ledger",
            )
        for event in coming:
            self.record(event)
        for heuristic in other.heuristics:
            self.note(heuristic)

    def select(self, candidate: Iterable[Event], mean: float, shape: float = 1.0) -> Event:
        """Record a choice of hyperparameters: the best of a random number of runs, and no other, is released.

        Papernot & Steinke, "Hyperparameter tuning with Rényi differential privacy", ICLR 2022, theorems 2
        and 6. The result has Rényi divergences alone.

        Args:
            candidate: the events of one run.
            mean: expected number of runs, at least 1.
            shape: of their distribution: 1 geometric, 0 logarithmic, inf Poisson, else a truncated negative
                binomial.

        Returns:
            The event that was recorded.

        Raises:
            ConfigError: a number is out of range, or the run has no Rényi divergences.
        """
        if not 1 <= mean < math.inf or not shape >= 0:
            raise ConfigError(
                f"mean is {mean}, shape {shape}",
                rule="the mean is at least 1, the shape at least 0",
                who="select",
            )
        run = list(candidate)
        if not run:
            raise ConfigError("the run has no releases", rule="a run to select has some", who="select")
        orders, values = curve(run, mean, shape)
        last = self.last
        event = Event(
            sampling="full",
            sampling_rate=1.0,
            noise_multiplier=0.0,
            relation=run[0].relation,
            unit=run[0].unit,
            group=run[0].group,
            step=last.step + last.count if last else 0,
            kind="selection",
            mechanism="curve",
            orders=orders,
            values=values,
        )
        self.record(event)
        return event

    def statement(self, delta: float, accountant: str = "auto") -> Statement:
        """What the ledger says about privacy.

        Args:
            delta: δ, in (0, 1).
            accountant: "auto", "pld" or "rdp".

        Raises:
            ConfigError: relations or units are mixed (see `statements`), there is no bound, or the run has
                nothing but heuristics.
        """
        if self._heuristics and not self._events:
            raise ConfigError(
                f"nothing but {', '.join(self._heuristics)}",
                rule="a heuristic has no ε",
                fix="train with noise and clipping (mycelia.privacy.attach), or measure an attack",
                who="ledger",
            )
        return self._stated(self._events, delta, accountant)

    def statements(self, delta: float, accountant: str = "auto") -> list[Statement]:
        """One statement for each relation and unit."""
        groups: dict[tuple[str, str, int, int], list[Event]] = {}
        for event in self._events:
            key = (event.relation, event.unit, event.max_examples, event.group)
            groups.setdefault(key, []).append(event)
        return [self._stated(events, delta, accountant) for events in groups.values()]

    def _stated(self, events: Sequence[Event], delta: float, accountant: str) -> Statement:
        found = state(events, delta, accountant=accountant, noise_source=self.noise_source)
        beside = tuple(f"{name} adds nothing to it" for name in self._heuristics)
        return replace(found, assumptions=(*found.assumptions, *beside))

    def name_source(self, note: str) -> None:
        """Say where noise and draws come from, in an empty ledger that was made without.

        Raises:
            ConfigError: it has releases or a file already.
        """
        self._check_fresh()
        self._start({"v": _VERSION, "ledger": self.id, "noise_source": note})

    def resume(self, path: Path, head: Head | None = None, *, write: bool = False) -> None:
        """`load` into this empty ledger, so that the budgets and monitors that are over it go on as well.

        Args:
            path: see `load`.
            head: see `load`.
            write: see `load`.

        Raises:
            ConfigError: it has releases or a file already.
            DataError: see `load`.
        """
        self._check_fresh()
        vars(self).update(vars(type(self).load(path, head, write=write)))

    def keep(self, path: Path) -> None:
        """Write all of it to a new file, and every event from now on.

        Raises:
            ConfigError: the file exists, or the ledger has a file already.
            MyceliaError: it cannot be written.
        """
        if self.path is not None:
            raise ConfigError(f"it is kept in {self.path}", rule="a ledger has one file", who="ledger")
        self.save(path)
        self._open(path)

    def save(self, path: Path) -> None:
        """Write the whole ledger to a new file, in one piece.

        Raises:
            ConfigError: the file exists; a ledger is never replaced.
            MyceliaError: it cannot be written.
        """
        try:
            with path.open("x", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in self._lines)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            raise ConfigError(
                "the file exists",
                rule="a ledger is never replaced",
                fix="name a new file, or go on with Ledger.load(path, write=True)",
                who=str(path),
            ) from error
        except OSError as error:
            raise _unwritable(path, error) from error

    def sync(self) -> None:
        """Wait until all events would outlive a power cut; call it before a checkpoint."""
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """Let go of the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _check_fresh(self) -> None:
        if self._events or self._heuristics or self.path is not None:
            raise ConfigError(
                f"it has {self.steps} updates" + (f" and is kept in {self.path}" if self.path else ""),
                rule="a ledger is never replaced",
                fix="begin with an empty one, or go on with Ledger.load(path, write=True)",
                who="ledger",
            )

    def _open(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise _unwritable(path, error) from error
        self.path = path

    def _append(self, event: Event, print_: str, stream: str) -> None:
        """Take an event in, joined to the last one where it continues that."""
        self.steps += event.count
        if print_ or stream:
            self._releases[stream, event.step] = print_
        last = self.last
        if last is not None and event.continues(last):
            self._events[-1] = replace(last, count=last.count + event.count)
        else:
            self._events.append(event)

    def _take(self, path: Path, number: int, values: Mapping[str, Any]) -> None:
        """Take in what a line says."""
        given = {name: value for name, value in values.items() if name not in ("release", "stream")}
        print_, stream = str(values.get("release", "")), str(values.get("stream", ""))
        if "heuristic" in given:
            self._heuristics.append(str(given["heuristic"]))
            return
        if "again" in given:
            last = self.last
            if last is None or given != {"again": 1}:
                raise _broken(path, f"line {number} goes on with nothing")
            self._append(replace(last, step=last.step + last.count, count=1), print_, stream)
            return
        try:
            self._append(Event.from_json(given), print_, stream)
        except MyceliaError as error:
            raise _broken(path, f"line {number}: {error.found}") from error

    def _add_line(self, values: dict[str, Any]) -> str:
        """The line for these values, with the hash that chains it."""
        body = json.dumps(values, sort_keys=True, separators=(",", ":"))
        digest = sha256(f"{self._head.hash}{body}".encode()).hexdigest()[:32]
        self._head = Head(self._head.lines + 1, digest)
        text = f'{body[:-1]},"hash":"{digest}"}}'
        self._lines.append(text)
        return text

    def _write(self, values: dict[str, Any]) -> None:
        before = self._head
        line = self._add_line(values).encode() + b"\n"
        if self._file < 0:
            return
        size = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self._head = before
            self._lines.pop()
            os.ftruncate(self._file, size)
            raise _unwritable(self.path or Path(FILE), error) from error


def from_opacus(accountant: object) -> Ledger:
    """The ledger of a run with Opacus.

    Args:
        accountant: an accountant of Opacus, its state, or its history of
            (noise multiplier, sample rate, steps).

    Raises:
        ConfigError: it has no such history.

    >>> from_opacus([(1.5, 0.04, 2250)]).statement(1e-5).steps
    2250
    """
    history: object = getattr(accountant, "history", accountant)
    if isinstance(history, Mapping):
        history = history.get("history")
    ledger = Ledger("Opacus, not stated")
    try:
        if not isinstance(history, Sequence) or isinstance(history, str):
            raise TypeError
        for z, q, steps in history:
            for event in Poisson(float(q)).events(float(z), int(steps), first_step=ledger.steps):
                ledger.record(event)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{type(accountant).__name__} has no history of (noise multiplier, sample rate, steps)",
            rule="Opacus' accountants keep one",
            fix="pass PrivacyEngine.accountant, or its state_dict()",
            who="from_opacus",
        ) from error
    return ledger


def _fingerprint(event: Event, release: str) -> str:
    text = json.dumps(event.to_json(), sort_keys=True)
    return sha256(f"{text}\x00{release}".encode()).hexdigest()[:32]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise _broken(path, f"line {number} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise _broken(path, f"line {number} is no object")
    return values


def _broken(path: Path, found: str) -> DataError:
    return DataError(
        found,
        rule="a run goes on only with the whole ledger that it wrote",
        fix="restore the file from a backup; without it, what was spent is not known",
        who=str(path),
    )


def _unwritable(path: Path, error: OSError) -> MyceliaError:
    return MyceliaError(
        f"the ledger cannot be written: {error.strerror or error}",
        rule="a release is written down before it happens",
        fix="free space, or see to the rights of the folder",
        who=str(path),
    )
