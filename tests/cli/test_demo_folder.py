"""The demo's folder: what is in it, a second run, crashes, and folders of others."""

from __future__ import annotations

import json
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.identity import ServerKeys, check_client
from mycelia.aggregator.identity_authority import Authority
from mycelia.aggregator.server_config import load_server_config
from mycelia.cli.demo_folder import Demo, find_demo, make_demo
from mycelia.client.config import load_client_config
from mycelia.client.identity import DeviceIdentity
from mycelia.engine.data import load
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg import key_files
from mycelia.simulations import load_scenario
from tests.cli.command_line import mycelia

NOW = int(time.time())
DAY = 86_400


def check(demo: Demo, now: int = NOW) -> None:
    """All that a server and its devices need is there, and belongs together."""
    assert find_demo(demo.folder) == demo
    server = load_server_config(demo.server)
    with Authority.open(demo.folder / "operator") as ca:
        roster, operator = ca.roster, ca.operator
    assert Path(server.server.roster).read_bytes()
    ServerKeys.open(Path(server.server.keys), now).check(roster, now)
    for client, path in enumerate(demo.clients, 1):
        config = load_client_config(path)
        assert config.server == (server.server.listen,)
        with DeviceIdentity.open(config.identity) as device:
            keys = device.check(now)
            assert check_client(keys.certificate.der, roster, operator.key, now).client == client


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("demo") / "mycelia-demo")


def test_a_folder_for_three(made: Demo) -> None:
    check(made)
    assert len(made.clients) == 3
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    before = content(made.folder)
    assert make_demo(made.folder) == made
    assert content(made.folder) == before  # nothing is written anew
    assert not list(made.folder.parent.glob("*.old-*"))


def test_it_is_the_federation_of_the_scenario(made: Demo) -> None:
    scenario, server = load_scenario("demo"), load_server_config(made.server)
    for name in set(FederationConfig.model_fields) - {"round"}:
        assert getattr(server, name) == getattr(scenario, name), name
    assert server.round.model_dump() == scenario.round.model_dump()
    assert (server.run.population, server.server.operator, server.server.enrol_listen) == (3, None, None)
    assert server.max_weight == scenario.update.max_weight > 0


def test_devices_hold_what_the_clients_of_the_scenario_hold(made: Demo) -> None:
    scenario = load_scenario("demo")
    whole = load("digits")
    partition = scenario.populate(whole.train).partition
    for client, path in enumerate(made.clients):
        config = load_client_config(path)
        dataset = load(config.data.name, **config.data.options)
        assert dataset.train.sha256 == whole.train.take(partition.indices(client)).sha256
        assert dataset.test.sha256 == whole.test.sha256
        assert dataset.classes == 10
        assert (config.model, config.loss) == (scenario.model, None)
        assert config.policy.issuer == "any"
        assert config.policy.secure_sum == "required"


def test_other_numbers(tmp_path: Path) -> None:
    first = make_demo(tmp_path / "demo")
    keys = (tmp_path / "demo/identity-1/tls-1.crt").read_bytes()
    data = (tmp_path / "demo/data-1.npz").read_bytes()
    other = make_demo(tmp_path / "demo", clients=4, seed=7, port=9000)
    check(other)
    assert (tmp_path / "demo/identity-1/tls-1.crt").read_bytes() == keys
    assert (tmp_path / "demo/data-1.npz").read_bytes() != data
    server = load_server_config(other.server)
    assert (server.seed, server.cohort, server.server.listen) == (7, 4, "127.0.0.1:9000")
    assert server.run.name != "demo"  # another federation is another run
    assert make_demo(tmp_path / "demo") == first
    check(first)
    assert (tmp_path / "demo/data-1.npz").read_bytes() == data
    for wrong in ({"clients": 2}, {"clients": 21}, {"seed": -1}, {"port": 0}):
        with pytest.raises(ConfigError):
            make_demo(tmp_path / "demo", **wrong)


def test_a_crash_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before any of the files is written, the next run makes all that is missing."""
    left = 0
    write = key_files.write_whole

    def crash(path: Path, data: bytes, *, mode: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write(path, data, mode=mode)

    for writes in range(100):
        left, folder = writes, tmp_path / f"demo-{writes}"
        with monkeypatch.context() as patch:
            patch.setattr(key_files, "write_whole", crash)
            with suppress(KeyboardInterrupt):
                make_demo(folder, now=NOW)
        if left >= 0:
            break
        assert find_demo(folder) is None
        check(make_demo(folder, now=NOW))
    assert 30 < writes < 99


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/thesis.tex").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(DataError, match="something else"):
        make_demo(tmp_path / "demo")
    assert content(tmp_path) == before
    with pytest.raises(DataError, match="cannot be used"):
        make_demo(tmp_path / "demo/thesis.tex")
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "damage",
    [
        "operator/operator.pub", "operator/roster.bin", "server-keys/tls.crt", "server-keys/identity.key",
        "identity-2/tls-1.crt", "identity-2/operator.pub",
    ],
)  # fmt: skip
def test_a_folder_that_is_no_good_is_set_aside(tmp_path: Path, damage: str) -> None:
    make_demo(tmp_path / "demo")
    (tmp_path / "demo" / damage).write_text("x")
    (tmp_path / "demo/notes.txt").write_text("mine")
    before = content(tmp_path / "demo")
    check(make_demo(tmp_path / "demo"))
    assert content(tmp_path / "demo.old-1") == before
    assert not (tmp_path / "demo/notes.txt").exists()


def test_keys_that_have_expired(tmp_path: Path) -> None:
    make_demo(tmp_path / "demo")
    check(make_demo(tmp_path / "demo", now=NOW + 80 * DAY), NOW + 80 * DAY)
    assert not (tmp_path / "demo.old-1").exists()
    check(make_demo(tmp_path / "demo", now=NOW + 100 * DAY), NOW + 100 * DAY)
    assert (tmp_path / "demo.old-1").exists()


def test_devices_that_run_are_left_alone(tmp_path: Path) -> None:
    demo = make_demo(tmp_path / "demo")
    with DeviceIdentity.open(tmp_path / "demo/identity-1"):
        assert make_demo(tmp_path / "demo") == demo
    with Authority.open(tmp_path / "demo/operator"), pytest.raises(DataError, match="another process"):
        make_demo(tmp_path / "demo")
    assert not (tmp_path / "demo.old-1").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"clients": "x", "seed": 0, "port": 1}', "\xff"])
def test_not_ready(tmp_path: Path, text: str) -> None:
    assert find_demo(tmp_path) is None
    (tmp_path / "demo.json").write_bytes(text.encode("latin-1"))
    assert find_demo(tmp_path) is None


def test_the_scenario_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = mycelia(capsys, "simulate", "demo", "--out", tmp_path / "run", "--format", "json")
    assert done.code == 0
    result = json.loads(done.out)
    assert result["rounds"] == 5
    assert result["test_accuracy"] >= 0.90
