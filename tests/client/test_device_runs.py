"""What goes on over the rounds of a run: states, privacy that is spent, renewed keys, an end by itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.x509 import load_der_x509_csr
from safetensors.torch import load

from mycelia.aggregator.identity_certificates import client_certificate
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.client import notices
from mycelia.client.device_journal import DeviceJournal
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.certificates import DAY, tls_sha256
from mycelia.privacy.secagg.private_keys import certificate_pem
from mycelia.privacy.secagg.roster import Roster
from mycelia.simulations.preparation import Prepared, prepare
from tests.aggregator.connections import NOW, run
from tests.client.scripted import RUN, rig
from tests.client.small_runs import Side, scenario

pytestmark = pytest.mark.usefixtures("captured_once")

AT = Position(RUN, 0, 0)
UNIFORM = {"name": "fedavg", "weighting": "uniform"}
CLIP = {"name": "abadi", "bound": 0.5}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(scenario())


@pytest.mark.parametrize("algorithm", ["scaffold", "local-only"])
def test_states_last_from_round_to_round(algorithm: str, tmp_path: Path) -> None:
    """Also over a restart; and what a refused update left is forgotten."""
    stateful = prepare(scenario(algorithm=algorithm))

    async def test() -> None:
        async with rig(tmp_path, stateful) as server:
            job = Side.of(stateful, 0, tmp_path / "oracle").job
            for round in range(3):
                at, message = AT._replace(round=round), server.message(round)
                async with server.device(1):
                    server.ask(1, server.task(at, message), message)
                    _, (_, data) = await server.next("update", skip=("ready", "lost"))
                    result = job.train(message)
                    assert data == b"".join(job.payload(result))
                    if round == 1:
                        server.refuse(1, at, Problem(Reason.ROUND_ABORTED, "too few"))
                    else:
                        job.remember(round, result)
                        server.accept(1, at)
                    server.ask(1, server.task(at, message, pb.DELIVER), message)
                    await server.next("ready", skip=("lost",))
            personal = tmp_path / "out-1" / "personal.safetensors"
            assert personal.exists() == (algorithm == "local-only")
            if personal.exists():
                mine = job.personal(job.message(server.payloads(message)[0].data, None, 2))
                assert mine is not None
                assert (whole := b"".join(mine)) == personal.read_bytes()
                assert load(whole).keys() == {entry.name for entry in stateful.program.schema}

    run(test())


def test_noise_of_its_own_is_the_systems_and_is_paid_for(tmp_path: Path) -> None:
    """Each round is in the ledger before it leaves, and the owner's budget stops where the run's does not."""
    private = prepare(
        scenario(
            algorithm=UNIFORM,
            privacy={
                "unit": "client", "model": "local", "epsilon": 40.0, "delta": 1e-4, "clip": CLIP,
                "noise_multiplier": 1.0, "noise_source": "os",
            },
        )
    )  # fmt: skip

    async def test() -> None:
        async with rig(tmp_path, private) as server:
            config = server.config(1, policy={"limits": {"epsilon": 40.0, "delta": 1e-3}})
            async with server.device(1, config=config) as (device, _):
                epsilons, payloads = [], []
                message = server.message()
                for round in range(2):
                    at = AT._replace(round=round)
                    server.ask(1, server.task(at, message), message)
                    _, (_, data) = await server.next("update", skip=("ready",))
                    payloads.append(data)
                    server.accept(1, at)
                    (spent,) = device._desk.journal.spent("own:1")
                    epsilons.append(spent.epsilon)
                    assert spent.delta == 1e-4
                assert 0 < epsilons[0] < epsilons[1] < 40
                assert payloads[0] != payloads[1]
                seeded = Side.of(private, 0, tmp_path / "oracle").job
                assert b"".join(seeded.payload(seeded.train(message))) != payloads[0]
                key = tmp_path / "state-1" / "noise.key"
                assert key.stat().st_mode & 0o777 == 0o600
                another = Position("another", 0, 0)  # a second run on the same data
                server.ask(1, server.task(another, message), message)
                _, decline = await server.next("decline")
                assert decline.field == "limits.epsilon"

    run(test())


def test_the_budget_is_looked_at_again_before_a_release(tmp_path: Path) -> None:
    private = prepare(
        scenario(
            algorithm=UNIFORM,
            privacy={
                "unit": "client", "model": "local", "epsilon": 40.0, "delta": 1e-4, "clip": CLIP,
                "noise_multiplier": 1.0, "participation": {"uses": 1},
            },
        )
    )  # fmt: skip

    async def test() -> None:
        async with rig(tmp_path, private) as server, server.device(1) as (device, _):
            message = server.message()
            server.ask(1, server.task(AT, message), message)
            await server.next("update", skip=("ready",))
            server.accept(1, AT)
            later = AT._replace(round=1)
            server.ask(1, server.task(later, message), message)
            _, decline = await server.next("decline", skip=("ready",))
            assert (decline.at, decline.field) == (later.to_wire(), "limits.epsilon")
            assert len(device._desk.journal.spent("own:1")) == 1

    run(test())


def test_seeded_noise_is_no_promise(tmp_path: Path) -> None:
    private = prepare(
        scenario(algorithm=UNIFORM, privacy={"unit": "client", "epsilon": 4.0, "delta": 1e-4, "clip": CLIP})
    )

    async def test() -> None:
        async with rig(tmp_path, private) as server:
            config = server.config(1, policy={"limits": {"epsilon": 10.0, "delta": 1e-2}})
            async with server.device(1, config=config):
                message = server.message()
                server.ask(1, server.task(AT, message), message)
                _, decline = await server.next("decline")
                assert (decline.field, decline.asked) == ("limits.epsilon", "no bound")

    run(test())


def test_keys_are_renewed_between_two_rounds(prepared: Prepared, tmp_path: Path) -> None:
    """When it is time, but not while there is work; then the device is here with the new ones."""
    later = 25 * DAY

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            entry = server.world.clients[1]
            made = server.make(1, wall=lambda: time.time() + later)
            running = asyncio.create_task(made.arun())
            await server.next("connected")
            _, asked = await server.next("renew")
            public = load_der_x509_csr(asked.request).public_key()
            assert isinstance(public, EllipticCurvePublicKey)
            until = NOW + 60 * DAY
            der = client_certificate(server.world.operator, 1, public, NOW - DAY, until)
            newer = replace(
                entry, identity_key=asked.identity_key, tls_sha256=tls_sha256(public), not_after=until
            )
            server.world.epoch = 2
            both = Roster(2, until, (entry, newer), (server.world.server,)).sign(server.world.operator)
            server.service.renew_roster(both)
            renewed = pb.Renewed(
                certificate=certificate_pem(der), roster_epoch=2, roster_sha256=bytes(32), roster=both
            )
            server.service.push(1, pb.ServerFrame(renewed=renewed))
            assert (await server.next("connected", skip=("lost", "renew")))[1] == newer
            message = server.message()
            server.ask(1, server.task(AT, message), message)
            await server.next("update", skip=("ready",))
            made.close()
            await running
            assert server.told_people(1, notices.KeysRenewed) == [notices.KeysRenewed(until)]

    run(test())


def test_it_ends_by_itself_when_the_run_is_over(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1, once=True) as (_, running):
            message = server.message()
            server.ask(1, server.task(AT, message, pb.DELIVER), message)
            await server.next("ready")
            report = await running
            assert report.delivered[RUN].model == tmp_path / "out-1" / "model.safetensors"

    run(test())


def test_work_of_another_kind_is_declined(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1) as (_, running):
            message = server.message()
            server.ask(1, server.task(AT, message, pb.DESCRIBE), message)
            assert (await server.next("decline"))[1].reason.startswith("WRONG_PHASE")
            assert not running.done()

    run(test())


def test_a_journal_that_was_only_looked_at_is_a_new_one(prepared: Prepared, tmp_path: Path) -> None:
    """Nothing was joined with it, so there is no journal of secure sums to miss."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            config = server.config(1)
            DeviceJournal.open(config.state, config.identity).close()
            async with server.device(1):
                pass
            assert (config.state / "secure-sum.journal").exists()

    run(test())


def test_another_process_has_the_identity(prepared: Prepared, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(tmp_path, prepared) as server, server.device(1):
            with pytest.raises(Exception, match="another process"):
                await server.make(1).arun()

    run(test())


def test_own_training_does_not_stand_in_for_more(tmp_path: Path) -> None:
    """A function of one's own is refused where an algorithm, or privacy, is in the steps."""

    def own(*given: Any) -> Any:
        raise AssertionError

    for given in (
        {"algorithm": "scaffold"},
        {"algorithm": "fedprox"},
        {"algorithm": "local-only"},
        {"algorithm": UNIFORM, "privacy": {"unit": "example", "epsilon": 9.0, "delta": 1e-4, "clip": CLIP}},
    ):
        with pytest.raises(ConfigError, match="own"):
            Side.of(prepare(scenario(**given)), 0, tmp_path, train=own)
