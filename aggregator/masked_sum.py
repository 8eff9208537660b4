"""The masked vectors of a session, added up as they come; each is forgotten once it is in the sum."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mycelia.privacy.secagg import keys, masks
from mycelia.privacy.secagg.events import CHUNK_BYTES
from mycelia.privacy.secagg.masks import Words
from mycelia.privacy.secagg.messages import Masked, Reason, SecureSumError
from mycelia.privacy.secagg.round_config import RoundConfig

__all__ = ["MaskedSum"]

_LEAST_CHUNK: Final = 2**12  # bytes on average, or the chunks of an upload take more memory than it does


@dataclass(eq=False)
class _Upload:
    """A masked vector on its way."""

    sha256: bytes
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    chunks: list[bytes | memoryview] = field(default_factory=list)
    size: int = 0


class MaskedSum:
    """The running sum and the uploads that are not in it yet.

    Args:
        config: of the round.

    Attributes:
        total: the sum of complete uploads, residues mod 2^m.
        folded: whose uploads are in it.
        unsaved: how many of these no snapshot has.
        receipts: client to the hash of the vector it announced.
    """

    def __init__(self, config: RoundConfig) -> None:
        self._config = config
        self.total: Words = np.zeros(config.length, masks.word_type(config.bits))
        self.folded: set[int] = set()
        self.unsaved = 0
        self.receipts: dict[int, bytes] = {}
        self._uploads: dict[int, _Upload] = {}

    def announce(self, client: int, header: Masked) -> None:
        """A vector of this hash comes next.

        Raises:
            SecureSumError: `EQUIVOCATION`: another one was announced before.
        """
        if self.receipts.get(client, header.sha256) != header.sha256:
            raise SecureSumError(Reason.EQUIVOCATION, "another vector", rule="the first one counts")
        self.receipts[client] = header.sha256
        self._uploads[client] = _Upload(header.sha256)

    def begin_again(self, client: int) -> None:
        """The same vector comes from its first chunk on."""
        self._uploads[client] = _Upload(self.receipts[client])

    def expects(self, client: int) -> bool:
        """Whether an upload of this client is open."""
        return client in self._uploads

    def drop(self, client: int) -> None:
        """Forget an upload that will not be completed."""
        self._uploads.pop(client, None)

    def drop_unfinished(self) -> list[int]:
        """Forget all uploads that are not complete; whose they were, increasing."""
        unfinished = sorted(self._uploads)
        self._uploads.clear()
        return unfinished

    def take(self, client: int, number: int, data: bytes | memoryview) -> bool:
        """Take a chunk of an open upload; whether it was the last one, and the upload is in the sum.

        Raises:
            SecureSumError: `BAD_UPLOAD`: order, length, padding or hash. The upload is forgotten.
        """
        upload, whole = self._uploads[client], self._config.upload_bytes
        if (
            number != len(upload.chunks)
            or not 0 < len(data) <= CHUNK_BYTES
            or upload.size + len(data) > whole
            or number > 1 + whole // _LEAST_CHUNK
        ):
            del self._uploads[client]
            raise SecureSumError(
                Reason.BAD_UPLOAD,
                f"chunk {number} of {len(data)} bytes after {upload.size}",
                rule=f"in order, of at most {CHUNK_BYTES} bytes, {whole} in all",
            )
        upload.digest.update(data)
        upload.chunks.append(data)
        upload.size += len(data)
        if upload.size < whole:
            return False
        del self._uploads[client]
        if upload.digest.digest() != upload.sha256:
            raise SecureSumError(Reason.BAD_UPLOAD, "another hash", rule="that of the header")
        self._fold(upload.chunks)
        self.folded.add(client)
        self.unsaved += 1
        return True

    def snapshot(self, ids: Sequence[int]) -> bytes:
        """The sum and who is in it, as bytes; `load` takes them."""
        self.unsaved = 0
        return keys.bitmap(self.folded, ids) + masks.pack(self.total, self._config.bits)

    def load(self, body: bytes, ids: Sequence[int]) -> None:
        """Go on from a snapshot.

        Raises:
            SecureSumError: of another size.
        """
        size = (len(ids) + 7) // 8
        self.folded = set(keys.members(body[:size], ids))
        self.total = masks.unpack(body[size:], self._config.length, self._config.bits)

    def erase(self) -> None:
        """Forget the sum and all uploads."""
        self._uploads.clear()
        self.total = np.zeros(0, self.total.dtype)

    def _fold(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Add a complete upload to the sum; the last chunk first, since padding can only be wrong there."""
        bits = self._config.bits
        if any(len(chunk) % bits for chunk in chunks[:-1]):
            masks.add_packed(self.total, b"".join(chunks), bits)
            return
        starts = np.cumsum([0, *(len(chunk) * 8 // bits for chunk in chunks[:-1])]).tolist()
        ends = [*starts[1:], self._config.length]
        for chunk, start, end in reversed(list(zip(chunks, starts, ends, strict=True))):
            masks.add_packed(self.total[start:end], chunk, bits)
