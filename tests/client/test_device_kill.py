"""A device that is killed while it works, a network that breaks, and a journal that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from mycelia.client import notices
from mycelia.client.device_journal import JOURNAL, JournalError
from mycelia.engine.config import to_toml
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.simulations.preparation import Prepared, prepare
from tests.aggregator.connections import Proxy, run
from tests.client.scripted import RUN, Rig, rig
from tests.client.small_runs import Side, own_data, scenario

pytestmark = pytest.mark.usefixtures("captured_once")

AT = Position(RUN, 0, 0)

CHILD = """
import sys
import numpy as np
from pathlib import Path
from mycelia.client.config import ClientConfig
from mycelia.client import Device
from mycelia.engine.config import load_config
from mycelia.engine.data import Dataset, Examples

toml, data = Path(sys.argv[1]), Path(sys.argv[2])
whole = np.load(data)
parts = [Examples(whole[f"{part}_inputs"], whole[f"{part}_targets"]) for part in ("train", "test")]
Device(load_config(ClientConfig, toml), data=Dataset("own", *parts, 10), listeners=[
    lambda notice: print(type(notice).__name__, flush=True)
], once=True).run()
"""


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(scenario(model={"name": "mlp", "hidden": [400, 400]}))


async def child(server: Rig) -> asyncio.subprocess.Process:
    """Device 1 in a process of its own."""
    data = own_data(server.prepared, 0)
    path = server.folder / "data.npz"
    np.savez(
        path, train_inputs=data.train.inputs, train_targets=data.train.targets,
        test_inputs=data.test.inputs, test_targets=data.test.targets,
    )  # fmt: skip
    toml = server.folder / "client.toml"
    toml.write_text(to_toml(server.config(1)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(toml), str(path), env=env, stdout=asyncio.subprocess.PIPE
    )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def killed(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("after", ["training", "update"])
def test_a_killed_device_goes_on_with_the_same_update(after: str, prepared: Prepared, tmp_path: Path) -> None:
    """Killed in its training it trains again, killed with its update it does not; the bytes are equal."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            message = server.message()
            task = server.task(AT, message)
            server.again = lambda client: server.ask(client, task, message)
            process = await child(server)
            await server.next("ready", skip=("connected",))
            if after == "update":
                _, (_, first) = await server.next("update")
            await killed(process)
            before = dict(server.offers)
            waiting = [path.read_bytes() for path in (tmp_path / "state-1" / "outgoing").glob("*")]
            process = await child(server)
            lines = [await line(process) for _ in range(4)]
            assert lines == ["ConnectedTo", "Started", "Trained", "Uploaded"]
            job = Side.of(prepared, 0, tmp_path / "oracle").job
            expected = b"".join(job.payload(job.train(message)))
            if after == "update":
                assert first == expected
                assert waiting == [expected]
                assert server.offers == before  # hash, header and signature are those of the first time
            else:
                _, (_, second) = await server.next("update", skip=("connected", "ready", "lost"))
                assert second == expected
            server.accept(1, AT)
            server.ask(1, server.task(AT, message, pb.DELIVER), message)
            await process.communicate()
            assert process.returncode == 0
            assert (tmp_path / "out-1" / "model.safetensors").exists()

    run(test())


def test_the_line_breaks_in_the_middle_of_an_upload(prepared: Prepared, tmp_path: Path) -> None:
    """After a reconnect the update goes on where it was; it is the same, and comes once."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            proxy = Proxy(server.port)
            real, server.port = server.port, await proxy.start()
            try:
                message = server.message()
                task = server.task(AT, message)
                async with server.device(1) as (device, running):
                    server.again = lambda client: server.ask(client, task, message)
                    server.ask(1, task, message)
                    await server.next("ready")
                    proxy.cut_up = proxy.up + 2**18
                    _, (_, data) = await server.next("update", skip=("lost", "connected", "ready"))
                    assert len(data) > 2**19
                    assert proxy.connections == 2
                    server.accept(1, AT)
                    server.ask(1, server.task(AT, message, pb.DELIVER), message)
                    await server.next("ready", skip=("connected", "ready", "lost"))
                    device.close()
                    report = await running
                    assert (report.accepted, report.failed) == (1, 0)
                    assert server.told_people(1, notices.Disconnected)
            finally:
                server.port = real
                await proxy.close()

    run(test())


def test_a_device_that_is_offline_trains_on(prepared: Prepared, tmp_path: Path) -> None:
    """The connection breaks as the training begins; the update comes when there is one again."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            proxy = Proxy(server.port)
            server.port = await proxy.start()
            gone = asyncio.Event()
            loop = asyncio.get_running_loop()

            def train(params: Any, buffers: Any, data: Any, settings: Any, round: int) -> Any:
                asyncio.run_coroutine_threadsafe(gone.wait(), loop).result(20)
                return {}, len(data), {}

            async with server.device(1, train=train):
                message = server.message()
                server.ask(1, server.task(AT, message), message)
                await server.next("ready")
                proxy.cut()
                while (await server.heard.get())[0] != "lost":
                    pass
                gone.set()
                await server.next("update", skip=("connected", "ready", "lost"))
                late = AT._replace(round=1)
                server.ask(1, server.task(late, message), message)
                await server.next("ready")
            await proxy.close()

    run(test())


def test_it_ends_in_the_middle_of_its_training(prepared: Prepared, tmp_path: Path) -> None:
    """Told to end it says Bye within seconds, and leaves no work half done."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            local = server.settings.local.model_copy(update={"steps": 6000})
            server.settings = server.settings.model_copy(update={"local": local})
            async with server.device(1) as (device, running):
                message = server.message()
                server.ask(1, server.task(AT, message), message)
                await server.next("ready")
                await asyncio.wait({running}, timeout=0.3)
                device.close()
                async with asyncio.timeout(5):
                    await running
            assert not any((tmp_path / "state-1").glob("outgoing/*"))

    run(test())


@pytest.mark.parametrize("lost", ["journal", "state", "secure sum"])
def test_journal_missing_refuses(lost: str, prepared: Prepared, tmp_path: Path) -> None:
    """An identity that took part, and whose journal is gone, takes part no more; unless it is told to."""

    async def test() -> None:
        async with rig(tmp_path, prepared) as server:
            message = server.message()
            async with server.device(1):
                server.ask(1, server.task(AT, message), message)
                await server.next("update", skip=("ready",))
                server.accept(1, AT)
            state = tmp_path / "state-1"
            if lost == "secure sum":
                (state / "secure-sum.journal").unlink()
            else:
                (state / JOURNAL).unlink()
            config = server.config(1) if lost != "state" else server.config(1, state=str(tmp_path / "new"))
            with pytest.raises(SecureSumError if lost == "secure sum" else JournalError) as caught:
                await server.make(1, config).arun()
            assert "new journal" in caught.value.fix
            async with server.device(1, config=config, new_journal=True):
                server.ask(1, server.task(AT._replace(round=1), message), message)
                await server.next("update", skip=("ready", "connected"))

    run(test())
