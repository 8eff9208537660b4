"""The demo's folder: a throw-away operator, a server, devices with their data, and what they are told.

It can be made again at any time: what is sound is kept, and what a crash left out is added. A folder that is
no good any more is set aside under another name, and nothing is ever deleted.

    .mycelia-demo                        says that the folder is a demo's
    operator/  server-keys/  identity-1/ …   keys
    data-1.npz …                         what each device holds
    server.toml  client-1.toml …         as `mycelia serve` and `mycelia client` read them
    demo.json                            written last: the folder is ready
"""

from __future__ import annotations

import io
import json
import os
import time
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_authority import Authority
from mycelia.client.identity import DeviceIdentity
from mycelia.engine.durable import sync_folder
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.certificates import Certificate, IdentityProblem
from mycelia.privacy.secagg.key_files import PUBLIC, read_public, write_file
from mycelia.privacy.secagg.private_keys import read_certificate

if TYPE_CHECKING:
    from mycelia.simulations import Scenario

__all__ = ["CLIENTS", "PORT", "Demo", "find_demo", "make_demo"]

CLIENTS: Final = 3
PORT: Final = 8443
_MOST: Final = 20
_MARK: Final = ".mycelia-demo"
_READY: Final = "demo.json"
_ENROLLED: Final = "state.json"  # what a device writes last when it is given its certificate
_SPARE_S: Final = 3600  # keys that end within the hour are made anew
_CLIENT: Final = """\
# Device {client} of the demo.
client = {{ server = ["127.0.0.1:{port}"], identity = "identity-{client}/", model = {model}, data = {data} }}

[policy]
purposes = ["demo"]
algorithms = ["fedavg"]
secure_sum = "required"
threat = "active"
issuer = "any"
min_cohort = {cohort}
"""
_SERVER: Final = """\
# The demo's server: where it is, and then the federation of `mycelia simulate demo`.
server = {{ listen = "127.0.0.1:{port}", keys = "server-keys/", roster = "operator/roster.bin" }}
store = {{ url = "sqlite:///mycelia.db", blobs = "blobs/" }}
run = {{ name = "{run}", purpose = "demo", population = {clients}, out = "{out}/" }}
seed = {seed}
{federation}
"""


class Demo(NamedTuple):
    """A folder that is ready.

    Attributes:
        folder: where it is.
        server: the file server.toml.
        clients: the files client-1.toml, ….
        seed: of the federation, and of who holds which examples.
        port: of the server on 127.0.0.1.
    """

    folder: Path
    server: Path
    clients: tuple[Path, ...]
    seed: int
    port: int


def find_demo(folder: Path) -> Demo | None:
    """The demo in a folder; None as long as it is not ready."""
    try:
        found = json.loads((folder / _READY).read_text())
        clients, seed, port = (int(found[name]) for name in ("clients", "seed", "port"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    paths = tuple(folder / f"client-{client}.toml" for client in range(1, clients + 1))
    return Demo(folder, folder / "server.toml", paths, seed, port)


def make_demo(
    folder: Path, *, clients: int = CLIENTS, seed: int = 0, port: int = PORT, now: int | None = None
) -> Demo:
    """Make the folder, or what is missing of it.

    Args:
        folder: where; new, empty, or a demo's.
        clients: how many devices, from 3 to 20.
        seed: of the federation.
        port: of the server on 127.0.0.1.
        now: Unix time in seconds; None: by the clock.

    Raises:
        ConfigError: a number out of range.
        DataError: the folder holds something else, another process has it, or it cannot be written.
    """
    if not 3 <= clients <= _MOST or not 0 <= seed < 2**63 or not 0 < port < 2**16:
        raise ConfigError(
            f"{clients} clients, seed {seed}, port {port}",
            rule=f"a secure sum has 3 clients or more, and the demo at most {_MOST}; seeds count from 0",
            fix="leave the options out",
            who="demo",
        )
    now = int(time.time()) if now is None else now
    folder = Path(os.path.abspath(folder))
    _claim(folder)
    if not _sound(folder, clients, now):
        _set_aside(folder)
        _claim(folder)
    wanted = Demo(
        folder,
        folder / "server.toml",
        tuple(folder / f"client-{client}.toml" for client in range(1, clients + 1)),
        seed,
        port,
    )
    ready = find_demo(folder)
    if ready != wanted and ready is not None:
        (folder / _READY).unlink()  # not ready while it changes
        sync_folder(folder)
    _enrol(folder, clients, now)
    _write_files(wanted)
    if ready != wanted:
        facts = {"version": 1, "clients": clients, "seed": seed, "port": port}
        write_file(folder / _READY, json.dumps(facts).encode() + b"\n", PUBLIC, replace=True)
    return wanted


# --- the folder -----------------------------------------------------------------------------------


def _claim(folder: Path) -> None:
    """Mark a new or empty folder as a demo's; refuse one that holds something else."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / _MARK).exists():
            if any(folder.iterdir()):
                raise DataError(
                    "there is something else in it",
                    rule="a demo has a folder of its own",
                    fix="start it in another place, or move what is there away",
                    who=str(folder),
                )
            write_file(folder / _MARK, b"", PUBLIC, replace=True)
        folder.chmod(0o700)
    except OSError as error:
        raise DataError(
            f"it cannot be used: {error.strerror or error}",
            rule="a folder that can be made and written",
            fix="look at the path and at the rights of its parent",
            who=str(folder),
        ) from error


def _set_aside(folder: Path) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    sync_folder(folder.parent)


def _sound(folder: Path, clients: int, now: int) -> bool:
    """Whether what is there can be used, or be completed: nothing damaged, and no keys about to end."""
    if not (folder / "operator").exists():
        return not any((folder / name).exists() for name in ("server-keys", "identity-1"))
    until = now + _SPARE_S
    try:
        with _operator(folder) as authority:
            roster = authority.roster
            if until > roster.expires and roster.clients:
                return False
            entries = [entry for client in range(1, clients + 1) for entry in roster.listed(client)]
            if any(until > entry.not_after or roster.is_revoked(entry.client) for entry in entries):
                return False
            if (folder / "server-keys").exists():
                ServerKeys.open(folder / "server-keys", until).check(roster, until)
            elif roster.servers:
                return False
            for client in range(1, clients + 1):
                _check_identity(folder / f"identity-{client}", client, authority, until)
    except _InUse as error:
        raise error.error from None
    except (DataError, IdentityProblem, SecureSumError):
        return False
    return True


class _InUse(Exception):
    def __init__(self, error: DataError) -> None:
        self.error = error


def _operator(folder: Path) -> Authority:
    """The operator's folder; `_InUse` where it is no fault of the folder."""
    try:
        return Authority.open(folder / "operator")
    except DataError as error:
        if error.found == "another process is using it":
            raise _InUse(error) from error
        raise


def _check_identity(folder: Path, client: int, authority: Authority, until: int) -> None:
    """Without taking its lock, which a device that runs at this moment has."""
    listed = authority.roster.listed(client)
    if not folder.exists():
        if listed:
            raise DataError("the keys of a listed device are gone", who=str(folder))
        return
    pinned = read_public(folder / "operator.pub")
    if pinned != authority.operator.pem:
        raise DataError("it is that of another operator", who=str(folder))
    if not (folder / _ENROLLED).exists():
        return
    certificates = [
        Certificate.read(read_certificate(path), authority.operator.key) for path in folder.glob("tls-*.crt")
    ]
    known = {entry.tls_sha256 for entry in listed}
    for certificate in certificates:
        if (
            certificate.client == client
            and certificate.tls_sha256 in known
            and certificate.not_after >= until
        ):
            return
    raise DataError("its certificates are no good any more", who=str(folder))


# --- keys -----------------------------------------------------------------------------------------


def _enrol(folder: Path, clients: int, now: int) -> None:
    operator = folder / "operator"
    with Authority.open(operator) if operator.exists() else Authority.create(operator, now) as authority:
        if not (folder / "server-keys").exists():
            authority.add_server(
                "demo", folder / "server-keys", now, dns=["localhost"], addresses=[ip_address("127.0.0.1")]
            )
        for client in range(1, clients + 1):
            path = folder / f"identity-{client}"
            if (path / _ENROLLED).exists():
                continue
            with (
                DeviceIdentity.open(path)
                if path.exists()
                else DeviceIdentity.create(path, authority.operator.pem, f"demo {client}")
            ) as device:
                issued = authority.issue(device.request(), now)
                if issued.entry.client != client:
                    raise DataError(
                        f"device {client} was enrolled as client {issued.entry.client}",
                        rule="only the demo uses its operator",
                        fix="move the folder away, and start again",
                        who=str(folder),
                    )
                device.accept_reply(authority.reply(issued), now)


# --- files ----------------------------------------------------------------------------------------


def _write_files(demo: Demo) -> None:
    from mycelia.simulations import load_scenario

    count = len(demo.clients)
    scenario = load_scenario("demo", [f"seed={demo.seed}", f"cohort={count}", f"population.clients={count}"])
    contents = _data(scenario, count)
    for client, (path, data) in enumerate(zip(demo.clients, contents, strict=True), 1):
        _put(demo.folder / f"data-{client}.npz", data)
        text = _CLIENT.format(
            client=client,
            port=demo.port,
            model='{ name = "mlp", hidden = [64] }',
            data=f'{{ name = "npz:data-{client}.npz", classes = 10 }}',
            cohort=count,
        )
        _put(path, text.encode())
    usual = (count, demo.seed) == (CLIENTS, 0)
    suffix = "" if usual else f"-{count}-{demo.seed}"  # another federation is another run of the store
    server = _SERVER.format(
        run=f"demo{suffix}",
        out=f"run{suffix}",
        port=demo.port,
        clients=count,
        seed=demo.seed,
        federation="\n".join(_federation(count)),
    )
    _put(demo.server, server.encode())


def _federation(clients: int) -> list[str]:
    """The lines of the scenario that are about the federation, and not about who its clients are."""
    text = (files("mycelia.simulations") / "scenarios" / "demo.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.partition(" = ")[0] in FederationConfig.model_fields]
    return [f"cohort = {clients}" if line.startswith("cohort = ") else line for line in lines]


def _data(scenario: Scenario, clients: int) -> list[bytes]:
    """What each client of the scenario holds, as an archive that its device reads; and the common tests."""
    from mycelia.engine.data import load

    dataset = load(scenario.data.name, **scenario.data.options)
    partition = scenario.populate(dataset.train).partition
    found = []
    for client in range(clients):
        own = dataset.train.take(partition.indices(client))
        file = io.BytesIO()
        np.savez(
            file,
            x_train=own.inputs,
            y_train=own.targets,
            x_test=dataset.test.inputs,
            y_test=dataset.test.targets,
        )
        found.append(file.getvalue())
    return found


def _put(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_file(path, data, PUBLIC, replace=True)
