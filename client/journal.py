"""The journal of a client on disk, which no restart and no crash makes it forget.

Beside the records there is a second small file that says how many there are. A journal that ends earlier than
that has lost something, and a client that does not know what it released joins nothing any more. Only a new
journal helps, and that is for whoever enrols the client anew.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Final, Self

from mycelia.client.history import ClientHistory
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.journal import Journal, JournalHead, damaged, replace_file

__all__ = ["ClientJournal"]

_HEAD: Final = Struct(">16sQ32s")
_MAGIC: Final = b"SA1 client head\n"
_FIX: Final = "enrol anew, then begin a new journal"


class ClientJournal:
    """A client's journal, open for writing; made by `new` or `open`.

    Attributes:
        history: the facts in it, those of the last record included.
    """

    def __init__(self, journal: Journal, history: ClientHistory) -> None:
        self._journal, self.history = journal, history

    @property
    def records(self) -> int:
        """How many there are."""
        return self._journal.head.records

    @classmethod
    def new(cls, path: Path) -> Self:
        """An empty journal, in the place of any there was: only for a client that was enrolled anew.

        Raises:
            SecureSumError: `JOURNAL`: it cannot be written.
        """
        path.unlink(missing_ok=True)
        made = cls(Journal.create(path), ClientHistory())
        made._save_head()
        return made

    @classmethod
    def open(cls, path: Path) -> Self:
        """The journal as the client left it.

        Raises:
            SecureSumError: `JOURNAL`: it is missing, damaged or shorter than it was, open to other users, or
                in use by another process.
        """
        try:
            expected = _read_head(path)
            journal, records = Journal.open(path)
        except SecureSumError as error:
            raise _lost(error) from error
        try:
            if expected not in (journal.head, journal.previous):
                raise damaged(path, f"{journal.head.records} records, and there were {expected.records}")
            made = cls(journal, ClientHistory.read(records))
            made._save_head()  # the last record may have come to disk and its number not
        except SecureSumError as error:
            journal.close()
            raise _lost(error) from error
        return made

    def append(self, record: Record) -> None:
        """Add a record; when this returns, it outlives the process and a power cut.

        Raises:
            SecureSumError: `JOURNAL`: a record of no client, or it cannot be written.
        """
        history = ClientHistory.read([record], self.history)
        self._journal.append(record)
        self.history = history
        self._save_head()

    def close(self) -> None:
        """Let go of the file; closing twice is harmless."""
        self._journal.close()

    def _save_head(self) -> None:
        data = _HEAD.pack(_MAGIC, *self._journal.head)
        replace_file(_head_path(self._journal.path), data + sha256(data).digest())


def _head_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _read_head(path: Path) -> JournalHead:
    head = _head_path(path)
    try:
        data = head.read_bytes()
    except OSError as error:
        raise damaged(head, f"it cannot be read: {error.strerror or error}") from error
    if len(data) != _HEAD.size + 32 or sha256(data[: _HEAD.size]).digest() != data[_HEAD.size :]:
        raise damaged(head, "it was changed")
    magic, records, chain = _HEAD.unpack(data[: _HEAD.size])
    if magic != _MAGIC:
        raise damaged(head, "it is of another kind")
    return JournalHead(records, chain)


def _lost(error: SecureSumError) -> SecureSumError:
    """What a client's owner reads: which journal, what is wrong with it, and the way out."""
    found = error.found.removeprefix(f"{Reason.JOURNAL}: ")
    return SecureSumError(Reason.JOURNAL, found, rule=error.rule, fix=error.fix or _FIX, who=error.who)
