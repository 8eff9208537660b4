"""Where the machines of a simulated secure sum keep their journals: in memory, or in files as if deployed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from mycelia.aggregator.sessions import Sessions, outcome_only
from mycelia.client.history import ClientHistory
from mycelia.client.journal import ClientJournal
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.journal import Journal
from mycelia.privacy.secagg.messages import Reason, SecureSumError

__all__ = ["ClientSink", "FileJournals", "Journals", "MemoryJournals", "Sink"]


class Sink(Protocol):
    """Takes the records of one session of the server."""

    def append(self, record: Record) -> None:
        """Add a record, durably."""

    def close(self) -> None:
        """Let go of it."""


class ClientSink(Sink, Protocol):
    """Takes the records of a client."""

    @property
    def history(self) -> ClientHistory | None:
        """The facts in it; None if they are lost."""

    @property
    def records(self) -> int:
        """How many there are."""


class Journals(Protocol):
    """The journals of a server and its clients."""

    def client(self, client: int) -> ClientSink:
        """The journal of a client."""

    def begin(self, session_id: bytes) -> Sink:
        """An empty journal for a session, once for each id."""

    def resume(self, session_id: bytes) -> tuple[Sink, list[Record]]:
        """The journal of a session and what is in it, after a restart."""

    def end(self, sink: Sink) -> None:
        """A session is over: its outcome is kept."""


class _Kept:
    """Records in memory."""

    def __init__(self) -> None:
        self.kept: list[Record] = []

    def append(self, record: Record) -> None:
        self.kept.append(record)

    def close(self) -> None:
        pass

    @property
    def history(self) -> ClientHistory:
        return ClientHistory.read(self.kept)

    @property
    def records(self) -> int:
        return len(self.kept)


class MemoryJournals:
    """Journals that last as long as this object."""

    def __init__(self) -> None:
        self._clients: dict[int, _Kept] = {}
        self._sessions: dict[bytes, _Kept] = {}

    def client(self, client: int) -> ClientSink:
        """The journal of a client, empty at first."""
        return self._clients.setdefault(client, _Kept())

    def begin(self, session_id: bytes) -> Sink:
        """An empty journal for a session, once for each id."""
        if session_id in self._sessions:
            raise SecureSumError(Reason.REPLAY, "a session that was begun before", who="server")
        self._sessions[session_id] = _Kept()
        return self._sessions[session_id]

    def resume(self, session_id: bytes) -> tuple[Sink, list[Record]]:
        """The journal of a session and what is in it, after a restart."""
        return self._sessions[session_id], list(self._sessions[session_id].kept)

    def end(self, sink: Sink) -> None:
        """Only the id of a session stays."""
        if isinstance(sink, _Kept):
            sink.kept.clear()


class _Lost:
    """In the place of a journal that a client cannot read."""

    history, records = None, 0

    def append(self, record: Record) -> None:
        raise SecureSumError(Reason.JOURNAL, "there is no journal", who="client")

    def close(self) -> None:
        pass


class _File:
    """The journal of a client in its file."""

    def __init__(self, journal: ClientJournal) -> None:
        self._journal, self.append, self.close = journal, journal.append, journal.close

    @property
    def history(self) -> ClientHistory:
        return self._journal.history

    @property
    def records(self) -> int:
        return self._journal.records


class FileJournals:
    """Journals in a folder, as a server and its clients would have each their own.

    Args:
        folder: exists.
        enrolled: clients that begin a new journal now; all others go on with theirs.
    """

    def __init__(self, folder: Path, enrolled: Iterable[int] = ()) -> None:
        self._folder = folder
        for client in enrolled:
            ClientJournal.new(self.path(client)).close()
        self._sessions = Sessions(folder / "server")

    def path(self, client: int) -> Path:
        """Where the journal of a client is."""
        return self._folder / f"client-{client}.journal"

    def client(self, client: int) -> ClientSink:
        """The journal of a client, or what stands for one that is missing or damaged."""
        try:
            return _File(ClientJournal.open(self.path(client)))
        except SecureSumError:
            return _Lost()

    def begin(self, session_id: bytes) -> Sink:
        """An empty journal for a session, once for each id."""
        return self._sessions.begin(session_id)

    def resume(self, session_id: bytes) -> tuple[Sink, list[Record]]:
        """The journal of a session and what is in it, after a restart."""
        return self._sessions.resume(session_id)

    def end(self, sink: Sink) -> None:
        """The configuration and the outcome of a session are kept."""
        if isinstance(sink, Journal):
            sink.close()
            journal, records = Journal.open(sink.path)
            journal.shorten(outcome_only(records))
            journal.close()

    def close(self) -> None:
        """Let go of the files."""
        self._sessions.close()
