from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from mycelia.aggregator.blob_rows import PART_BYTES, BlobRows
from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.enrolled import (
    add_tokens,
    begin_stream,
    keep_roster,
    newest_roster,
    streams_of,
    unused_tokens,
    use_token,
)
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import MIGRATIONS, blob_parts, blobs, metadata, tokens
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg.certificates import IdentityProblem
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from tests.aggregator.databases import Server

pytest_plugins = ["tests.aggregator.databases"]

TABLES = {
    "blob_parts", "blobs", "clients", "leases", "outcomes", "relays", "releases", "roster", "round_log",
    "rounds", "runs", "schema_version", "tokens",
}  # fmt: skip
HOLDER = """
import sys
from mycelia.aggregator.store import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def put(store: Store, *names: bytes) -> None:
    with store.write() as connection:
        for name in names:
            connection.execute(tokens.insert().values(sha256=name, expires=1))


def held(store: Store) -> set[bytes]:
    with store.read() as connection:
        return set(connection.scalars(sa.select(tokens.c.sha256)))


def reason_of(problem: pytest.ExceptionInfo[Problem]) -> Reason:
    return problem.value.reason


# --- versions -------------------------------------------------------------------------------------


def test_tables_are_made_once(url: str, open_store: Callable[[str], Store]) -> None:
    first = open_store(url)
    assert set(sa.inspect(first.engine).get_table_names()) == TABLES == set(metadata.tables)
    put(first, b"a")
    first.close()
    assert held(open_store(url)) == {b"a"}


def test_steps_run_in_order_and_once(url: str) -> None:
    done: list[int] = []

    def second(connection: sa.Connection) -> None:
        done.append(2)
        connection.execute(sa.text("ALTER TABLE tokens ADD COLUMN note TEXT"))

    def third(connection: sa.Connection) -> None:
        done.append(3)
        connection.execute(sa.text("UPDATE tokens SET note = 'third'"))

    store = Store.open(url)
    put(store, b"a")
    store.close()
    for expected in ([2, 3], [2, 3]):
        store = Store.open(url, migrations=[*MIGRATIONS, second, third])
        with store.read() as connection:
            assert connection.scalar(sa.text("SELECT note FROM tokens")) == "third"
        store.close()
        assert done == expected


def test_a_step_that_fails_changes_nothing(url: str) -> None:
    def broken(connection: sa.Connection) -> None:
        connection.execute(sa.text("ALTER TABLE tokens ADD COLUMN note TEXT"))
        raise ConfigError("it does not work")

    Store.open(url).close()
    with pytest.raises(ConfigError, match="does not work"):
        Store.open(url, migrations=[*MIGRATIONS, broken])
    store = Store.open(url)
    assert "note" not in {column["name"] for column in sa.inspect(store.engine).get_columns("tokens")}
    store.close()


def test_a_store_of_version_1_gets_what_is_missing(url: str) -> None:
    before = Store.open(url, migrations=MIGRATIONS[:1])
    assert set(sa.inspect(before.engine).get_table_names()) == TABLES - {"relays"}
    before.close()
    store = Store.open(url)
    assert set(sa.inspect(store.engine).get_table_names()) == TABLES
    store.close()


def test_a_newer_version_is_refused(url: str) -> None:
    Store.open(url, migrations=[*MIGRATIONS, lambda _: None]).close()
    with pytest.raises(ConfigError, match="newer Mycelia: version 3"):
        Store.open(url)


@pytest.mark.parametrize("versions", [[], [0], [1, 1]])
def test_a_version_that_is_none_is_refused(url: str, versions: list[int]) -> None:
    store = Store.open(url)
    with store.write() as connection:
        connection.execute(sa.text("DELETE FROM schema_version"))
        for version in versions:
            connection.execute(sa.text(f"INSERT INTO schema_version VALUES ({version})"))
    store.close()
    with pytest.raises(ConfigError, match="schema_version"):
        Store.open(url)


def test_tables_of_something_else_are_left_alone(url: str) -> None:
    store = Store.open(url)
    with store.write() as connection:
        connection.execute(sa.text("DROP TABLE schema_version"))
    store.close()
    with pytest.raises(ConfigError, match="no schema_version"):
        Store.open(url)


@pytest.mark.postgres
def test_servers_that_start_together_make_the_tables_once(postgres: Server) -> None:
    url, failed = postgres.database(), list[BaseException]()

    def start() -> None:
        try:
            Store.open(url).close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --- which database -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///a.db?mode=ro", "options"),
        ("mysql://host/name", "kind 'mysql'"),
        ("postgresql+asyncpg://host/name", "driver"),
        ("nothing", "no address"),
        ("", "no address"),
    ],
)
def test_other_addresses_are_refused(url: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Store.open(url)


def test_a_password_is_not_told() -> None:
    with pytest.raises(Problem) as refused:
        Store.open("postgresql://me:hidden-word@127.0.0.1:1/name")
    assert reason_of(refused) == Reason.STORE
    assert "hidden-word" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)


def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Store.open(f"sqlite:///{tmp_path / 'none' / 'a.db'}")


@pytest.mark.postgres
def test_a_database_that_is_not_durable_is_refused(postgres: Server) -> None:
    url = postgres.database()
    postgres.do("postgres", f"ALTER DATABASE {sa.make_url(url).database} SET synchronous_commit = off")
    with pytest.raises(ConfigError, match="synchronous_commit = off"):
        Store.open(url)


def test_sqlite_is_durable_and_private(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'a.db'}")
    with store.write() as connection:
        assert connection.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(sa.text("PRAGMA synchronous")) == 2
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    store.close()


def test_two_servers_one_sqlite_refused(tmp_path: Path) -> None:
    file, other = tmp_path / "a.db", tmp_path / "other.db"
    first = Store.open(f"sqlite:///{file}")
    other.symlink_to(file)
    for name in (file, other, tmp_path / "." / "a.db"):
        with pytest.raises(ConfigError, match="another server has it"):
            Store.open(f"sqlite:///{name}")
    command = [sys.executable, "-c", HOLDER, f"sqlite:///{file}"]
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=nothing)
    assert done.returncode
    assert "another server has it" in done.stderr
    put(first, b"a")
    first.close()
    second = Store.open(f"sqlite:///{file}")
    assert held(second) == {b"a"}
    second.close()


def test_a_killed_server_leaves_no_lock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="another server has it"):
            Store.open(url)
        process.kill()
        process.wait()
        Store.open(url).close()


# --- writing --------------------------------------------------------------------------------------


def test_a_block_is_done_or_undone(store: Store) -> None:
    put(store, b"a")
    with suppress(KeyError), store.write() as connection:
        connection.execute(tokens.insert().values(sha256=b"b", expires=1))
        raise KeyError
    assert held(store) == {b"a"}
    with pytest.raises(sa.exc.IntegrityError):  # a fault of the caller's is no problem of the store's
        put(store, b"c", b"a")
    assert held(store) == {b"a"}


def test_a_reader_sees_one_state(store: Store) -> None:
    put(store, b"a")
    with store.read() as connection:
        wanted = sa.select(sa.func.count()).select_from(tokens)
        assert connection.scalar(wanted) == 1
        thread = threading.Thread(target=put, args=(store, b"b"))
        thread.start()
        thread.join()
        assert connection.scalar(wanted) == 1
    assert held(store) == {b"a", b"b"}


def test_writers_take_turns(store: Store) -> None:
    def write(first: int) -> None:
        for number in range(10):
            put(store, bytes([first, number]))

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held(store)) == 40


@pytest.mark.postgres
def test_a_database_goes_away_and_comes_back(postgres: Server, open_store: Callable[[str], Store]) -> None:
    store = open_store(postgres.database())
    put(store, b"a")
    connection = store.engine.connect()
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(Problem, match="not there") as away:
                put(store, b"b")
            assert reason_of(away) == Reason.STORE
        with pytest.raises(Problem):
            held(store)
    finally:
        postgres.start()
        connection.invalidate()
        connection.close()
    assert held(store) == {b"a"}
    put(store, b"b")
    assert held(store) == {b"a", b"b"}


@pytest.mark.postgres
def test_a_database_that_goes_away_within_a_block(
    postgres: Server, open_store: Callable[[str], Store]
) -> None:
    store = open_store(postgres.database())

    def write() -> None:
        with store.write() as connection:
            connection.execute(tokens.insert().values(sha256=b"a", expires=1))
            postgres.stop()
            postgres.start()
            connection.execute(tokens.insert().values(sha256=b"b", expires=1))

    with pytest.raises(Problem) as away:
        write()
    assert reason_of(away) == Reason.STORE
    assert held(store) == set()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as disk:
        store = Store.open(f"sqlite:///{disk / 'a.db'}")
        put(store, b"a")
        ballast = fill(disk, leave=8192)
        with pytest.raises(Problem) as full:
            put(store, *(bytes([number]) * 4000 for number in range(8)))
        assert reason_of(full) == Reason.STORE
        assert held(store) == {b"a"}
        ballast.unlink()
        put(store, b"b")
        assert held(store) == {b"a", b"b"}
        store.close()


@pytest.mark.parametrize("offset", [0, 20, 100])
def test_a_damaged_file_is_named(tmp_path: Path, offset: int) -> None:
    file = tmp_path / "a.db"
    Store.open(f"sqlite:///{file}").close()
    data = bytearray(file.read_bytes())
    data[offset : offset + 30] = b"\xff" * 30
    file.write_bytes(data)
    with pytest.raises(Problem, match=r"a\.db") as damaged:
        Store.open(f"sqlite:///{file}")
    assert reason_of(damaged) == Reason.STORE_CORRUPT


def test_transactions_lost_in_the_middle_of_sqlites_log_are_found(tmp_path: Path) -> None:
    """A change of one bit: all is there, or all but the last transaction, or STORE_CORRUPT."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    store = Store.open(f"sqlite:///{live / 'a.db'}")
    names = [bytes([number]) for number in range(8)]
    for name in names:
        put(store, name)
    shutil.copytree(live, copy)  # as kill -9 leaves it
    store.close()
    log = copy / "a.db-wal"
    data, draw, kept = log.read_bytes(), random.Random(1), (copy / "a.db").read_bytes()
    whole = set(names)
    offsets = [None, 0, 9, 25, *(draw.randrange(len(data)) for _ in range(40))]
    found = []
    for offset in offsets:
        for left in copy.glob("a.db-*"):
            left.unlink()
        (copy / "a.db").write_bytes(kept)
        changed = bytearray(data)
        if offset is not None:
            changed[offset] ^= 1 << draw.randrange(8)
        log.write_bytes(changed)
        try:
            again = Store.open(f"sqlite:///{copy / 'a.db'}")
        except Problem as problem:
            found.append(problem.reason)
            continue
        assert held(again) in ([whole] if offset is None else [whole, whole - {names[-1]}])
        again.close()
    assert set(found) == {Reason.STORE_CORRUPT}
    assert len(found) > 30


@pytest.mark.parametrize("size", [0, 10, 32, 1000, -1, -4000, -5000])
def test_a_log_that_a_crash_cut_is_read_to_its_last_transaction(tmp_path: Path, size: int) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'a.db'}")
    with store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    put(store, b"a")
    put(store, b"b")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "a.db", copy)
    data = (tmp_path / "a.db-wal").read_bytes()
    store.close()
    (copy / "a.db-wal").write_bytes(data[:size])
    again = Store.open(f"sqlite:///{copy / 'a.db'}")
    assert held(again) == ({b"a"} if size < 0 else set())
    again.close()


# --- devices --------------------------------------------------------------------------------------


def test_the_newest_roster_is_kept(store: Store) -> None:
    assert newest_roster(store) is None
    assert keep_roster(store, 3, b"three")
    assert not keep_roster(store, 3, b"three")
    for epoch, document in ((3, b"other"), (2, b"two")):
        with pytest.raises(DataError, match="only grows"):
            keep_roster(store, epoch, document)
    assert keep_roster(store, 4, b"four")
    assert newest_roster(store) == (4, b"four")


def test_a_token_is_used_once(store: Store) -> None:
    add_tokens(store, [b"t" * 32, b"u" * 32], expires=100)
    assert (unused_tokens(store, 100), unused_tokens(store, 101)) == (2, 0)
    with pytest.raises(IdentityProblem, match="expired on 1970"):
        use_token(store, b"t" * 32, b"request", 101)
    with pytest.raises(IdentityProblem, match="not known"):
        use_token(store, b"x" * 32, b"request", 100)
    use_token(store, b"t" * 32, b"request", 100)
    use_token(store, b"t" * 32, b"request", 200)  # its answer was lost
    with pytest.raises(IdentityProblem, match="used already"):
        use_token(store, b"t" * 32, b"another", 100)
    assert unused_tokens(store, 100) == 1


@pytest.mark.postgres
def test_of_many_that_bring_one_token_one_enrols(
    postgres: Server, open_store: Callable[[str], Store]
) -> None:
    store, done, barrier = open_store(postgres.database()), list[bool](), threading.Barrier(4)
    add_tokens(store, [b"t" * 32], expires=100)

    def enrol(number: int) -> None:
        barrier.wait()
        try:
            use_token(store, b"t" * 32, bytes([number]) * 32, 1)
            done.append(True)
        except IdentityProblem:
            done.append(False)

    threads = [threading.Thread(target=enrol, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [False, False, False, True]


def test_a_newer_stream_supersedes(store: Store) -> None:
    assert [begin_stream(store, 7, server, 1.0) for server in ("a", "a", "b")] == [1, 2, 3]
    assert begin_stream(store, 8, "a", 1.0) == 1
    assert (streams_of(store, "a"), streams_of(store, "b")) == ({8: 1}, {7: 3})


# --- blobs in rows --------------------------------------------------------------------------------


@pytest.mark.postgres
def test_every_server_has_the_blobs(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    url = postgres.database()
    first = BlobRows(open_store(url), Blobs(tmp_path / "first"))
    second = BlobRows(open_store(url), Blobs(tmp_path / "second"))
    data = bytes(range(256)) * 10_000  # three rows
    blob = first.put([data[:5], data[5:]])
    assert blob.size == len(data) > 2 * PART_BYTES
    assert blob.sha256 in second
    with second.get(blob.sha256).open() as mapped:
        assert mapped[:] == data
    assert second.put([data]).sha256 == blob.sha256
    with first._store.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(blob_parts)) == 3
    with pytest.raises(Problem, match="missing") as missing:
        second.get(b"\0" * 32)
    assert reason_of(missing) == Reason.STORE_CORRUPT
    with pytest.raises(ValueError, match="without bytes"):
        first.put([])


@pytest.mark.postgres
@pytest.mark.parametrize("damage", ["change", "remove", "shorten"])
def test_a_damaged_row_is_found(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path, damage: str
) -> None:
    store = open_store(postgres.database())
    blob = BlobRows(store, Blobs(tmp_path / "first")).put([b"a" * PART_BYTES, b"b"])
    with store.write() as connection:
        last = blob_parts.c.number == 1
        match damage:
            case "change":
                connection.execute(blob_parts.update().where(last).values(data=b"c"))
            case "remove":
                connection.execute(blob_parts.delete().where(last))
            case _:
                connection.execute(blob_parts.update().where(last).values(data=b""))
    other = Blobs(tmp_path / "second")
    with pytest.raises(Problem, match=blob.sha256.hex()) as found:
        BlobRows(store, other).get(blob.sha256)
    assert reason_of(found) == Reason.STORE_CORRUPT
    assert list(other.folder.iterdir()) == []


@pytest.mark.postgres
def test_a_damaged_copy_is_made_anew(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    near = Blobs(tmp_path / "near")
    rows = BlobRows(open_store(postgres.database()), near)
    blob = rows.put([b"abc"])
    blob.path.write_bytes(b"abcd")
    with rows.get(blob.sha256).open() as mapped:
        assert mapped[:] == b"abc"


@pytest.mark.postgres
def test_rows_that_nothing_refers_to_are_swept(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    store = open_store(postgres.database())
    rows = BlobRows(store, Blobs(tmp_path / "near"))
    kept, gone = rows.put([b"kept"]), rows.put([b"gone"])
    with store.write() as connection:  # what a crash leaves
        connection.execute(blobs.insert().values(id="half", begun_at=0.0))
        connection.execute(blob_parts.insert().values(id="half", number=0, data=b"x"))
        connection.execute(blob_parts.insert().values(id="stray", number=0, data=b"x"))
    assert rows.sweep([kept.sha256]) == ["half"]  # the others are too young
    assert gone.sha256 in rows
    assert rows.sweep([kept.sha256], grace_s=0.0) == [gone.sha256.hex()]
    assert gone.sha256 not in rows
    with store.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(blob_parts)) == 1
    with rows.get(kept.sha256).open() as mapped:
        assert mapped[:] == b"kept"


def test_a_sqlite_store_has_no_blobs_in_rows(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'a.db'}")
    with pytest.raises(ConfigError, match="rows of a SQLite file"):
        BlobRows(store, Blobs(tmp_path / "blobs"))
    store.close()
