"""What a device found when it measured a model on its own data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.numbers import named_numbers, read_numbers
from mycelia.aggregator.wire.position import Position
from mycelia.privacy.secagg.canonical import Reader, SecureSumError, struct
from mycelia.privacy.secagg.keys import Identity, verify_bytes

__all__ = ["MAX_REPORT_BYTES", "MetricsReport"]

MAX_REPORT_BYTES: Final = 2**14

_MOST: Final = 64


@dataclass(frozen=True)
class MetricsReport:
    """The payload METRICS.

    Attributes:
        client: who measured.
        at: run, round and attempt.
        model_sha256: of the payload MODEL that was measured.
        examples: that it was measured on.
        values: means over these examples, by name; finite.
    """

    TAG: ClassVar[str] = "FED1/metrics"

    client: int
    at: Position
    model_sha256: bytes
    examples: int
    values: Mapping[str, float]

    def encode(self) -> bytes:
        """Canonical bytes."""
        values = named_numbers(dict(sorted(self.values.items())))
        return struct(self.TAG, self.client, *self.at, self.model_sha256, self.examples, values)

    def sign(self, identity: Identity) -> tuple[bytes, bytes]:
        """The payload, and the signature that its offer has."""
        data = self.encode()
        return data, identity.sign(_signed(data))

    @classmethod
    def verified(cls, data: bytes, signature: bytes, *, key: bytes, client: int, at: Position) -> Self:
        """Read what `sign` wrote.

        Args:
            data: the payload.
            signature: of its offer.
            key: the client's identity key, from the roster.
            client: whose stream it came on.
            at: the offer's position.

        Raises:
            Problem: `BAD_PAYLOAD`: not signed by this key, for another client or position, other bytes, or a
                number that is not finite.
        """
        if not verify_bytes(key, signature, _signed(data)):
            raise _bad("the signature does not verify", "signed with the sender's identity key", client)
        try:
            reader = Reader(data, cls.TAG, MAX_REPORT_BYTES)
            sender = reader.integer()
            found = Position(reader.text(), reader.integer(), reader.integer())
            model, examples = reader.hash(), reader.integer()
            values = read_numbers(reader, _MOST)
            reader.end()
        except SecureSumError as error:
            raise _bad(error.found, error.rule, client) from error
        if (sender, found) != (client, at):
            raise _bad(
                f"metrics of client {sender}, {found}", "of the client and work they come from", client
            )
        for name, value in values.items():
            if not math.isfinite(value):
                raise _bad(f"metric {name!r} is {value}", "finite", client)
        return cls(sender, found, model, examples, values)


def _signed(data: bytes) -> bytes:
    return struct("FED1/metrics/sig", data)


def _bad(found: str, rule: str, client: int) -> Problem:
    return Problem(Reason.BAD_PAYLOAD, found, rule=rule, who=f"client {client}")
