"""What holds for every round, whatever happens in it."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mycelia.aggregator.config import RoundConfig
from mycelia.aggregator.effects import Abort, Accept, Configure, Effect, Finish, Merge, Persist, Reject
from mycelia.aggregator.rounds import Round, asked_for, candidates_for, quorum_for
from mycelia.aggregator.updates import Expected, UpdateMeta

BUDGET = 60.0
CLIENTS = st.integers(0, 15)
EXPECTED = Expected(4, 1, "s", 10.0, 100, 10)

CONFIGS = st.builds(
    RoundConfig,
    budget_s=st.just(BUDGET),
    over_select=st.sampled_from([1.0, 1.3, 2.0]),
    quorum=st.sampled_from([0.1, 0.5, 0.8, 1.0]),
    on_failure=st.sampled_from(["drop", "retry", "replace", "abort"]),
    max_attempts=st.integers(1, 3),
    stragglers=st.sampled_from(["discard", "next_round"]),
)


class RoundMachine(RuleBasedStateMachine):
    """Any events in any order, on a clock that mostly runs forwards."""

    @initialize(
        config=CONFIGS,
        k=st.integers(0, 6),
        candidates=st.lists(CLIENTS, unique=True, max_size=12),
        carried=st.dictionaries(CLIENTS, st.integers(1, 2), max_size=2),
        evaluate=st.booleans(),
    )
    def begin(
        self, config: RoundConfig, k: int, candidates: list[int], carried: dict, evaluate: bool
    ) -> None:
        self.config, self.k, self.carried = config, k, carried
        self.now = 0.0
        self.asked: dict[int, list[int]] = {}
        self.accepted: list[int] = []
        self.merges = 0
        self.round = Round(EXPECTED, candidates, k, config, evaluate=evaluate, carried=carried)
        self.take(self.round.start(0.0))

    def take(self, effects: list[Effect]) -> None:
        for position, effect in enumerate(effects):
            before = effects[position - 1] if position else None
            if isinstance(effect, Configure):
                assert before == Persist("issued", effect.clients)
                for client in effect.clients:
                    self.asked.setdefault(client, []).append(effect.attempt)  # type: ignore[arg-type]
            elif isinstance(effect, Accept):
                self.accepted.append(effect.client)  # type: ignore[arg-type]
            elif isinstance(effect, Merge):
                self.merges += 1
                assert before == Persist("frozen", effect.survivors)
                assert list(effect.survivors) == sorted(self.accepted)
            elif isinstance(effect, Finish | Abort):
                assert before == Persist(
                    "finished" if isinstance(effect, Finish) else "failed",
                    effect.survivors if isinstance(effect, Finish) else (),
                )
                assert effect is self.round.result
                assert position == len(effects) - 1

    @rule(step=st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0, 5.0, 20.0, -3.0]))
    def tick(self, step: float) -> None:
        self.now += step
        self.take(self.round.tick(self.now))

    @rule(clients=st.lists(CLIENTS, max_size=5))
    def ready(self, clients: list[int]) -> None:
        self.take(self.round.ready(clients, self.now))

    @rule(
        client=CLIENTS,
        attempt=st.integers(1, 3),
        number=st.sampled_from([4, 4, 4, 4, 3, 5]),
        schema=st.sampled_from(["s", "s", "s", "t"]),
        weight=st.sampled_from([1.0, 10.0, 0.0, 11.0, math.nan]),
    )
    def update(self, **fields: Any) -> None:
        meta = UpdateMeta(
            fields["client"], fields["number"], fields["attempt"], fields["schema"], fields["weight"]
        )
        effects = self.round.update(meta, self.now)
        answers = [e for e in effects if isinstance(e, Accept | Reject) and e.client == meta.client]
        assert len(answers) == 1  # every update is answered, once
        self.take(effects)

    @rule(client=CLIENTS)
    def good_update(self, client: int) -> None:
        attempt = (self.asked.get(client) or [self.carried.get(client, 1)])[-1]
        number = 3 if client in self.carried else 4
        self.take(self.round.update(UpdateMeta(client, number, attempt, "s", 1.0), self.now))

    @rule(client=CLIENTS, attempt=st.integers(1, 3), how=st.sampled_from(["failed", "dropped", "rejected"]))
    def loss(self, client: int, attempt: int, how: str) -> None:
        self.take(getattr(self.round, how)(client, attempt, "boom", self.now))

    @rule()
    def merged(self) -> None:
        self.take(self.round.merged(self.now))

    @rule()
    def evaluated(self) -> None:
        self.take(self.round.evaluated(self.now))

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "round"):
            return
        assert len(self.accepted) <= self.k
        assert len(set(self.accepted)) == len(self.accepted)
        assert set(self.accepted) <= set(self.asked) | set(self.carried)
        assert self.merges <= 1
        assert len(self.asked) <= candidates_for(self.k, self.config)
        for client, attempts in self.asked.items():
            assert client not in self.carried
            assert attempts == list(range(1, len(attempts) + 1))
            assert len(attempts) <= self.config.max_attempts
        if self.round.phase in {"configure", "train"}:
            assert self.round.needed == self.k - len(self.accepted) > 0
        else:
            assert self.round.needed == 0
        if self.round.result is None:
            assert self.round.deadline <= BUDGET

    def teardown(self) -> None:
        if not hasattr(self, "round"):
            return
        self.take(self.round.tick(10 * BUDGET))  # the clock has stood still where it ran backwards
        result = self.round.result
        assert result is not None
        assert self.round.deadline == math.inf
        clients = [outcome.client for outcome in result.outcomes]
        assert clients == sorted(set(clients))
        accepted = [outcome.client for outcome in result.outcomes if outcome.status == "accepted"]
        assert accepted == sorted(self.accepted)
        if not isinstance(result, Abort) or result.phase != "select":
            assert set(clients) == set(self.asked) | set(self.carried)
        if isinstance(result, Finish):
            assert list(result.survivors) == accepted
            assert len(accepted) >= quorum_for(self.k, self.config)
        else:
            assert result.reason.replace("_", " ") in str(result.error())


RoundMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_course_of_events = RoundMachine.TestCase


@given(
    fates=st.lists(
        st.sampled_from(["ok", "fails", "drops", "nan", "twice", "stale"]), min_size=1, max_size=8
    ),
    config=CONFIGS.filter(lambda config: config.on_failure in {"drop", "retry"}),
    data=st.data(),
)
def test_the_order_of_events_at_one_time_changes_nothing(
    fates: list[str], config: RoundConfig, data: Any
) -> None:
    config = config.model_copy(update={"over_select": 1.0})

    def play(order: list[int]) -> Finish | Abort:
        k = len(fates)
        machine = Round(EXPECTED, range(k), k, config)
        machine.start(0.0)
        assert asked_for(k, config) == k
        for client in order:
            fate, good = fates[client], UpdateMeta(client, 4, 1, "s", 1.0)
            if fate in {"fails", "drops"}:
                lose = machine.failed if fate == "fails" else machine.dropped
                for attempt in range(1, 4):
                    lose(client, attempt, "boom", 1.0)
            elif fate == "nan":
                machine.update(good._replace(non_finite="w"), 1.0)
            elif fate == "stale":
                machine.update(good._replace(round=3), 1.0)
            else:
                machine.update(good, 1.0)
                if fate == "twice":
                    machine.update(good, 1.0)
        machine.tick(BUDGET * 0.9)
        machine.merged(BUDGET * 0.9)
        machine.evaluated(BUDGET * 0.9)
        assert machine.result is not None
        return machine.result

    first, second = play(list(range(len(fates)))), play(data.draw(st.permutations(range(len(fates)))))
    assert type(first) is type(second)
    assert first.outcomes == second.outcomes
    if isinstance(first, Abort) and isinstance(second, Abort):
        assert (first.reason, first.have, first.phase) == (second.reason, second.have, second.phase)
