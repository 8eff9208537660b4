"""The tables of a server, and the steps that make them from those of an older version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    select,
    text,
)

from mycelia.engine.errors import ConfigError

__all__ = [
    "MIGRATIONS", "blob_parts", "blobs", "clients", "leases", "metadata", "migrate", "outcomes", "relays",
    "releases", "roster", "round_log", "rounds", "runs", "tokens",
]  # fmt: skip

metadata: Final = MetaData()

_version: Final = Table("schema_version", metadata, Column("version", Integer, nullable=False))

runs: Final = Table(
    "runs",
    metadata,
    Column("run", Text, primary_key=True),
    Column("config", LargeBinary, nullable=False),
    # Where the two chains stand: without it nobody would miss the last records.
    Column("log_records", BigInteger, nullable=False),
    Column("log_hash", LargeBinary, nullable=False),
    Column("release_records", BigInteger, nullable=False),
    Column("release_hash", LargeBinary, nullable=False),
)
rounds: Final = Table(  # what the log says, for those who want to look something up
    "rounds",
    metadata,
    Column("run", Text, primary_key=True),
    Column("round", BigInteger, primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("opened_at", Double, nullable=False),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("model_sha256", LargeBinary),
)
round_log: Final = Table(
    "round_log",
    metadata,
    Column("run", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("body", LargeBinary),  # NULL: among the blobs, or no longer needed
    Column("body_sha256", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
outcomes: Final = Table(
    "outcomes",
    metadata,
    Column("run", Text, primary_key=True),
    Column("round", BigInteger, primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("client", BigInteger, primary_key=True),
    Column("sha256", LargeBinary),  # of the one update that counts
    Column("status", Text),  # NULL: not settled yet
    Column("phase", Text, nullable=False, server_default=""),
    Column("cause", Text, nullable=False, server_default=""),
    Column("hint", Text, nullable=False, server_default=""),
    Column("bytes_up", BigInteger, nullable=False, server_default="0"),
    Column("bytes_down", BigInteger, nullable=False, server_default="0"),
    Column("seconds", Double, nullable=False, server_default="0"),
)
releases: Final = Table(
    "releases",
    metadata,
    Column("run", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("round", BigInteger, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    UniqueConstraint("run", "round", "attempt"),
)
leases: Final = Table(
    "leases",
    metadata,
    Column("run", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("expires", Double, nullable=False),
)
clients: Final = Table(
    "clients",
    metadata,
    Column("client", BigInteger, primary_key=True),
    Column("server", Text, nullable=False),  # that has its stream
    Column("stream", BigInteger, nullable=False),  # counts them; the newest is the one that is served
    Column("seen_at", Double, nullable=False),
)
roster: Final = Table(
    "roster",
    metadata,
    Column("epoch", BigInteger, primary_key=True),
    Column("document", LargeBinary, nullable=False),
)
tokens: Final = Table(
    "tokens",
    metadata,
    Column("sha256", LargeBinary, primary_key=True),
    Column("expires", BigInteger, nullable=False),
    Column("used_by", LargeBinary),
)
blobs: Final = Table(
    "blobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("begun_at", Double, nullable=False),
    Column("sha256", LargeBinary, unique=True),  # NULL: not complete
    Column("size", BigInteger),
)
blob_parts: Final = Table(
    "blob_parts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

relays: Final = Table(  # words between servers; whoever reads one removes it
    "relays",
    metadata,
    Column("target", Text, primary_key=True),
    Column("sender", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("term", BigInteger, nullable=False),  # fence of the lead that it is about
    Column("client", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

Migration = Callable[[Connection], None]


def _version_1(connection: Connection) -> None:
    first = [table for table in metadata.sorted_tables if table is not relays]
    metadata.create_all(connection, first, checkfirst=False)
    if connection.dialect.name == "postgresql":  # weights do not get smaller, and trying takes long
        connection.execute(text("ALTER TABLE blob_parts ALTER COLUMN data SET STORAGE EXTERNAL"))


def _version_2(connection: Connection) -> None:
    relays.create(connection)


MIGRATIONS: Final[Sequence[Migration]] = (_version_1, _version_2)
"""The n-th makes version n of version n - 1."""


def migrate(connection: Connection, name: str, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring a database to the newest version, in the caller's transaction.

    Args:
        connection: to the database, in a transaction that nobody else writes beside.
        name: of the database, for messages.
        migrations: all steps there are.

    Returns:
        The version it had; 0 for an empty database.

    Raises:
        ConfigError: it is of a newer version, or holds something else.
    """
    found = set(inspect(connection).get_table_names())
    version = 0
    if _version.name in found:
        versions = list(connection.scalars(select(_version.c.version)))
        if len(versions) != 1 or versions[0] < 1:
            raise ConfigError(
                f"its table {_version.name} says {versions}",
                rule="a store has one version, from 1",
                fix="name another database, or restore this one from a backup",
                who=name,
            )
        version = versions[0]
    elif taken := found & set(metadata.tables):
        raise ConfigError(
            f"it has a table {min(taken)} and no {_version.name}",
            rule="a store shares its database with nothing that has tables of the same names",
            fix="name another database in store.url",
            who=name,
        )
    if version > len(migrations):
        raise ConfigError(
            f"it was written by a newer Mycelia: version {version}",
            rule=f"this one knows the versions 1 to {len(migrations)}",
            fix="update Mycelia on this server",
            who=name,
        )
    for step in migrations[version:]:
        step(connection)
    if not version:
        connection.execute(_version.insert().values(version=len(migrations)))
    elif version < len(migrations):
        connection.execute(_version.update().values(version=len(migrations)))
    return version
