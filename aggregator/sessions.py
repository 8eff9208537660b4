"""The sessions of a server on disk: which ids were ever used, and the journal of each that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mycelia.privacy.secagg.canonical import HASH_BYTES, Reader, Reason, SecureSumError, struct
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.journal import Journal, damaged

__all__ = ["Sessions", "outcome_only"]

_USED: Final = "used"
_TAG: Final = "SA1/journal/session"
_LIMIT: Final = 2**8  # bytes of a record that names a session
_ENDS: Final = ("RESULT", "FAILED")


class Sessions:
    """A folder with one journal a session, and one that names every session there ever was.

    A session that has been begun is never begun again, whatever became of its journal.

    Args:
        folder: for this server alone; made, for its owner only, if it is not there.

    Attributes:
        used: the ids of all sessions.

    Raises:
        SecureSumError: `JOURNAL`: nothing says which sessions were used, or another process is at it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _USED
        if path.exists():
            self._names, records = Journal.open(path)
        elif any(folder.glob("*.journal")):
            raise damaged(path, "it is missing, and there are journals of sessions")
        else:
            self._names, records = Journal.create(path), []
        self.used = set(map(_session_of, records))

    def begin(self, session_id: bytes) -> Journal:
        """An empty journal for a new session; when this returns, its id is used up.

        Raises:
            SecureSumError: `REPLAY`: it was used before. `JOURNAL`: it cannot be written.
        """
        if session_id in self.used:
            raise SecureSumError(
                Reason.REPLAY,
                f"session {session_id.hex()[:16]}… was begun before",
                rule="no session has a second beginning: its keys and masks are used up",
                fix="draw a new nonce for the round's next attempt",
                who="server",
            )
        self._names.append(Record("SESSION", struct(_TAG, session_id)))
        self.used.add(session_id)
        return Journal.create(self._path(session_id))

    def resume(self, session_id: bytes) -> tuple[Journal, list[Record]]:
        """The journal of a session after a restart, and the records in it.

        Raises:
            SecureSumError: `SESSION`: there never was one. `JOURNAL`: it is missing or damaged, and the
                session can only be given up.
        """
        if session_id not in self.used:
            raise SecureSumError(Reason.SESSION, "a session that never began", who="server")
        return Journal.open(self._path(session_id))

    def unfinished(self) -> tuple[bytes, ...]:
        """Sessions whose journal says of no end, those that cannot be read included."""
        return tuple(sorted(session for session in self.used if self._is_open(session)))

    def forget(self, session_id: bytes) -> None:
        """Remove the journal of a session; its id stays used."""
        self._path(session_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; closing twice is harmless."""
        self._names.close()

    def _is_open(self, session_id: bytes) -> bool:
        path = self._path(session_id)
        if not path.exists():
            return False
        try:
            journal, records = Journal.open(path)
        except SecureSumError:
            return True
        journal.close()
        return not records or records[-1].kind not in _ENDS

    def _path(self, session_id: bytes) -> Path:
        return self._folder / f"{session_id.hex()}.journal"


def outcome_only(records: Sequence[Record]) -> list[Record]:
    """What is kept of a session that has ended: its configuration and its outcome; of any other, all."""
    ended = bool(records) and records[-1].kind in _ENDS
    return [records[0], records[-1]] if ended else list(records)


def _session_of(record: Record) -> bytes:
    reader = Reader(record.body, _TAG, _LIMIT, Reason.JOURNAL)
    session_id = reader.blob(HASH_BYTES, exact=True)
    reader.end()
    return session_id
