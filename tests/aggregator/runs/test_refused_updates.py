"""Updates that are refused: each is named, and counts as a failure of its device alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mycelia.aggregator.log_records import Failed
from mycelia.aggregator.outcomes import DeviceOutcome, outcomes_of
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import check_tensors, read_tensors, write_tensors
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.engine.errors import RoundAborted
from mycelia.engine.recipe import Recipe
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.run_world import (
    Dummy,
    Habits,
    changed,
    expected,
    plan,
    run,
    running,
    serving,
)

TWO_OF_THREE = {"round": {"budget_s": 20.0, "quorum": 0.6}, "rounds": 1}


def _nan(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: tensor.clone() for name, tensor in old.items()}
    next(iter(reversed(new.values()))).view(-1)[0] = math.nan
    return new


def _far(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor + 2000 for name, tensor in old.items()}


@pytest.mark.parametrize(
    ("habits", "reason", "word"),
    [
        pytest.param(lambda: Habits(change=_nan), "NONFINITE", "bias", id="nan"),
        pytest.param(lambda: Habits(change=_far), "BAD_PAYLOAD", "weight", id="too-far"),
        pytest.param(lambda: Habits(weight=10.5), "WEIGHT", "10.5", id="weight-above-the-cap"),
        pytest.param(lambda: Habits(weight=0.0), "WEIGHT", "0.0", id="no-weight"),
        pytest.param(lambda: Habits(weight=math.nan), "WEIGHT", "nan", id="weight-nan"),
        pytest.param(
            lambda: Habits(header=lambda header: changed(header, model_sha256=bytes(32))),
            "STALE_MODEL", "000000", id="another-model",
        ),
        pytest.param(
            lambda: Habits(header=lambda header: changed(header, weights={"other": 1.0})),
            "WEIGHT", "other", id="other-terms",
        ),
        pytest.param(
            lambda: Habits(header=lambda header: changed(header, metrics={"loss_sum": math.inf})),
            "BAD_PAYLOAD", "loss_sum", id="metric-inf",
        ),
        pytest.param(
            lambda: Habits(header=lambda header: changed(header, client=1)),
            "BAD_PAYLOAD", "client 1", id="another-client",
        ),
        pytest.param(
            lambda: Habits(payload=lambda payload: Payload(payload.chunk(0)[:-4])),
            "BAD_PAYLOAD", "", id="size",
        ),
        pytest.param(
            lambda: Habits(payload=lambda payload: Payload(payload.chunk(0).replace(b"F32", b"I32"))),
            "SCHEMA", "", id="dtype",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_and_named(
    people: People, tmp_path: Path, habits: Callable[[], Habits], reason: str, word: str
) -> None:
    made = plan(**TWO_OF_THREE)

    async def go() -> tuple[RunResult, list[DeviceOutcome], list[Dummy]]:
        async with serving(people.world, tmp_path, made) as (server, port):
            each = [None, None, habits()]
            devices = [Dummy(port, *pair) for pair in zip(people.first(3), [made] * 3, each, strict=True)]
            async with running(devices):
                result = (await server.run())["study"]
            return result, outcomes_of(server._store, "study", 0), devices

    result, stored, devices = run(go())
    assert [outcome.status for outcome in stored] == ["ACCEPTED", "ACCEPTED", "REJECTED"]
    assert stored[2].cause == reason
    assert word in f"{stored[2].cause} {stored[2].hint}"
    assert devices[2].reasons() == [reason]
    assert devices[2].outcomes[0].phase in ("", "train")
    assert result.model_sha256 == expected(made, [(1, 2)])
    assert (result.accepted, result.dropped) == (2, 1)


def test_cumulative_counts_refused(people: People, tmp_path: Path) -> None:
    """Counts are of one round: the second round's are refused if they go on from the first's."""
    made = plan(round={"budget_s": 20.0, "quorum": 0.6}, local={"epochs": 1, "batch_size": 5})
    assert (made.most_steps, made.most_examples) == (2, 10)
    sums = {"steps": 0, "examples": 0}

    def add(header: UpdateHeader) -> UpdateHeader:
        sums["steps"] += 2
        sums["examples"] += 10
        return changed(header, steps=sums["steps"], examples=sums["examples"])

    async def go() -> tuple[RunResult, Dummy]:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            devices[2].habits.header = add
            async with running(devices):
                return (await server.run())["study"], devices[2]

    result, device = run(go())
    assert device.reasons() == ["", "WEIGHT"]
    assert "cumulative" in device.outcomes[1].hint
    assert result.model_sha256 == expected(made, [(1, 2, 3), (1, 2)])


def test_zero_total_weight_keeps_model(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1, round={"budget_s": 20.0, "max_failed_rounds": 1})

    async def go() -> tuple[list[Failed], str]:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made, Habits(weight=0.0)) for identity in people.first(3)]
            async with running(devices):
                doing = asyncio.create_task(server.run())
                while not server._router.runs:
                    await asyncio.sleep(0.01)
                one = server._router.runs["study"]
                with pytest.raises(RoundAborted, match="zero_weight"):
                    await doing
            failed = [each for each in one._log.entries() if isinstance(each, Failed)]
            return failed, one.current.values_sha256(made.program)

    failed, model = run(go())
    assert [each.reason for each in failed] == ["zero_weight"]
    assert model == expected(made, [])


def test_same_update_twice_counts_once(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1)

    async def go() -> tuple[RunResult, Dummy]:
        gate = asyncio.Event()
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            devices[2].habits.gate = gate
            async with running(devices):
                doing = asyncio.create_task(server.run())
                for times in (1, 2, 3):
                    while len(devices[0].sent) < times:
                        await asyncio.sleep(0.01)
                    devices[0].answer(devices[0].sent[0], *devices[0].answers[devices[0].sent[0]])
                gate.set()
                return (await doing)["study"], devices[0]

    result, device = run(go())
    assert result.model_sha256 == expected(made, [(1, 2, 3)])
    assert device.reasons() == [""]
    assert result.accepted == 3


@pytest.mark.parametrize("accepted", [False, True], ids=["before-it-is-there", "after-it-was-accepted"])
def test_second_other_update_is_equivocation(people: People, tmp_path: Path, accepted: bool) -> None:
    made = plan(rounds=1)

    async def go() -> tuple[RunResult, Dummy]:
        gate = asyncio.Event()
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            devices[2].habits.gate = gate
            one = devices[0]
            other = Payload(b"".join(write_tensors(made.program.init()[0], made.program.schema, MODEL_ROLES)))

            def both(at: Position, payload: Payload, offer: pb.Offer) -> None:
                if not accepted:
                    one.transport.send_payload(payload, offer)
                    one.habits.weight = 9.0
                    one.transport.send_payload(other, one.offer(at, other))

            if not accepted:
                one.answer = both  # type: ignore[method-assign]
            async with running(devices):
                doing = asyncio.create_task(server.run())
                while not one.sent:
                    await asyncio.sleep(0.01)
                if accepted:
                    one.transport.send_payload(other, one.offer(one.sent[0], other))
                while not one.outcomes:
                    await asyncio.sleep(0.01)
                gate.set()
                return (await doing)["study"], one

    result, device = run(go())
    assert device.reasons() == ["EQUIVOCATION", ""]
    assert result.model_sha256 == expected(made, [(1, 2, 3)])


def test_work_of_other_rounds_is_refused(people: People, tmp_path: Path) -> None:
    """Older: STALE_ROUND; not asked yet: WRONG_PHASE; neither is a failure of the device."""
    made = plan(rounds=2)

    async def go() -> tuple[RunResult, Dummy]:
        gate = asyncio.Event()
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            one, slow = devices[0], devices[2]

            def wait_in_the_second(task: pb.Task) -> None:
                slow.habits.gate = gate if task.at.round == 1 else None

            slow.habits.task = wait_in_the_second
            async with running(devices):
                doing = asyncio.create_task(server.run())
                while len(one.answers) < 2:
                    await asyncio.sleep(0.005)
                first = next(iter(one.tasks))
                payload, _ = one.answers[first]
                later = [first, first._replace(round=5), Position("study", 1, 1), Position("nobody", 0, 0)]
                for at in later:
                    one.tasks.setdefault(at, one.tasks[first])
                    one.plans.setdefault(at.run, made)
                    one.transport.send_payload(payload, one.offer(at, payload))
                while len(one.outcomes) < 5:
                    await asyncio.sleep(0.005)
                gate.set()
                return (await doing)["study"], one

    result, device = run(go())
    assert sorted(device.reasons()[1:5]) == ["STALE_ROUND", "WRONG_PHASE", "WRONG_PHASE", "WRONG_PHASE"]
    assert device.reasons()[0] == device.reasons()[5] == ""
    assert result.model_sha256 == expected(made, [(1, 2, 3)] * 2)


def test_update_of_a_device_that_was_not_asked_is_refused(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1, clients=2)

    async def go() -> tuple[RunResult, Dummy]:
        gate = asyncio.Event()
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            devices[0].habits.gate = devices[1].habits.gate = gate
            async with running(devices[:2]):
                doing = asyncio.create_task(server.run())
                while not devices[0].tasks or not devices[1].tasks:
                    await asyncio.sleep(0.005)
                guest = devices[2]
                async with running([guest]):
                    while not guest.transport.connected:
                        await asyncio.sleep(0.005)
                    at = next(iter(devices[0].tasks))
                    guest.tasks[at] = devices[0].tasks[at]
                    payload = Payload(
                        b"".join(write_tensors(made.program.init()[0], made.program.schema, MODEL_ROLES))
                    )
                    guest.transport.send_payload(payload, guest.offer(at, payload))
                    while not guest.outcomes:
                        await asyncio.sleep(0.005)
                gate.set()
                return (await doing)["study"], guest

    result, guest = run(go())
    assert guest.reasons() == ["WRONG_PHASE"]
    assert result.model_sha256 == expected(made, [(1, 2)])


HALF = Recipe(
    "tests.aggregator.runs.half_models:half", {}, "cross-entropy", (3,), 2,
    (torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)),
)  # fmt: skip


def test_fp16_update_summed_exactly(people: People, tmp_path: Path) -> None:
    """2048 + 1 is 2048 in half precision; the mean of 2048, 1 and 1 is 683.33, which rounds to 683.5."""
    made = plan(rounds=1, recipe=HALF, update={"max_abs": 4096.0, "max_weight": 1.0})
    values = {1: 2048.0, 2: 1.0, 3: 1.0}

    async def go() -> bytes:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            for device in devices:
                device.habits.change = lambda old, to=values[device.client]: {
                    name: torch.full_like(tensor, to) for name, tensor in old.items()
                }
            async with running(devices):
                await server.run()
            return devices[0].delivered["study"]

    model = run(go())
    found = read_tensors(model, check_tensors(model, len(model), made.program.schema, MODEL_ROLES))
    for tensor in found.values():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, torch.full_like(tensor, 683.5))
