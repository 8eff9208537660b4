from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Frozen,
    Issued,
    Machine,
    Merged,
    Published,
    Snapshot,
)
from mycelia.aggregator.recovery import Order, budget_left, recover
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ProtocolError
from tests.aggregator.round_histories import (
    AFTER,
    MODEL,
    PLAIN,
    SECURE,
    STATE,
    SUM,
    histories,
    machine,
    newest,
    opened,
    update,
)


@settings(max_examples=50)
@given(histories())
def test_any_prefix_recovers(history: list[Entry]) -> None:
    for length in range(1, len(history) + 1):
        prefix = history[:length]
        found = recover(prefix, now=1300.0, heartbeat_s=15.0)
        there = newest(prefix)
        assert recover(there, now=1300.0, heartbeat_s=15.0).action == found.action
        last = prefix[-1]
        accepted = {entry.client: entry.sha256 for entry in there if isinstance(entry, Accepted)}
        expected = "collect" if isinstance(last, Issued) and accepted else AFTER[type(last)]
        assert found.action == expected
        assert found.opened == there[0]
        assert found.accepted == accepted
        snapshots = [entry for entry in there if isinstance(entry, Snapshot)]
        assert found.snapshot == (snapshots[-1] if snapshots else None)
        folded = snapshots[-1].clients if snapshots else ()
        assert set(found.missing) == set(accepted) - set(folded)
        frozen = [entry.clients for entry in there if isinstance(entry, Frozen)]
        assert found.survivors == (frozen[0] if frozen else None)
        if found.action in ("finish", "publish"):
            assert found.charged == any(isinstance(entry, Charged) for entry in there)
        if found.action == "session":
            mine = [
                entry
                for entry in there
                if isinstance(entry, Machine) and entry.attempt == found.session_attempt
            ]
            assert found.session == tuple(entry.record for entry in mine)
        assert found.budget_s == (0.0 if found.action == "next" else 300.0)
        published = [entry for entry, after in pairwise(prefix) if isinstance(after, Published)]
        assert found.published == (published[-1] if published else None)


@given(histories(), st.data())
def test_a_record_out_of_place_changes_nothing(history: list[Entry], data: st.DataObject) -> None:
    """Whatever comes next, it is refused and the log goes on, or it is taken: never half of it."""
    place = data.draw(st.integers(0, len(history) - 1))
    strange = data.draw(st.sampled_from([*PLAIN, *SECURE, *history, Failed("cancelled")]))
    order = Order()
    for entry in history[:place]:
        order.take(entry)
    before = vars(order.copy())
    try:
        taken = order.take(strange)
    except (ProtocolError, Problem):
        taken = False
    if not taken:
        assert vars(order) == before
        for entry in history[place:]:
            assert order.take(entry)


@pytest.mark.parametrize(
    ("before", "entry"),
    [
        ((), Issued(0, (1,))),
        ((), Published()),
        ((), Failed("cancelled")),
        ((), machine("CONFIG")),
        (PLAIN[:1], opened()),
        (PLAIN[:1], update(1)),  # nobody was asked
        (PLAIN[:1], Issued(0, (4,))),  # not of the cohort
        (PLAIN[:2], Issued(0, (1,))),  # asked twice in an attempt
        (PLAIN[:3], Issued(1, (2,))),  # its update is there
        (PLAIN[:2], update(4)),
        (PLAIN[:2], update(1, attempt=1)),
        (PLAIN[:2], Snapshot((1,), SUM)),
        (PLAIN[:3], Snapshot((), SUM)),
        (PLAIN[:3], Snapshot((1, 2), SUM)),  # 1 has sent nothing
        (PLAIN[:5], Snapshot((1,), SUM)),  # 2 was in it
        (PLAIN[:2], machine("CONFIG")),  # not a secure round
        (PLAIN[:4], Frozen((1, 2), SUM)),  # no snapshot
        (PLAIN[:5], Frozen((1,), SUM)),
        (PLAIN[:5], Frozen((1, 2), MODEL)),
        (PLAIN[:5], Frozen((), None)),
        (PLAIN[:5], Charged(SUM)),
        (PLAIN[:5], Merged(MODEL, STATE)),
        (PLAIN[:6], Frozen((1, 2), SUM)),  # never a second set
        (PLAIN[:6], update(3)),
        (PLAIN[:6], Snapshot((1, 2), SUM)),
        (PLAIN[:6], Charged(SUM)),  # nothing to charge
        ((opened(private=True), *PLAIN[1:6]), Merged(MODEL, STATE)),  # not charged
        ((opened(private=True), *PLAIN[1:6], Charged(SUM)), Charged(SUM)),  # never twice
        (PLAIN[:6], Published()),
        (PLAIN[:7], Merged(MODEL, STATE)),
        (PLAIN[:7], Failed("cancelled")),  # a merged model stands
        (PLAIN, Published()),
        (PLAIN, opened(0, attempt=1)),  # it did not fail
        (PLAIN, opened(2)),
        ((opened(), Failed("all_failed")), opened(0)),  # not a new attempt
        ((opened(), Issued(3, (1,)), Failed("all_failed")), opened(0, attempt=3)),
        (PLAIN, opened(1, (1, 2), carried=((2, 0),))),  # drawn and carried over
        (PLAIN, opened(1, (1, 2), carried=((3, 0),), secure=True)),
        (SECURE[:1], machine("CONFIG")),
        (SECURE[:2], machine("ADVERT")),
        (SECURE[:2], machine("CONFIG", attempt=1)),
        (SECURE[:2], update(1)),
        (SECURE[:2], Frozen((), None)),
        (SECURE[:5], machine("CONFIG")),
        (SECURE[:5], Issued(1, (1, 2, 3))),
        (SECURE[:-3], Merged(MODEL, STATE)),
        (SECURE[:-2], machine("U2")),
        ((*SECURE[:5], machine("FAILED")), machine("CONFIG", attempt=0)),  # never a session twice
        ((*SECURE[:5], machine("FAILED")), Merged(MODEL, STATE)),
        ((*SECURE[:5], machine("FAILED")), Issued(0, (1, 2, 3))),
    ],
)
def test_what_no_round_leaves_is_refused(before: Sequence[Entry], entry: Entry) -> None:
    order = Order()
    for earlier in before:
        assert order.take(earlier)
    with pytest.raises(ProtocolError):
        order.take(entry)


def test_same_update_twice_counts_once() -> None:
    for length in (4, 5, 6, 7):
        order = Order()
        for entry in PLAIN[:length]:
            order.take(entry)
        assert not order.take(update(2))
        with pytest.raises(Problem) as refused:
            order.take(Accepted(0, 2, MODEL))
        assert refused.value.reason == Reason.EQUIVOCATION
        assert order.accepted == {1: update(1).sha256, 2: update(2).sha256}


def test_stragglers_of_the_round_before_are_accepted() -> None:
    order = Order()
    for entry in (
        *PLAIN,
        opened(1, (1, 2), carried=((3, 0),)),
        update(3),
        Snapshot((3,), SUM),
        Frozen((3,), SUM),
    ):
        assert order.take(entry)


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (1000.0, 600.0),
        (1100.0, 500.0),
        (1555.0, 45.0),
        (1590.0, 45.0),  # 10 s are left: three heartbeats
        (9e9, 45.0),
        (900.0, 600.0),  # the clock was set back
        (-9e9, 600.0),
    ],
)
def test_a_restarted_round_keeps_what_is_left(now: float, left: float) -> None:
    assert budget_left(opened(), now, heartbeat_s=15.0) == left
