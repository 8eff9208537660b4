"""The round machine on a fake clock: deadlines, policies, outcomes, refusals."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from mycelia.aggregator.config import RoundConfig
from mycelia.aggregator.effects import (
    Abort,
    Accept,
    Configure,
    Effect,
    Evaluate,
    Finish,
    Merge,
    Outcome,
    Persist,
    Reject,
)
from mycelia.aggregator.rounds import Round, asked_for, candidates_for, quorum_for
from mycelia.aggregator.updates import Expected, UpdateMeta
from mycelia.engine.errors import ProtocolError, RoundAborted

SCHEMA = "5c" * 32
BEGAN = 1000.0  # the machine must not care where its clock starts
CONFIGURE, TRAIN, MERGE, EVALUATE = (BEGAN + end for end in (40, 540, 570, 600))


def round_of(
    candidates: Sequence[int],
    k: int,
    *,
    number: int = 5,
    carried: dict | None = None,
    evaluate: bool = True,
    **config: Any,
) -> Round:
    expected = Expected(number, 1, SCHEMA, 100.0, 1000, 100)
    return Round(expected, candidates, k, RoundConfig(**config), evaluate=evaluate, carried=carried)


def meta(client: int, attempt: int = 1, number: int = 5, **change: Any) -> UpdateMeta:
    return UpdateMeta(client, number, attempt, SCHEMA, 50.0, examples=50, steps=5)._replace(**change)


def asked(effects: Sequence[Effect]) -> list[tuple[int, int]]:
    return [(c, e.attempt) for e in effects if isinstance(e, Configure) for c in e.clients]  # type: ignore[misc]


def finish(machine: Round, now: float = BEGAN) -> Finish:
    machine.merged(now)
    machine.evaluated(now)
    assert isinstance(machine.result, Finish)
    return machine.result


def abort(machine: Round) -> Abort:
    assert isinstance(machine.result, Abort)
    return machine.result


def statuses(result: Finish | Abort) -> dict[Any, str]:
    return {outcome.client: outcome.status for outcome in result.outcomes}


# The plain course of a round


def test_a_round_in_which_all_goes_well() -> None:
    machine = round_of([3, 1, 2], 3)
    assert machine.phase == "select"
    assert machine.start(BEGAN) == [Persist("issued", (3, 1, 2)), Configure(5, 1, (3, 1, 2))]
    assert (machine.phase, machine.needed, machine.deadline) == ("configure", 3, CONFIGURE)
    assert machine.ready([1, 2, 3], BEGAN + 1) == []
    assert machine.phase == "train"
    assert machine.update(meta(2), BEGAN + 2) == [Accept(2, 1, 0)]
    assert machine.update(meta(3), BEGAN + 2) == [Accept(3, 1, 0)]
    assert machine.needed == 1
    assert machine.update(meta(1), BEGAN + 3) == [
        Accept(1, 1, 0),
        Persist("frozen", (1, 2, 3)),
        Merge((1, 2, 3)),
    ]
    assert (machine.phase, machine.needed, machine.deadline) == ("merge", 0, MERGE)
    assert machine.merged(BEGAN + 4) == [Evaluate()]
    assert (machine.phase, machine.deadline) == ("evaluate", EVALUATE)
    effects = machine.evaluated(BEGAN + 5)
    result = machine.result
    assert effects == [Persist("finished", (1, 2, 3)), result]
    assert (machine.phase, machine.deadline) == ("done", math.inf)
    assert isinstance(result, Finish)
    assert result.survivors == (1, 2, 3)
    assert result.outcomes == tuple(Outcome(c, 1, "accepted", "train") for c in (1, 2, 3))
    assert result.evaluated
    assert not result.refused
    assert not result.carried


def test_without_evaluation_the_merge_ends_it() -> None:
    machine = round_of([1], 1, evaluate=False)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    assert machine.merged(BEGAN) == [Persist("finished", (1,)), machine.result]
    assert isinstance(machine.result, Finish)
    assert not machine.result.evaluated


def test_an_empty_poisson_draw_is_a_round_with_nothing_to_add() -> None:
    machine = round_of([], 0)
    assert machine.start(BEGAN) == [Persist("frozen", ()), Merge(())]
    assert finish(machine).survivors == ()


def test_over_selection_closes_with_the_k_th_update() -> None:
    machine = round_of(range(13), 10, over_select=1.25)
    assert len(asked(machine.start(BEGAN))) == 13
    for client in range(2, 12):
        machine.update(meta(client), BEGAN + client)
    assert machine.phase == "merge"
    late = machine.update(meta(0), BEGAN + 20)
    assert late == [Reject(0, 5, 1, "late", "the round did not wait for it")]
    result = finish(machine, BEGAN + 20)
    assert result.survivors == tuple(range(2, 12))
    assert [c for c, status in statuses(result).items() if status == "unused"] == [0, 1, 12]
    assert [(r.client, r.status) for r in result.refused] == [(0, "late")]


@pytest.mark.parametrize(
    ("k", "over_select", "quorum", "m", "need"),
    [
        (10, 1.25, 0.8, 13, 8),
        (10, 1.1, 0.7, 11, 7),
        (3, 1.0, 0.8, 3, 3),
        (20, 1.0, 0.55, 20, 11),
        (1, 1.0, 0.1, 1, 1),
    ],
)
def test_numbers_asked_and_needed(k: int, over_select: float, quorum: float, m: int, need: int) -> None:
    config = RoundConfig(over_select=over_select, quorum=quorum, on_failure="replace", max_attempts=2)
    assert (asked_for(k, config), quorum_for(k, config), candidates_for(k, config)) == (m, need, 2 * m)


# Deadlines


def test_who_does_not_answer_until_the_configure_deadline_is_dropped() -> None:
    machine = round_of([1, 2, 3, 4, 5], 5)
    machine.start(BEGAN)
    machine.ready([1, 2, 3], BEGAN + 1)
    machine.update(meta(4), BEGAN + 1)  # an update says that it is ready, too
    assert machine.tick(math.nextafter(CONFIGURE, 0)) == []
    assert machine.phase == "configure"
    assert machine.tick(CONFIGURE) == []
    assert (machine.phase, machine.deadline) == ("train", TRAIN)
    for client in (1, 2, 3):
        machine.update(meta(client), CONFIGURE + 1)
    lost = finish(machine, CONFIGURE + 1).outcomes[4]
    assert (lost.client, lost.status, lost.phase) == (5, "dropped", "configure")
    assert "no answer" in lost.cause
    assert lost.hint


def test_the_train_deadline_closes_with_a_quorum() -> None:
    machine = round_of(range(10), 10)
    machine.start(BEGAN)
    machine.ready(range(10), BEGAN)
    for client in range(8):
        machine.update(meta(client), BEGAN + 60)
    assert machine.tick(math.nextafter(TRAIN, 0)) == []
    assert machine.tick(TRAIN) == [Persist("frozen", tuple(range(8))), Merge(tuple(range(8)))]
    result = finish(machine, TRAIN)
    late = [o for o in result.outcomes if o.status == "late"]
    assert [(o.client, o.phase, o.cause) for o in late] == [
        (8, "train", "no update before the deadline"),
        (9, "train", "no update before the deadline"),
    ]


def test_an_update_at_the_deadline_is_late_with_or_without_a_tick_before() -> None:
    for tick_first in (True, False):
        machine = round_of([1, 2], 2, quorum=0.5)
        machine.start(BEGAN)
        machine.update(meta(1), BEGAN)
        machine.ready([2], BEGAN)
        if tick_first:
            machine.tick(TRAIN)
        effects = machine.update(meta(2), TRAIN)
        assert isinstance(effects[-1], Reject)
        assert finish(machine, TRAIN).survivors == (1,)


def test_below_the_quorum_at_the_deadline() -> None:
    machine = round_of(range(10), 10)
    machine.start(BEGAN)
    machine.ready(range(10), BEGAN)
    for client in range(7):
        machine.update(meta(client), BEGAN + 60)
    effects = machine.tick(TRAIN)
    result = abort(machine)
    assert effects == [Persist("failed", ()), result]
    assert (result.reason, result.phase, result.have, result.need) == ("below_quorum", "train", 7, 8)
    error = result.error()
    assert isinstance(error, RoundAborted)
    assert "7 of 8 needed updates" in str(error)
    assert "client 7, 8, 9, late in train: no update before the deadline" in str(error)
    assert error.who == "round 5, train"
    assert "quorum" in error.fix


def test_nobody_answers() -> None:
    machine = round_of([1, 2], 2)
    machine.start(BEGAN)
    machine.tick(CONFIGURE)
    assert (abort(machine).reason, abort(machine).phase) == ("no_survivors", "train")
    assert statuses(abort(machine)) == {1: "dropped", 2: "dropped"}


def test_the_merge_deadline() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    assert machine.tick(math.nextafter(MERGE, 0)) == []
    machine.tick(MERGE)
    assert (abort(machine).reason, abort(machine).phase) == ("budget_over", "merge")
    assert machine.merged(MERGE) == []  # too late: the old model stands


def test_a_merge_that_ends_at_its_deadline_is_too_late() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.merged(MERGE)
    assert abort(machine).reason == "budget_over"


def test_the_evaluate_deadline_keeps_the_merged_model() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.merged(BEGAN + 1)
    assert machine.tick(math.nextafter(EVALUATE, 0)) == []
    machine.tick(EVALUATE)
    assert isinstance(machine.result, Finish)
    assert not machine.result.evaluated
    assert machine.evaluated(EVALUATE) == []


def test_a_clock_that_jumps_past_everything_does_not_merge() -> None:
    machine = round_of([1, 2], 2, quorum=0.5)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    effects = machine.tick(BEGAN + 10_000)
    assert not any(isinstance(effect, Merge) for effect in effects)
    assert abort(machine).reason == "budget_over"


def test_a_clock_that_runs_backwards_stands_still() -> None:
    machine = round_of([1, 2], 2, quorum=0.5)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.tick(TRAIN)
    assert isinstance(machine.update(meta(2), BEGAN)[0], Reject)


# Failure policies


def test_drop_does_without() -> None:
    machine = round_of(range(10), 10)
    machine.start(BEGAN)
    assert machine.failed(0, 1, "Traceback: boom", BEGAN, hint="look") == []
    for client in range(1, 10):
        effects = machine.update(meta(client), BEGAN)
    assert isinstance(effects[-1], Merge)  # nobody is left to wait for
    result = finish(machine)
    assert result.outcomes[0] == Outcome(0, 1, "failed", "train", "Traceback: boom", "look")
    assert result.survivors == tuple(range(1, 10))


def test_retry_asks_the_same_client_again_up_to_max_attempts() -> None:
    machine = round_of([1, 2], 2, on_failure="retry", max_attempts=3, quorum=0.5)
    machine.start(BEGAN)
    assert asked(machine.failed(1, 1, "first", BEGAN)) == [(1, 2)]
    assert machine.failed(1, 1, "told twice", BEGAN) == []
    stale = machine.update(meta(1, attempt=1), BEGAN)
    assert stale == [Reject(1, 5, 1, "stale_attempt", "it is of attempt 1, this is 2")]
    assert asked(machine.dropped(1, 2, "second", BEGAN, phase="configure")) == [(1, 3)]
    assert asked(machine.failed(1, 3, "third", BEGAN)) == []
    machine.update(meta(2), BEGAN)
    result = finish(machine)
    assert result.outcomes[0] == Outcome(1, 3, "failed", "train", "third")
    assert [(o.client, o.status) for o in result.refused] == [(1, "stale")]


def test_a_retry_that_works() -> None:
    machine = round_of([1], 1, on_failure="retry")
    machine.start(BEGAN)
    machine.ready([1], BEGAN)
    machine.failed(1, 1, "boom", BEGAN + 100)
    assert machine.update(meta(1, attempt=2), BEGAN + 200)[0] == Accept(1, 2, 0)
    assert finish(machine, BEGAN + 200).outcomes == (Outcome(1, 2, "accepted", "train"),)


def test_replace_asks_the_next_in_the_draw_while_configure_is_open() -> None:
    machine = round_of([4, 9, 7], 2, on_failure="replace", max_attempts=3, quorum=0.5)
    assert asked(machine.start(BEGAN)) == [(4, 1), (9, 1)]
    assert asked(machine.dropped(4, 1, "gone", BEGAN + 1)) == [(7, 1)]
    assert asked(machine.failed(9, 1, "boom", BEGAN + 1)) == []
    machine.update(meta(7), BEGAN + 2)
    result = finish(machine, BEGAN + 2)
    assert statuses(result) == {4: "dropped", 7: "accepted", 9: "failed"}
    assert result.outcomes[2].hint == "not replaced: no client is left"


def test_replace_ends_with_configure_and_with_the_attempts() -> None:
    machine = round_of(range(6), 2, on_failure="replace", max_attempts=2, quorum=0.5)
    machine.start(BEGAN)
    assert asked(machine.failed(0, 1, "boom", BEGAN)) == [(2, 1)]
    assert asked(machine.failed(2, 1, "boom", BEGAN)) == []
    machine.ready([1], BEGAN)
    assert asked(machine.failed(1, 1, "boom", CONFIGURE)) == []
    hints = [outcome.hint for outcome in abort(machine).outcomes]
    assert hints == ["", "not replaced: too late in the round", "not replaced: attempts are used up"]


def test_abort_gives_up_with_the_first_failure() -> None:
    machine = round_of([1, 2, 3], 3, on_failure="abort")
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.failed(2, 1, "boom", BEGAN)
    result = abort(machine)
    assert (result.reason, result.have) == ("client_failed", 1)
    assert statuses(result) == {1: "accepted", 2: "failed", 3: "unused"}
    assert "client 2, failed in train: boom" in str(result.error())


def test_all_clients_failing_fails_the_round_with_each_traceback() -> None:
    machine = round_of(range(4), 4)
    machine.start(BEGAN)
    for client in range(4):
        machine.failed(client, 1, f"Traceback (client {client})\nValueError: {client}", BEGAN)
    result = abort(machine)
    assert (result.reason, result.have) == ("all_failed", 0)
    text = str(result.error())
    for client in range(4):
        assert f"ValueError: {client}" in text


def test_many_clients_with_one_cause_are_one_line_and_many_causes_are_cut() -> None:
    machine = round_of(range(100), 100)
    machine.start(BEGAN)
    for client in range(50):
        machine.failed(client, 1, "boom", BEGAN)
    for client in range(50, 100):
        machine.failed(client, 1, f"cause {client}", BEGAN)
    text = str(abort(machine).error())
    assert "client 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 40 more, failed in train: boom" in text
    assert "and 31 other causes" in text
    assert len(abort(machine).outcomes) == 100


def test_too_few_candidates_abort_in_selection() -> None:
    machine = round_of([1, 2, 3], 10)
    machine.start(BEGAN)
    result = abort(machine)
    assert (result.reason, result.phase, result.have, result.need) == ("below_quorum", "select", 3, 8)
    assert result.outcomes == ()
    assert machine.tick(BEGAN + 9999) == []


def test_fewer_candidates_than_wanted_but_a_quorum() -> None:
    machine = round_of(range(8), 10)
    assert len(asked(machine.start(BEGAN))) == 8
    for client in range(8):
        machine.update(meta(client), BEGAN)
    assert finish(machine).survivors == tuple(range(8))


# Updates that are refused


def test_a_duplicate_is_refused_and_the_first_one_counts() -> None:
    machine = round_of([1, 2], 2)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    assert machine.update(meta(1), BEGAN) == [Reject(1, 5, 1, "duplicate", "the first one counts")]
    assert machine.needed == 1
    machine.update(meta(2), BEGAN)
    machine.update(meta(2), BEGAN)
    result = finish(machine)
    assert statuses(result) == {1: "accepted", 2: "accepted"}
    assert [(o.client, o.status) for o in result.refused] == [(1, "duplicate"), (2, "duplicate")]


def test_a_stale_round_does_not_cost_the_client_its_place() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    effects = machine.update(meta(1, number=4), BEGAN)
    assert effects == [Reject(1, 4, 1, "stale_round", "it is of round 4, this is 5")]
    assert machine.update(meta(1, number=6), BEGAN)[0] == Reject(
        1, 6, 1, "future_round", "it is of round 6, this is 5"
    )
    assert machine.update(meta(1), BEGAN)[0] == Accept(1, 1, 0)


def test_who_was_not_asked_is_refused() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    (unasked,) = machine.update(meta(99), BEGAN)
    (stale,) = machine.update(meta(98, number=4), BEGAN)
    assert isinstance(unasked, Reject)
    assert isinstance(stale, Reject)
    assert (unasked.reason, stale.reason) == ("not_asked", "stale_round")
    assert 99 not in statuses(finish_after(machine))


def finish_after(machine: Round) -> Finish:
    machine.update(meta(1), BEGAN)
    return finish(machine)


def test_nan_from_one_client_is_rejected_and_named() -> None:
    machine = round_of(range(10), 10, on_failure="retry")
    machine.start(BEGAN)
    (rejected,) = machine.update(meta(3, non_finite="fc.weight"), BEGAN)
    assert isinstance(rejected, Reject)
    assert (rejected.client, rejected.reason) == (3, "not_finite")
    for client in set(range(10)) - {3}:
        machine.update(meta(client), BEGAN)
    outcome = finish(machine).outcomes[3]
    assert (outcome.status, outcome.cause) == ("rejected", "not_finite")
    assert "fc.weight" in outcome.hint
    (again,) = machine.update(meta(3), BEGAN)
    assert isinstance(again, Reject)
    assert again.reason == "late"


@pytest.mark.parametrize(
    "change", [{"schema": "00"}, {"weight": math.inf}, {"steps": 101}, {"examples": 1001}]
)
def test_what_breaks_a_rule_is_rejected(change: dict) -> None:
    machine = round_of([1, 2], 2, quorum=0.5)
    machine.start(BEGAN)
    assert isinstance(machine.update(meta(1, **change), BEGAN)[0], Reject)
    machine.update(meta(2), BEGAN)
    assert statuses(finish(machine)) == {1: "rejected", 2: "accepted"}


def test_a_rejected_update_is_replaced() -> None:
    machine = round_of([1, 2], 1, on_failure="replace")
    machine.start(BEGAN)
    assert asked(machine.update(meta(1, weight=0.0), BEGAN)) == [(2, 1)]


def test_weights_of_zero_only() -> None:
    machine = round_of([1, 2], 2)
    machine.start(BEGAN)
    machine.update(meta(1, weight=0.0), BEGAN)
    machine.update(meta(2, weight=0.0), BEGAN)
    assert abort(machine).reason == "zero_weight"


def test_an_update_that_could_not_be_added() -> None:
    machine = round_of([1, 2], 2, quorum=0.5, on_failure="retry")
    machine.start(BEGAN)
    assert machine.rejected(1, 1, "value 2000 is above update.max_abs", BEGAN) == []
    machine.update(meta(2), BEGAN)
    assert finish(machine).outcomes[0].status == "rejected"


def test_refused_messages_do_not_pile_up() -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    for _ in range(1500):
        machine.update(meta(1), BEGAN)
    assert len(finish(machine).refused) == 1000


# Merging, stopping, stragglers


@pytest.mark.parametrize(
    ("reason", "expected"), [({}, "merge_failed"), ({"reason": "zero_weight"}, "zero_weight")]
)
def test_a_merge_that_fails(reason: dict, expected: str) -> None:
    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.merge_failed("fc.weight is not finite", BEGAN, **reason)
    assert (abort(machine).reason, abort(machine).phase) == (expected, "merge")
    assert "fc.weight is not finite" in str(abort(machine).error())


def test_cancelling_keeps_a_model_that_is_merged() -> None:
    machine = round_of([1, 2], 2)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.cancel("Ctrl-C", BEGAN)
    assert abort(machine).reason == "cancelled"
    assert statuses(abort(machine)) == {1: "accepted", 2: "unused"}
    assert machine.cancel("again", BEGAN) == []

    machine = round_of([1], 1)
    machine.start(BEGAN)
    machine.update(meta(1), BEGAN)
    machine.merged(BEGAN)
    machine.cancel("Ctrl-C", BEGAN)
    assert isinstance(machine.result, Finish)


def test_a_straggler_goes_on_in_the_next_round() -> None:
    first = round_of([1, 2], 2, quorum=0.5, stragglers="next_round")
    first.start(BEGAN)
    first.ready([2], BEGAN)
    first.update(meta(1), BEGAN)
    first.tick(TRAIN)
    result = finish(first, TRAIN)
    assert dict(result.carried) == {2: 1}
    assert (result.outcomes[1].status, result.outcomes[1].hint) == (
        "late",
        "its update goes to the next round",
    )

    second = round_of([2, 7], 2, number=6, carried=dict(result.carried), quorum=0.5, stragglers="next_round")
    assert asked(second.start(TRAIN)) == [(7, 1)]  # it is busy, and is one of those asked
    (wrong,) = second.update(meta(2, number=6), TRAIN)
    assert isinstance(wrong, Reject)
    assert second.update(meta(2, number=5), TRAIN) == [Accept(2, 1, 1)]
    second.ready([7], TRAIN)
    second.tick(TRAIN + 540)
    assert dict(finish(second, TRAIN + 540).carried) == {7: 1}


def test_a_straggler_is_carried_once_and_not_retried() -> None:
    machine = round_of([7], 2, carried={2: 1}, quorum=0.5, stragglers="next_round", on_failure="retry")
    machine.start(BEGAN)
    machine.update(meta(7), BEGAN)
    machine.tick(TRAIN)
    assert dict(finish(machine, TRAIN).carried) == {}

    machine = round_of([7], 2, carried={2: 1}, stragglers="next_round", on_failure="retry")
    machine.start(BEGAN)
    assert asked(machine.failed(2, 1, "boom", BEGAN)) == []


# Misuse


def test_a_round_starts_once_and_first() -> None:
    machine = round_of([1], 1)
    with pytest.raises(ProtocolError, match="not begun"):
        machine.tick(BEGAN)
    machine.start(BEGAN)
    with pytest.raises(ProtocolError, match="already begun"):
        machine.start(BEGAN)


def test_events_out_of_place_change_nothing() -> None:
    machine = round_of([1, 2], 2)
    machine.start(BEGAN)
    assert machine.merged(BEGAN) == []
    assert machine.evaluated(BEGAN) == []
    assert machine.merge_failed("x", BEGAN) == []
    assert machine.failed(99, 1, "never asked", BEGAN) == []
    assert machine.ready([99], BEGAN) == []
    machine.update(meta(1), BEGAN)
    assert machine.failed(1, 1, "after its update", BEGAN) == []
    assert (machine.phase, machine.needed) == ("configure", 1)


def test_clients_may_have_names() -> None:
    machine = Round(Expected(0, 1, SCHEMA, 100.0), ["b", "a"], 2, RoundConfig())
    machine.start(0.0)
    for client in ("b", "a"):
        machine.update(UpdateMeta(client, 0, 1, SCHEMA, 1.0), 0.0)
    machine.merged(0.0)
    machine.evaluated(0.0)
    assert isinstance(machine.result, Finish)
    assert machine.result.survivors == ("a", "b")
