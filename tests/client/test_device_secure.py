"""Devices in secure sums: real machines on both sides, real streams between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.settings import rounding_stream, sent_sha256, task_sha256
from mycelia.client import notices
from mycelia.client.journal import ClientJournal
from mycelia.engine.algorithms import Message
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.events import Abort, ChunkReceived, Effect, Finish, Received, Send, Tick
from mycelia.privacy.secagg.round_config import RoundConfig
from mycelia.simulations.preparation import Prepared, prepare
from tests.aggregator.connections import Proxy, run
from tests.client.scripted import RUN, Rig, rig
from tests.client.small_runs import Side, scenario

pytestmark = pytest.mark.usefixtures("captured_once")

AT = Position(RUN, 0, 0)
CLIENTS = (1, 2, 3)


def three(**changes: Any) -> Prepared:
    return prepare(
        scenario(
            cohort=3, population={"clients": 3, "examples_per_client": 20},
            secure_sum={"corrupt": 0.0, "dropout": 0.0}, **changes,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return three()


class Sum:
    """One session, driven by the test."""

    def __init__(self, server: Rig, at: Position, message: Message) -> None:
        self.server, self.at, self.message = server, at, message
        plan = server.prepared.secure
        assert plan is not None
        self.plan = plan
        server.settings = server.settings.model_copy(update={"packing": plan.packing})
        task = server.task(at, message)
        self.config: RoundConfig = plan.settings.round_config(
            job=at.run, round=at.round, attempt=at.attempt, nonce=os.urandom(32),
            model_sha256=sent_sha256(task), schema_sha256=task.schema_sha256, task_sha256=task_sha256(task),
            roster_sha256=server.service.roster.sha256, size=plan.quantise.size, clients=len(CLIENTS),
            slots=plan.quantise.bounds,
        )  # fmt: skip
        self.machine = SecureSumServer(
            self.config, plan.quantise.size, CLIENTS, server.world.keys.identity, server.service.roster,
            unix_time=int(time.time()),
        )  # fmt: skip
        self.phases: list[str] = []
        self.last: dict[int, bytes] = {}
        self.before: Callable[[str, int], None] = lambda what, client: None

    def again(self, client: int) -> None:
        """What a device was sent last; servers send it once more when it is back."""
        if client in self.last:
            frame = pb.ServerFrame(secagg=pb.SecAgg(at=self.at.to_wire(), data=self.last[client]))
            self.server.service.push(client, frame)

    async def go(self) -> ServerResult | SecureSumError:
        found = self.carry_out(self.machine.handle(Tick(0.0)))
        while found is None:
            client, what = await self.server.next("secagg", "masked", skip=("lost", "connected"))
            if isinstance(what, pb.SecAgg):
                assert Position.of(what.at) == self.at
                self.before("secagg", client)
                found = self.carry_out(self.machine.handle(Received(client, what.data)))
            else:
                self.before("masked", client)
                _, data = what
                size = 2**20 - 2**20 % self.config.bits
                for number, start in enumerate(range(0, len(data), size)):
                    part = memoryview(data)[start : start + size]
                    found = found or self.carry_out(self.machine.handle(ChunkReceived(client, number, part)))
        return found

    def carry_out(self, effects: list[Effect]) -> ServerResult | SecureSumError | None:
        found: ServerResult | SecureSumError | None = None
        for effect in effects:
            match effect:
                case Send(to, data) if self.machine.phase == "advertise":
                    task = self.server.task(self.at, self.message, secure_sum=data)
                    self.server.ask(to, task, self.message)
                case Send(to, data):
                    self.last[to] = data
                    self.again(to)
                case Finish(result):
                    found = result
                case Abort(error):
                    found = error
                case _:
                    pass
        return found


def expected_total(server: Rig, total: Sum, folder: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the sum has to be: each device's update, encoded without masks, added up as whole numbers."""
    encoding = Encoding(total.config, total.plan.quantise.size)
    sums = np.zeros(total.config.length, np.int64)
    for client in CLIENTS:
        job = Side.of(server.prepared, client - 1, folder / f"oracle-{client}").job
        vector, weight, slots = job.packed(job.train(total.message))
        rounding = rounding_stream(server.settings.seed, total.at.round, client)
        words = encoding.encode(vector, weight, slots, client=client, rounding=rounding)
        sums += encoding.integers(words)
    return sums


def test_a_whole_session_of_three_devices(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared, CLIENTS) as server:
            async with server.device(1), server.device(2), server.device(3):
                total = Sum(server, AT, server.message())
                result = await total.go()
                assert isinstance(result, ServerResult), result
                assert result.survivors == CLIENTS
                found = [result.decoded.weight, *result.decoded.slots.values()]
                whole = expected_total(server, total, tmp_path)
                assert whole[: len(found)].tolist() == found
                assert np.array_equal(whole[len(found) :], result.decoded.total)
                for client in CLIENTS:
                    server.accept(client, AT)
                    server.ask(client, server.task(AT, total.message, pb.DELIVER), total.message)
                for _ in CLIENTS:
                    await server.next("ready", skip=("secagg",))
            for client in CLIENTS:
                kinds = [type(notice) for notice in server.notices[client]]
                assert kinds == [
                    notices.ConnectedTo, notices.Started, notices.Trained, notices.Uploaded,
                    notices.Accepted, notices.Delivered,
                ]  # fmt: skip
                uploaded = server.told_people(client, notices.Uploaded)[0]
                assert (uploaded.masked, uploaded.size) == (True, total.config.upload_bytes)
                journal = ClientJournal.open(tmp_path / f"state-{client}" / "secure-sum.journal")
                assert journal.history.rounds == {(RUN, 0)}
                journal.close()

    run(test())


@pytest.mark.parametrize("when", ["secagg", "masked"])
def test_the_line_breaks_in_a_session(when: str, prepared: Prepared, tmp_path: Path) -> None:
    """The device is back before the phase ends, answers once more, and is in the sum once."""

    async def test() -> None:
        async with rig(tmp_path, prepared, CLIENTS) as server:
            proxy = Proxy(server.port)
            near = f"127.0.0.1:{await proxy.start()}"
            one = server.config(1, server=[near])
            async with server.device(1, config=one), server.device(2), server.device(3):
                total = Sum(server, AT, server.message())
                cut = []

                def before(what: str, client: int) -> None:
                    if client == 1 and what == when and not cut:
                        cut.append(client)
                        proxy.cut()

                total.before, server.again = before, total.again
                result = await total.go()
                assert isinstance(result, ServerResult), result
                assert cut
                assert result.survivors == CLIENTS
                whole = expected_total(server, total, tmp_path)
                assert np.array_equal(whole[len(total.config.slots) :], result.decoded.total)
            await proxy.close()

    run(test())


def test_a_second_attempt_is_not_trained_again(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            rig(tmp_path, prepared, CLIENTS) as server,
            server.device(1),
            server.device(2),
            server.device(3),
        ):
            message = server.message()
            first = Sum(server, AT, message)
            first.carry_out(first.machine.handle(Tick(0.0)))
            for _ in CLIENTS:
                await server.next("secagg")  # everybody has advertised; the attempt ends here
            second = Sum(server, AT._replace(attempt=1), message)
            result = await second.go()
            assert isinstance(result, ServerResult), result
            whole = expected_total(server, second, tmp_path)
            assert np.array_equal(whole[len(second.config.slots) :], result.decoded.total)
            for client in CLIENTS:
                server.accept(client, second.at)
                server.ask(client, server.task(second.at, message, pb.DELIVER), message)
            for _ in CLIENTS:
                await server.next("ready", skip=("secagg",))

    run(test())


def test_the_noise_that_is_promised_has_to_be_in_the_sum(prepared: Prepared, tmp_path: Path) -> None:
    """A server that names shares of noise in the settings and none in the sum is refused, and the reverse."""
    noisy = three(
        algorithm={"name": "fedavg", "weighting": "uniform"},
        privacy={
            "unit": "client", "model": "distributed", "epsilon": 50.0, "delta": 1e-3,
            "clip": {"name": "abadi", "bound": 0.5},
        },
    )  # fmt: skip

    async def test() -> None:
        async with rig(tmp_path, noisy, CLIENTS) as server, server.device(1):
            message = server.message()
            plain = server.settings.model_copy(update={"packing": None})
            server.ask(1, server.task(AT, message, settings=plain.encode()), message)
            _, decline = await server.next("decline")
            assert decline.field == "secure_sum"
            total = Sum(server, AT, message)
            server.settings = server.settings.model_copy(update={"privacy": None})
            total.carry_out(total.machine.handle(Tick(0.0)))
            _, decline = await server.next("decline")
            assert decline.field == "noise"

    run(test())


def test_a_private_sum_is_paid_for_before_it_opens(tmp_path: Path) -> None:
    private = three(
        algorithm={"name": "fedavg", "weighting": "uniform"},
        privacy={
            "unit": "client", "model": "distributed", "epsilon": 50.0, "delta": 1e-3, "noise_source": "os",
            "clip": {"name": "abadi", "bound": 0.5},
        },
    )  # fmt: skip
    limits = {"limits": {"epsilon": 60.0, "delta": 1e-2}}

    async def test() -> None:
        async with rig(tmp_path, private, CLIENTS) as server:
            one, two, three = (server.config(client, policy=limits) for client in CLIENTS)
            async with (
                server.device(1, config=one) as (device, _),
                server.device(2, config=two),
                server.device(3, config=three),
            ):
                total = Sum(server, AT, server.message())
                result = await total.go()
                assert isinstance(result, ServerResult), result
                spent = device._desk.journal.spent("own:1")
                assert [(each.run, each.epsilon, each.delta) for each in spent] == [(RUN, 50.0, 1e-3)]

    run(test())


def test_a_message_above_a_frame_comes_as_a_payload(prepared: Prepared, tmp_path: Path) -> None:
    """An envelope that is offered is what the machine gets; one that is none ends nothing."""

    async def test() -> None:
        async with (
            rig(tmp_path, prepared, CLIENTS) as server,
            server.device(1),
            server.device(2),
            server.device(3) as (_device, running),
        ):
            total = Sum(server, AT, server.message())
            total.carry_out(total.machine.handle(Tick(0.0)))
            adverts = [await server.next("secagg") for _ in CLIENTS]
            rolls = [
                effect
                for client, advert in adverts
                for effect in total.machine.handle(Received(client, advert.data))
                if isinstance(effect, Send)
            ]
            for roll in rolls:
                payload = Payload(roll.data)
                server.service.send_payload(roll.to, payload, payload.offer(pb.ENVELOPE, AT))
            for _ in CLIENTS:
                client, shares = await server.next("secagg")
                assert not [
                    effect
                    for effect in total.machine.handle(Received(client, shares.data))
                    if isinstance(effect, Abort)
                ]
            assert total.machine.phase == "masked"
            assert not running.done()

    run(test())
