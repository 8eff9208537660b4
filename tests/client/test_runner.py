"""Devices from their start to their end, against a real server over real TLS whose words a test speaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.metrics import MetricsReport
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.client import notices
from mycelia.simulations.preparation import Prepared, prepare
from tests.aggregator.connections import run
from tests.client.scripted import RUN, Rig, rig
from tests.client.small_runs import Side, scenario

pytestmark = pytest.mark.usefixtures("captured_once")

AT = Position(RUN, 0, 0)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(scenario())


def header_of(server: Rig, client: int, offer: pb.Offer) -> UpdateHeader:
    key = server.world.clients[client].identity_key
    return UpdateHeader.verified(
        offer.header, offer.signature, key=key, client=client, at=Position.of(offer.at), sha256=offer.sha256
    )


def test_a_whole_plain_round(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1) as (device, running):
            message = server.message()
            task = server.task(AT, message)
            server.ask(1, task, message)
            assert (await server.next("ready"))[1].at == AT.to_wire()
            _, (offer, data) = await server.next("update")
            header = header_of(server, 1, offer)
            job = Side.of(prepared, 0, tmp_path / "oracle").job
            expected = job.train(message)
            assert data == b"".join(job.payload(expected))
            assert header.weights == expected.weights
            assert header.metrics == {n: expected.number(n) for n in ("loss_sum", "examples", "steps")}
            assert header.model_sha256 == task.model_sha256
            assert offer.schema_sha256 == task.schema_sha256
            server.accept(1, AT)
            server.ask(1, server.task(AT, message, pb.DELIVER), message)
            await server.next("ready")
            device.close()
            report = await running
            assert (report.accepted, report.failed, report.bytes_up) == (1, 0, len(data))
            kinds = [type(notice) for notice in server.notices[1]]
            assert kinds == [
                notices.ConnectedTo, notices.Started, notices.Trained, notices.Uploaded, notices.Accepted,
                notices.Delivered,
            ]  # fmt: skip
            model = (tmp_path / "out-1" / "model.safetensors").read_bytes()
            assert model == server.payloads(message)[0].data

    run(test())


def test_it_measures_the_model_on_its_own_test_examples(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1):
            message = server.message()
            task = server.task(AT, message, pb.EVALUATE)
            server.ask(1, task, message)
            _, (offer, data) = await server.next("metrics")
            key = server.world.clients[1].identity_key
            report = MetricsReport.verified(data, offer.signature, key=key, client=1, at=AT)
            own = Side.of(prepared, 0, tmp_path / "oracle").job
            assert (report.examples, dict(report.values)) == own.evaluate(message)
            assert report.examples == len(prepared.partition.test_indices(0)) > 0
            assert report.model_sha256 == task.model_sha256
            server.accept(1, AT)

    run(test())


@pytest.mark.parametrize(
    ("policy", "changes", "field"),
    [
        ({"purposes": ["another"]}, {}, "purposes"),
        ({"algorithms": ["fedprox"]}, {}, "algorithms"),
        ({"secure_sum": "required"}, {}, "secure_sum"),
        ({"min_cohort": 7}, {}, "min_cohort"),
        ({"limits": {"local_epochs": 1}}, {}, "limits.local_epochs"),
        ({"limits": {"epsilon": 1.0, "delta": 1e-5}}, {}, "limits.epsilon"),
        ({"limits": {"rounds_total": 0}}, {}, "limits.rounds_total"),
        ({"limits": {"upload_mb_per_day": 0.001}}, {}, "limits.upload_mb_per_day"),
        ({"datasets": []}, {}, "datasets"),
        ({}, {"schema_sha256": bytes(32)}, "schema"),
    ],
)
def test_policy_cannot_be_loosened_by_server(
    policy: dict[str, object], changes: dict[str, object], field: str, prepared: Prepared, tmp_path: Path
) -> None:
    """What the owner does not allow is declined, is not trained, and does not end the device."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            config = server.config(1, policy=policy)
            async with server.device(1, config=config) as (device, running):
                message = server.message()
                server.ask(1, server.task(AT, message, **changes), message)
                _, decline = await server.next("decline")
                assert (decline.at, decline.field) == (AT.to_wire(), field)
                assert decline.asked
                assert decline.allowed
                declined = server.told_people(1, notices.Declined)
                assert [notice.field for notice in declined] == [field]
                assert not server.told_people(1, notices.Trained)
                assert not running.done()
                assert device.report.declined == 1

    run(test())


def test_a_loss_that_is_code_is_not_run_on_the_word_of_a_server(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1):
            message = server.message()
            for loss, algorithm in (("os:getcwd", "fedavg"), ("cross-entropy", "os:getcwd")):
                named = type(server.settings.algorithm)(name=algorithm)
                changed = server.settings.model_copy(update={"loss": loss, "algorithm": named})
                server.ask(1, server.task(AT, message, settings=changed.encode()), message)
                _, decline = await server.next("decline")
                assert decline.field in ("loss", "algorithms")

    run(test())


def test_an_error_of_its_own_says_nothing_of_the_data(prepared: Prepared, tmp_path: Path) -> None:
    def broken(*given: object) -> None:
        raise ValueError("row 17 is Ada Lovelace")

    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1, train=broken) as (_, running):
            message = server.message()
            server.ask(1, server.task(AT, message), message)
            _, decline = await server.next("decline", skip=("ready",))
            assert decline.field == ""
            assert decline.reason.startswith("failed: ")
            assert "Ada" not in decline.reason
            (notice,) = server.told_people(1, notices.Failed)
            assert "Ada Lovelace" in notice.hint
            assert not running.done()

    run(test())


def test_a_users_own_training_function(prepared: Prepared, tmp_path: Path) -> None:
    def train(params, buffers, data, settings, round):  # type: ignore[no-untyped-def]
        assert set(params) == {entry.name for entry in prepared.program.schema}
        assert len(data) == len(prepared.partition.indices(0))
        return {name: tensor + 0.25 for name, tensor in params.items()}, len(data), {"loss_sum": 3.0}

    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1, train=train):
            message = server.message()
            server.ask(1, server.task(AT, message), message)
            _, (offer, data) = await server.next("update", skip=("ready",))
            header = header_of(server, 1, offer)
            moved = {
                name: tensor + 0.25 for name, tensor in prepared.program.unflatten(message.vector).items()
            }
            whole = message.__class__(prepared.program.flatten(moved), {}, {}, 0)
            assert data == server.payloads(whole)[0].data
            assert header.metrics["loss_sum"] == 3.0
            assert header.weight == len(prepared.partition.indices(0))
            server.accept(1, AT)

    run(test())


def test_an_update_that_is_refused_and_the_next_round(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1) as (device, running):
            message = server.message()
            late = Problem(Reason.LATE, "the round is over")
            for round in range(3):
                at = AT._replace(round=round)
                server.ask(1, server.task(at, message), message)
                await server.next("update", skip=("ready",))
                if round < 2:
                    server.refuse(1, at, late)
                else:
                    server.accept(1, at)
            server.ask(1, server.task(at, message, pb.DELIVER), message)
            await server.next("ready")
            device.close()
            report = await running
            assert (report.accepted, report.failed) == (1, 2)
            assert {notice.reason for notice in server.told_people(1, notices.Failed)} == {"LATE"}
            assert not list((tmp_path / "state-1" / "outgoing").iterdir())

    run(test())


def test_a_round_that_ended_before_the_training(prepared: Prepared, tmp_path: Path) -> None:
    """The outcome comes while the device trains; the next task is taken."""
    began = asyncio.Event()

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def slow(params, buffers, data, settings, round):  # type: ignore[no-untyped-def]
            loop.call_soon_threadsafe(began.set)
            return {}, len(data), {}

        async with rig(tmp_path, prepared) as server, server.device(1, train=slow):
            message = server.message()
            server.ask(1, server.task(AT, message), message)
            server.refuse(1, AT, Problem(Reason.ROUND_ABORTED, "too few"))
            later = AT._replace(round=1)
            server.ask(1, server.task(later, message), message)
            _, (offer, _) = await server.next("update", skip=("ready", "decline"))
            while Position.of(offer.at) != later:
                _, (offer, _) = await server.next("update", skip=("ready", "decline"))
            server.accept(1, later)
            assert server.told_people(1, notices.Failed)[0].at == AT

    run(test())


def test_old_work_is_not_done_again(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1):
            message = server.message()
            at = AT._replace(round=3)
            server.ask(1, server.task(at, message), message)
            await server.next("update", skip=("ready",))
            server.accept(1, at)
            for stale in (at, AT):
                server.ask(1, server.task(stale, message), message)
                _, decline = await server.next("decline")
                assert decline.reason.startswith("STALE_ROUND")

    run(test())
