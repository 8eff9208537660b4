"""What an offer says about an update, signed by the device: where it belongs, its weights and its sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Self

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.numbers import named_numbers, read_numbers
from mycelia.aggregator.wire.position import Position
from mycelia.privacy.secagg.canonical import Reader, SecureSumError, struct
from mycelia.privacy.secagg.keys import Identity, verify_bytes

__all__ = ["MAX_HEADER_BYTES", "MAX_NUMBERS", "UpdateHeader"]

MAX_HEADER_BYTES: Final = 2**14
MAX_NUMBERS: Final = 32
"""Weights, and metrics, of one update."""


@dataclass(frozen=True)
class UpdateHeader:
    """The header of an update.

    Attributes:
        client: who trained.
        at: run, round and attempt.
        sha256: of the payload.
        model_sha256: of the payload that it was trained from.
        weights: of each term, the client's own first; positive and finite.
        metrics: sums for the report, finite.
        examples: that it was trained on in this round.
        steps: local steps of this round.
    """

    TAG: ClassVar[str] = "FED1/update"

    client: int
    at: Position
    sha256: bytes
    model_sha256: bytes
    weights: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0
    steps: int = 0

    @property
    def weight(self) -> float:
        """The client's weight: that of the first term."""
        return next(iter(self.weights.values()))

    def encode(self) -> bytes:
        """Canonical bytes.

        Raises:
            Problem: `FRAME`: more than `MAX_HEADER_BYTES`, or more than `MAX_NUMBERS` weights or metrics.
            ValueError: a number that is negative or too large.
        """
        data = struct(
            self.TAG,
            self.client,
            self.at.run,
            self.at.round,
            self.at.attempt,
            self.sha256,
            self.model_sha256,
            named_numbers(self.weights),
            named_numbers(self.metrics),
            self.examples,
            self.steps,
        )
        if len(data) > MAX_HEADER_BYTES or max(len(self.weights), len(self.metrics)) > MAX_NUMBERS:
            raise Problem(
                Reason.FRAME,
                f"a header of {len(data)} bytes, {len(self.weights)} weights, {len(self.metrics)} metrics",
                rule=f"at most {MAX_HEADER_BYTES} bytes, and {MAX_NUMBERS} of each",
                who=_who(self.client),
            )
        return data

    def sign(self, identity: Identity) -> tuple[bytes, bytes]:
        """The header and its signature, as an offer holds them."""
        data = self.encode()
        return data, identity.sign(_signed(data))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote; nothing has been verified.

        Raises:
            Problem: `FRAME`: other bytes; `WEIGHT`: no weight, or one that is not positive and finite;
                `BAD_PAYLOAD`: a metric that is not finite.
        """
        try:
            reader = Reader(data, cls.TAG, MAX_HEADER_BYTES)
            client = reader.integer()
            at = Position(reader.text(), reader.integer(), reader.integer())
            hashes = reader.hash(), reader.hash()
            weights, metrics = read_numbers(reader, MAX_NUMBERS), read_numbers(reader, MAX_NUMBERS)
            header = cls(client, at, *hashes, weights, metrics, reader.integer(), reader.integer())
            reader.end()
        except SecureSumError as error:
            raise Problem(Reason.FRAME, error.found, rule=error.rule, who="update header") from error
        for name, value in weights.items():
            if not 0 < value < math.inf:
                raise Problem(
                    Reason.WEIGHT,
                    f"the weight of {name!r} is {value}",
                    rule="positive and finite",
                    who=_who(client),
                )
        if not weights:
            raise Problem(Reason.WEIGHT, "no weight", rule="one for each term", who=_who(client))
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise Problem(
                    Reason.BAD_PAYLOAD, f"metric {name!r} is {value}", rule="finite", who=_who(client)
                )
        return header

    @classmethod
    def verified(
        cls, data: bytes, signature: bytes, *, key: bytes, client: int, at: Position, sha256: bytes
    ) -> Self:
        """The header of an offer, after its signature and what it is bound to.

        Args:
            data: the offer's header.
            signature: the offer's.
            key: the client's identity key, from the roster.
            client: whose stream it came on.
            at: the offer's position.
            sha256: of the payload that is offered.

        Raises:
            Problem: `BAD_PAYLOAD`: not signed by this key, or for another client, position or payload; and
                those of `decode`.
        """
        if not verify_bytes(key, signature, _signed(data)):
            raise Problem(
                Reason.BAD_PAYLOAD,
                "the signature of an update's header does not verify",
                rule="signed with the sender's identity key",
                fix="enrol again if the key was renewed",
                who=_who(client),
            )
        header = cls.decode(data)
        if (header.client, header.at, header.sha256) != (client, at, sha256):
            raise Problem(
                Reason.BAD_PAYLOAD,
                f"a header of client {header.client}, {header.at}",
                rule="of the client, position and payload that are offered",
                who=_who(client),
            )
        return header


def _signed(data: bytes) -> bytes:
    return struct("FED1/update/sig", data)


def _who(client: int) -> str:
    return f"client {client}"
