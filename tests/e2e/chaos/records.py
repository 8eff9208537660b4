"""What a run has left in its store and its logs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from mycelia.aggregator.log_records import Open, decode, is_machine
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import outcomes, releases, round_log


@dataclass(frozen=True)
class Records:
    """Of one run.

    Attributes:
        survivors: of each round by its number, in the attempt that was published; nobody where none was.
        opened: how often each round was begun.
        failed: attempts at rounds that failed, and why.
        outcomes: of every device that was asked, by round.
        released: round and attempt of every release.
        kinds: how many records of each kind there are.
    """

    survivors: list[tuple[int, ...]]
    opened: Counter[int]
    failed: list[str]
    outcomes: dict[int, list[DeviceOutcome]]
    released: list[tuple[int, int]]
    kinds: Counter[str]


def read(folder: Path) -> Records:
    """What is in the store."""
    store = Store.open(f"sqlite:///{folder}/mycelia.db")
    try:
        with store.read() as connection:
            rows = connection.execute(select(round_log).order_by(round_log.c.number)).all()
            said = connection.execute(select(outcomes)).all()
            released = connection.execute(select(releases.c.round, releases.c.attempt)).all()
    finally:
        store.close()
    opened: Counter[int] = Counter()
    failed, published, number = list[str](), dict[int, int](), 0
    attempt = 0
    for row in rows:
        if is_machine(row.kind):
            continue
        entry = decode(row.kind, row.body)
        if isinstance(entry, Open):
            number, attempt = entry.round, entry.attempt
            opened[number] += 1
        elif row.kind == "PUBLISHED":
            published[number] = attempt
        elif row.kind == "FAILED":
            failed.append(f"round {number}: {entry}")
    found: dict[int, list[DeviceOutcome]] = defaultdict(list)
    for row in said:
        found[row.round].append(
            DeviceOutcome(row.client, row.attempt, row.status or "", row.phase, row.cause, row.hint)
        )
    survivors = [
        tuple(
            sorted(
                o.client
                for o in found[each]
                if each in published and o.attempt >= published[each] and o.status == "ACCEPTED"
            )
        )
        for each in range(max(opened, default=-1) + 1)
    ]
    kinds = Counter(row.kind.rpartition("/")[2] for row in rows)
    return Records(survivors, opened, failed, dict(found), [tuple(row) for row in released], kinds)


def check(found: Records) -> None:
    """What holds for every run, whatever has happened to it."""
    for number, each in found.outcomes.items():
        for outcome in each:
            assert outcome.client > 0, (number, outcome)
            assert outcome.status, (number, outcome, "an outcome that was never settled")
            if outcome.status != "ACCEPTED":
                assert outcome.phase, (number, outcome)
                assert outcome.cause, (number, outcome)
    for clients in found.survivors:
        assert len(set(clients)) == len(clients), found.survivors
    assert len({round for round, _ in found.released}) == len(found.released), found.released


def check_logs(paths: Iterable[Path]) -> None:
    """Nothing unexpected: no traceback, and no incident."""
    for path in paths:
        text = path.read_text(errors="replace") if path.exists() else ""
        assert "Traceback" not in text, f"{path}:\n{text[-6000:]}"
        assert '"error":' not in text, f"{path}:\n{text[-6000:]}"
        for line in text.splitlines():
            if line.startswith("{"):
                facts = json.loads(line)
                assert facts.get("reason") != "BUG", f"{path}: {line}"
                assert facts.get("code") != "BUG", f"{path}: {line}"
            assert "BUG" not in line.split()[:6], f"{path}: {line}"
