"""Records of a server's journal that are no messages: how they are written and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mycelia.privacy.secagg import messages
from mycelia.privacy.secagg.canonical import Reader
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.messages import (
    MAX_COHORT,
    MAX_CONFIG_BYTES,
    Reason,
    RoundConfig,
    SecureSumError,
)

__all__ = [
    "damaged",
    "of_cohort",
    "of_config",
    "of_receipt",
    "of_result",
    "read_cohort",
    "read_config",
    "read_receipt",
    "read_result",
]

_CONFIG: Final = "SA1/journal/config"
_U0: Final = "SA1/journal/u0"
_RECEIPT: Final = "SA1/journal/receipt"
_RESULT: Final = "SA1/journal/result"
_SMALL: Final = 2**10  # bytes of a record of a few fields
_LONG: Final = 2**20  # bytes of a record with a list of clients


def of_config(config: RoundConfig, candidates: Sequence[int]) -> Record:
    """The session begins: what it is about, and who is asked."""
    return Record("CONFIG", messages.struct(_CONFIG, config.encode(), tuple(candidates)))


def read_config(records: Sequence[Record]) -> tuple[RoundConfig, tuple[int, ...]]:
    """The first record of a journal.

    Raises:
        SecureSumError: `JOURNAL`.
    """
    if not records or records[0].kind != "CONFIG":
        raise damaged("no configuration")
    reader = Reader(records[0].body, _CONFIG, _LONG, Reason.JOURNAL)
    body, candidates = reader.blob(MAX_CONFIG_BYTES), reader.integers(MAX_COHORT)
    reader.end()
    try:
        return RoundConfig.decode(body), candidates
    except SecureSumError as error:
        raise damaged("a configuration that is none") from error


def of_cohort(ids: Sequence[int]) -> Record:
    """The cohort is fixed."""
    return Record("U0", messages.struct(_U0, tuple(ids)))


def read_cohort(body: bytes) -> tuple[int, ...]:
    """The ids of U0."""
    reader = Reader(body, _U0, _LONG, Reason.JOURNAL)
    ids = reader.integers(MAX_COHORT)
    reader.end()
    return ids


def of_receipt(client: int, sha256: bytes) -> Record:
    """A client's vector, of this hash, is in the sum."""
    return Record("RECEIPT", messages.struct(_RECEIPT, client, sha256))


def read_receipt(body: bytes) -> tuple[int, bytes]:
    """The client and the hash."""
    reader = Reader(body, _RECEIPT, _SMALL, Reason.JOURNAL)
    found = reader.integer(), reader.hash()
    reader.end()
    return found


def of_result(transcript: bytes, survivors: Sequence[int], packed: bytes) -> Record:
    """The sum is opened."""
    return Record("RESULT", messages.struct(_RESULT, transcript, tuple(survivors), packed))


def read_result(body: bytes, config: RoundConfig) -> tuple[bytes, tuple[int, ...], bytes]:
    """The transcript, the survivors and the packed sum."""
    reader = Reader(body, _RESULT, len(body), Reason.JOURNAL)
    found = reader.hash(), reader.integers(MAX_COHORT), reader.blob(config.upload_bytes, exact=True)
    reader.end()
    return found


def damaged(found: str) -> SecureSumError:
    """The error about records that no session leaves."""
    return SecureSumError(Reason.JOURNAL, found, rule="the records of one session, in order", who="journal")
