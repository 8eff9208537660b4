"""Attempts of a round: at most three in one budget, and none after a release; who is left out is told."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.attempts import LEAST_SHARE, MAX_ATTEMPTS, RoundAttempts, Suspects
from mycelia.aggregator.cohort import Cohort
from mycelia.aggregator.secagg import SecureSumServer
from mycelia.client.secagg import SecureSumClient
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Effect, Received, Send
from mycelia.privacy.secagg.messages import (
    Abort,
    Advert,
    Complaint,
    Config,
    Envelope,
    Masked,
    Message,
    Reason,
    RoundConfig,
    SecureSumError,
    Shares,
)
from mycelia.simulations.secure_sum_journals import MemoryJournals
from mycelia.simulations.secure_sum_setup import Inputs, Setup
from mycelia.simulations.secure_sums import (
    InFlight,
    Keys,
    SecureSumAborted,
    SecureSumResult,
    Wire,
    run_attempts,
)
from tests.privacy.secagg.sums import SETTINGS, VECTORS, run_sum


def error(reason: Reason, phase: str = "masked", **named: int) -> SecureSumError:
    return SecureSumError(reason, "it failed", phase=phase, **named)  # type: ignore[arg-type]


SHORT = error(Reason.COHORT_TOO_SMALL)


def attempts(suspects: Suspects | None = None, **named: int) -> RoundAttempts:
    return RoundAttempts(range(1, 11), 5, 600, suspects or Suspects(), **named)


# --- who, how often and until when ---


def test_three_attempts_and_no_more() -> None:
    rounds = attempts()
    assert rounds.go_on(SHORT, {1}, 10)
    assert rounds.go_on(SHORT, {2}, 20)
    assert (rounds.clients, rounds.number) == ((3, 4, 5, 6, 7, 8, 9, 10), 2)
    assert not rounds.go_on(SHORT, {3}, 30)
    assert rounds.number == MAX_ATTEMPTS - 1
    assert not attempts(limit=1).go_on(SHORT, (), 0)
    for limit in (0, MAX_ATTEMPTS + 1):
        with pytest.raises(ConfigError, match="1 to 3"):
            attempts(limit=limit)
    with pytest.raises(ConfigError, match="above 0"):
        RoundAttempts([1], 3, 0, Suspects())


def test_too_few_who_answer_are_not_asked_again() -> None:
    assert attempts().go_on(SHORT, range(1, 6), 0)
    assert not attempts().go_on(SHORT, range(1, 7), 0)


@pytest.mark.parametrize(
    "reason", ["CONFIG", "OVERFLOW", "WEAK_PARAMETERS", "BUDGET", "EMPTY_WEIGHT", "JOURNAL"]
)
def test_what_another_attempt_would_meet_again_ends_the_round(reason: str) -> None:
    assert not attempts().go_on(error(Reason[reason]), (), 0)


@pytest.mark.parametrize("reason", [Reason.UNMASK_SHORT, Reason.SHARE_MISMATCH, Reason.COHORT_TOO_SMALL])
def test_a_release_is_final_for_its_round(reason: Reason) -> None:
    assert not attempts().go_on(error(reason, "unmask"), (), 0)
    assert attempts().go_on(error(reason, "agree"), (), 0)


@given(st.floats(0, 1e4), st.lists(st.floats(0.01, 500), min_size=5, max_size=5))
def test_the_phases_of_an_attempt_fit_into_what_is_left(spent: float, phases: list[float]) -> None:
    budget = sum(phases)
    rounds = RoundAttempts(range(1, 11), 5, budget, Suspects(), began=100.0)
    assert rounds.left(100.0 + spent) == pytest.approx(budget - spent, abs=1e-6)
    if rounds.go_on(SHORT, (), 100.0 + spent):
        assert budget - spent >= LEAST_SHARE * budget - 1e-6
        shorter = rounds.deadlines(phases, 100.0 + spent)
        assert sum(shorter) <= max(budget - spent, 0) + 1e-6
        assert all(0 < one <= other + 1e-9 for one, other in zip(shorter, phases, strict=True))
        ratios = [one / other for one, other in zip(shorter, phases, strict=True)]
        assert math.isclose(min(ratios), max(ratios), rel_tol=1e-6)
    else:
        assert budget - spent < LEAST_SHARE * budget + 1e-6


def test_a_first_attempt_has_all_of_it() -> None:
    assert attempts().deadlines((30, 30, 500, 20, 20), 0) == (30, 30, 500, 20, 20)
    assert attempts().deadlines((30, 30, 500, 20, 20), 300) == (15, 15, 250, 10, 10)


# --- complaints ---


def test_of_a_complaint_both_names_are_kept_and_a_second_one_costs_the_complainer_its_place() -> None:
    suspects = Suspects()
    assert suspects.note(error(Reason.BAD_SHARE, owner=3, client=2)) == {3}
    assert suspects.note(error(Reason.BAD_SHARE, owner=4, client=5)) == {4}
    assert suspects.excluded == set()
    assert suspects.note(error(Reason.BAD_SHARE, owner=4, client=2)) == {2, 4}
    assert suspects.complaints == {2: [3, 4], 5: [4]}
    assert suspects.excluded == {2}
    assert attempts(suspects).clients == (1, 3, 4, 5, 6, 7, 8, 9, 10)


def test_who_announced_another_secret_is_left_out_of_the_job() -> None:
    suspects = Suspects()
    for reason in (Reason.SHARE_MISMATCH, Reason.SUM_OUT_OF_RANGE):
        assert suspects.note(error(reason, "unmask", owner=7)) == {7}
    assert suspects.note(error(Reason.SUM_OUT_OF_RANGE, "unmask")) == set()
    assert suspects.note(SHORT) == set()
    assert suspects.excluded == {7}
    assert suspects.complaints == {}


def complain(about: dict[int, int]) -> Wire:
    """Client 2 complains: in each attempt about someone else."""
    seen: list[bytes] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            session = Envelope.decode(flight.raw, len(flight.raw)).session_id
            if session not in seen:
                seen.append(session)
            if len(seen) in about:
                raw = keys.sign(Complaint(about[len(seen)]), 2)
                return InFlight("masked", 2, 0, Complaint(about[len(seen)]), raw)
        return flight

    return wire


def test_a_second_complaint_in_a_round_leaves_the_complainer_out_too() -> None:
    found = run_sum(
        vectors=VECTORS.repeat(2, axis=0),
        attempts=3,
        corrupt=[2],
        wire=complain({1: 3, 2: 4, 3: 5}),
        config=SecureSumConfig(n_min=8, corrupt=0.1, dropout=0.2),
    )
    assert isinstance(found, SecureSumResult)
    assert found.exact
    assert (found.attempts, found.survivors) == (3, (1, 5, 6, 7, 8, 9, 10, 11, 12))
    named = {(fault.client, fault.owner) for fault in found.faults if fault.reason == Reason.BAD_SHARE}
    assert named == {(2, 3), (2, 4)}


def test_a_job_remembers_whom_it_goes_on_without() -> None:
    suspects = Suspects()
    setup = Setup.of(Inputs.of(VECTORS, None, None, None), SETTINGS)
    for owner, left in ((3, (1, 2, 4, 5, 6)), (5, (1, 2, 4, 6))):
        suspects.note(error(Reason.SHARE_MISMATCH, "unmask", owner=owner))
        found = run_attempts(setup, MemoryJournals(), suspects=suspects)
        assert found.exact
        assert found.survivors == left
    suspects.note(error(Reason.SHARE_MISMATCH, "unmask", owner=6))
    with pytest.raises(SecureSumAborted) as caught:
        run_attempts(setup, MemoryJournals(), suspects=suspects)
    assert (caught.value.reason, caught.value.have) == (Reason.COHORT_TOO_SMALL, 3)


def test_attempts_have_sessions_keys_and_noise_of_their_own() -> None:
    adverts: dict[int, list[Advert]] = {}
    rounds: list[RoundConfig] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight | None:
        if isinstance(flight.message, Advert):
            adverts.setdefault(flight.sender, []).append(flight.message)
        if isinstance(flight.message, Config) and flight.message.round not in rounds:
            rounds.append(flight.message.round)
        return flight

    found = run_sum(attempts=3, wire=wire, drops={6: "masked", 5: "masked"}, seed=1)
    assert isinstance(found, SecureSumResult)
    assert found.attempts == 2
    assert [config.attempt for config in rounds] == [0, 1]
    assert len({config.session_id for config in rounds}) == len({config.nonce for config in rounds}) == 2
    assert sum(rounds[0].deadlines_ms) == 600_000
    assert sum(rounds[1].deadlines_ms) <= 600_000 - 500_000  # it went on after the deadline of `masked`
    for both in adverts.values():
        keys = {key for advert in both for key in (advert.channel_key, advert.mask_key, advert.nonce)}
        assert len(keys) == 3 * len(both)


def test_without_time_there_is_no_other_attempt() -> None:
    class Slow(SecureSumServer):
        """Its share phase takes all the time there is."""

        @property
        def deadline(self) -> float | None:
            found = super().deadline
            return None if found is None else found + 580.0

    found = run_sum(attempts=3, drops={6: "masked", 5: "masked"}, actors={"server": Slow})
    assert isinstance(found, SecureSumAborted)
    assert found.attempts == 1


def test_whoever_released_joins_no_other_attempt_whatever_the_server_says() -> None:
    journals = MemoryJournals()
    first = run_sum(journals, drops={6: "unmask", 5: "unmask"})
    assert isinstance(first, SecureSumAborted)
    assert first.phase == "unmask"
    second = run_sum(
        journals,
        wire=next_attempt,
    )
    assert isinstance(second, SecureSumAborted)
    refused = {fault.client for fault in second.faults if fault.reason == Reason.ALREADY_RELEASED}
    assert refused == {1, 2, 3, 4}


def next_attempt(flight: InFlight, keys: Keys) -> InFlight:
    """The server says that the round has another attempt."""
    if isinstance(flight.message, Config):
        message = Config(replace(flight.message.round, attempt=1))
        return replace(flight, raw=keys.sign(message, "server"))
    return flight


# --- those left out ---


class Listening(SecureSumServer):
    """Keeps what it sends."""

    sent: list[tuple[int, str, bytes]] = []  # noqa: RUF012

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        effects = super().handle(event)  # type: ignore[arg-type]
        for effect in effects:
            if isinstance(effect, Send):
                Listening.sent.append((effect.to, self.phase, effect.data))
        return effects


def farewells(**named: object) -> dict[int, list[tuple[str, Abort]]]:
    Listening.sent.clear()
    configs: list[RoundConfig] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Config) and not configs:
            configs.append(flight.message.round)
        given = named.get("wire")
        return given(flight, keys) if given else flight  # type: ignore[operator]

    run_sum(actors={"server": Listening}, **({"seed": 2} | named | {"wire": wire}))  # type: ignore[arg-type]
    told: dict[int, list[tuple[str, Abort]]] = {}
    for client, phase, data in Listening.sent:
        envelope = Envelope.decode(data, len(data))
        if envelope.kind == Abort.KIND:
            told.setdefault(client, []).append((phase, Abort.decode(envelope.body, configs[0])))
    return told


def held(kind: type[Message], client: int, until: str) -> Wire:
    def wire(flight: InFlight, keys: Keys) -> InFlight:
        hold = isinstance(flight.message, kind) and flight.sender == client
        return flight.until(until) if hold else flight

    return wire


@pytest.mark.parametrize(
    ("kind", "phase", "after"), [(Advert, "advertise", "share"), (Shares, "share", "masked")]
)
def test_whoever_a_freeze_leaves_out_is_told_at_once(kind: type[Message], phase: str, after: str) -> None:
    told = farewells(wire=held(kind, 4, after))
    assert set(told) == {4}
    ((when, message),) = told[4]
    assert when == after
    assert (message.reason, message.phase, message.client) == (Reason.LATE, phase, 4)


def test_a_restarted_server_tells_them_again() -> None:
    told = farewells(wire=held(Shares, 4, "masked"), crash={"server": "U1"})
    assert {message.reason for _, message in told[4]} == {Reason.LATE}


def test_a_client_that_was_left_out_has_ended() -> None:
    phases: dict[str, str] = {}

    class Watched(SecureSumClient):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            if isinstance(event, Received):
                kind = Envelope.decode(event.data, len(event.data)).kind
                phases[kind] = self.phase
            return effects

    found = run_sum(actors={4: Watched}, wire=held(Shares, 4, "masked"))
    assert isinstance(found, SecureSumResult)
    assert phases == {"config": "share", "roll": "masked", "abort": "done"}


def test_whoever_keeps_too_few_neighbours_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = Cohort.strong
    monkeypatch.setattr(Cohort, "strong", lambda cohort, clients: strong(cohort, clients) - {4})
    told = farewells()
    ((when, message),) = told[4]
    assert set(told) == {4}
    assert when == "masked"
    assert (message.reason, message.owner, message.phase) == (Reason.UNMASK_SHORT, 4, "share")
    assert (message.have, message.need) == (5, 4)


def test_on_a_ring_one_neighbourhood_that_loses_too_many_takes_all_with_it() -> None:
    ring = SecureSumConfig(neighbours=6, threshold=5, n_min=10, corrupt=0, dropout=0, threat="passive")
    outcomes = set()
    for seed in range(8):
        found = run_sum(
            vectors=VECTORS.repeat(4, axis=0), config=ring, drops={3: "share", 9: "share"}, seed=seed
        )
        if isinstance(found, SecureSumResult):
            assert len(found.survivors) == 22
            outcomes.add("exact")
        else:
            assert (found.reason, found.phase, found.have) == (Reason.COHORT_TOO_SMALL, "share", 0)
            outcomes.add("small")
    assert outcomes == {"exact", "small"}
