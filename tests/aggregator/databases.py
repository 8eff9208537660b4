"""A PostgreSQL server of our own, in a temporary folder behind a Unix socket, and stores for tests.

A test file names this one in `pytest_plugins`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from mycelia.aggregator.store import Store


class Server:
    """A running PostgreSQL; the fixture `postgres` is one."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._user = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            self._user = "postgres" if _exists("postgres") else "nobody"
            shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        self._run(
            "initdb", "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._folder),
            "shared_buffers": "16MB",
            "max_connections": "60",
            "autovacuum": "off",
        }
        self._options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self.start()
        self.do("postgres", "CREATE DATABASE tested")

    def start(self) -> None:
        log = self._folder / "log"
        self._run("pg_ctl", "-D", self._folder / "data", "-l", log, "-o", self._options, "-w", "start")

    def stop(self) -> None:
        """End it, and every connection to it, whatever they do."""
        self._run("pg_ctl", "-D", self._folder / "data", "-m", "fast", "-w", "stop")

    def url(self, database: str) -> str:
        return f"postgresql://tester@/{database}?host={self._folder}"

    def database(self) -> str:
        """The address of an empty database; one after the other, it is always the same."""
        others = "FROM pg_stat_activity WHERE datname = 'tested'"
        self.do("postgres", f"SELECT pg_terminate_backend(pid) {others}")
        self.do("postgres", "ALTER DATABASE tested RESET ALL")
        self.do("tested", "DROP SCHEMA public CASCADE")
        self.do("tested", "CREATE SCHEMA public")
        return self.url("tested")

    def do(self, database: str, statement: str) -> None:
        """Run a statement as the server's owner."""
        url = sqlalchemy.make_url(self.url(database)).set(drivername="postgresql+psycopg")
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(statement))
        engine.dispose()

    def _run(self, name: str, *arguments: str | Path) -> None:
        command = [self._binaries / name, *arguments]
        # Not a pipe: the server would inherit it, and it would never end.
        with (self._folder / "out").open("w+") as out:
            done = subprocess.run(
                command, user=self._user, cwd=self._folder, stdout=out, stderr=out, check=False, timeout=60
            )
            out.seek(0)
            if done.returncode:
                pytest.fail(f"{name} ended with {done.returncode}: {out.read()}")

    def end(self) -> None:
        """Stop it, and remove all it has."""
        subprocess.run(
            [self._binaries / "pg_ctl", "-D", self._folder / "data", "-m", "immediate", "stop"],
            user=self._user,
            cwd="/",
            capture_output=True,
            check=False,
        )
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The one server of this process, started when it is first wanted."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    if not found and not on_path:
        pytest.fail("PostgreSQL's programs are missing. On Debian or Ubuntu: apt-get install postgresql")
    server = Server(found[-1] if found else Path(str(on_path)).parent)
    yield server
    server.end()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a new, empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'mycelia.db'}"
    server: Server = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture
def open_store() -> Iterator[Callable[[str], Store]]:
    """Opens stores, and closes them at the end."""
    opened: list[Store] = []

    def opening(url: str) -> Store:
        opened.append(Store.open(url))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(url: str, open_store: Callable[[str], Store]) -> Store:
    return open_store(url)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
