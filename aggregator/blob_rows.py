"""Blobs in PostgreSQL, for servers that share no folder: rows of 1 MiB, and a copy of what each server uses.

A blob is where its row in `blobs` says its hash; its parts come before, in transactions of their own. What a
server reads or writes lies in a folder of its own as well, so that it is mapped and not kept in memory.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterable, Iterator
from hashlib import sha256
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert

from mycelia.aggregator.blobs import Blob, Blobs
from mycelia.aggregator.store import Store
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tables import blob_parts, blobs
from mycelia.aggregator.wire.problems import Problem
from mycelia.aggregator.wire.transfer import Buffer
from mycelia.engine.errors import ConfigError

__all__ = ["GRACE_S", "PART_BYTES", "BlobRows"]

PART_BYTES: Final = 2**20
"""The most bytes of one row."""
GRACE_S: Final = 3600.0
"""Seconds that a blob stays though nothing refers to it: another server may be about to."""


class BlobRows:
    """The blobs of a PostgreSQL store.

    Args:
        store: the store.
        near: a folder of this server alone, for copies.

    Raises:
        ConfigError: the store is a SQLite file; its one server has a folder.
    """

    def __init__(self, store: Store, near: Blobs) -> None:
        if not store.shared:
            raise ConfigError(
                "blobs in rows of a SQLite file",
                rule="rows are for servers that share a PostgreSQL database",
                fix="name a folder in store.blobs",
                who="store.blobs",
            )
        self._store, self._near = store, near

    def put(self, parts: Iterable[Buffer]) -> Blob:
        """Store bytes; when this returns, they outlive the process, and every server has them.

        Args:
            parts: in order, at least one byte in all.

        Raises:
            Problem: `STORE`: they cannot be written. What was there before is as it was.
            ValueError: no bytes.
        """
        blob = self._near.put(parts)
        if blob.sha256 in self:
            return blob
        name = uuid.uuid4().hex
        with self._store.write() as connection:
            begun = self._store.now(connection)
            connection.execute(blobs.insert().values(id=name, begun_at=begun))
        with blob.open() as data:
            for number, start in enumerate(range(0, blob.size, PART_BYTES)):
                with self._store.write() as connection:
                    part = data[start : start + PART_BYTES]
                    connection.execute(blob_parts.insert().values(id=name, number=number, data=part))
        with self._store.write() as connection:
            connection.execute(delete(blobs).where(blobs.c.id == name))
            row = {"id": name, "begun_at": begun, "sha256": blob.sha256, "size": blob.size}
            first = insert(blobs).values(row).on_conflict_do_nothing().returning(blobs.c.id)
            if connection.scalar(first) is None:  # another server has stored the same in the meantime
                connection.execute(delete(blob_parts).where(blob_parts.c.id == name))
        return blob

    def get(self, sha256: bytes) -> Blob:
        """A blob whose bytes are as they were stored.

        Raises:
            Problem: `STORE_CORRUPT`: it is missing or damaged; the message names it. `STORE`.
        """
        who = f"blob {sha256.hex()}"
        if sha256 in self._near:
            with contextlib.suppress(Problem):  # a damaged copy is made anew
                return self._near.get(sha256)
        with self._store.read() as connection:
            row = connection.execute(select(blobs).where(blobs.c.sha256 == sha256)).one_or_none()
        if row is None:
            raise corrupt("it is missing", who)
        try:
            blob = self._near.put(self._checked(row.id, row.size, sha256))
        except ValueError as error:
            raise corrupt("its rows are missing", who) from error
        return blob

    def __contains__(self, sha256: bytes) -> bool:
        with self._store.read() as connection:
            found = select(func.count()).select_from(blobs).where(blobs.c.sha256 == sha256)
            return bool(connection.scalar(found))

    def sweep(self, keep: Collection[bytes], *, grace_s: float = GRACE_S) -> list[str]:
        """Remove blobs that nothing refers to, and what a crash left of one; for the start of a server.

        Args:
            keep: hashes of the blobs that stay.
            grace_s: seconds that younger ones stay in any case.

        Returns:
            names of the blobs that were removed, and of the copies.
        """
        with self._store.write() as connection:
            youngest = self._store.now(connection) - grace_s
            old = select(blobs.c.id, blobs.c.sha256).where(blobs.c.begun_at <= youngest)
            unused = [row for row in connection.execute(old) if row.sha256 is None or row.sha256 not in keep]
            for row in unused:
                connection.execute(delete(blobs).where(blobs.c.id == row.id))
                connection.execute(delete(blob_parts).where(blob_parts.c.id == row.id))
            known = select(blobs.c.id)
            connection.execute(delete(blob_parts).where(blob_parts.c.id.not_in(known)))
        copies = self._near.sweep(keep, grace_s=grace_s)
        return sorted({row.sha256.hex() if row.sha256 else row.id for row in unused} | set(copies))

    def _checked(self, name: str, size: int, expected: bytes) -> Iterator[bytes]:
        """The parts, one in memory at a time; the last is given once all of them have the hash."""
        digest, there, held = sha256(), 0, b""
        for number in range(-(-size // PART_BYTES)):
            with self._store.read() as connection:
                mine = (blob_parts.c.id == name) & (blob_parts.c.number == number)
                part = connection.scalar(select(blob_parts.c.data).where(mine))
            if part is None:
                raise corrupt(f"its part {number} is missing", f"blob {expected.hex()}")
            digest.update(part)
            there += len(part)
            if held:
                yield held
            held = part
        if there != size or digest.digest() != expected:
            raise corrupt("its bytes are not those that were stored", f"blob {expected.hex()}")
        yield held
