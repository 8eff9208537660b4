"""Hello: a device shows that it holds its identity key, to this server, now, over this certificate."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from mycelia.privacy.secagg.canonical import struct
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason
from mycelia.privacy.secagg.keys import Identity, Random, verify_bytes

__all__ = ["NONCE_BYTES", "Hello", "new_nonce"]

NONCE_BYTES: Final = 32


@dataclass(frozen=True)
class Hello:
    """What the signature of a Hello covers; each side puts it together from what it knows itself.

    Attributes:
        server: the server's name, from its Challenge.
        server_nonce: 32 bytes, fresh for each stream.
        server_versions: first and last version of the protocol that the server speaks.
        client: the client's id.
        client_nonce: 32 bytes.
        client_versions: first and last version that the client speaks.
        certificate_sha256: fingerprint of the certificate that the client shows in this connection.

    Raises:
        IdentityProblem: `BAD_HELLO` for a nonce or a fingerprint of another length, or a number out of range.
    """

    server: str
    server_nonce: bytes
    server_versions: tuple[int, int]
    client: int
    client_nonce: bytes
    client_versions: tuple[int, int]
    certificate_sha256: bytes

    def __post_init__(self) -> None:
        parts = (self.server_nonce, self.client_nonce, self.certificate_sha256)
        if {len(part) for part in parts} != {NONCE_BYTES}:
            raise _bad("a nonce or a fingerprint of another length", f"{NONCE_BYTES} bytes each", self.client)
        versions = (*self.server_versions, *self.client_versions)
        if not (0 < self.client < 2**64 and all(0 <= version < 2**32 for version in versions)):
            raise _bad("a number out of range", "ids count from 1, versions from 0", self.client)

    def encode(self) -> bytes:
        """The bytes that are signed."""
        return struct(
            "SA1/hello", self.server, self.server_nonce, self.server_versions, self.client, self.client_nonce,
            self.client_versions, self.certificate_sha256,
        )  # fmt: skip

    def sign(self, identity: Identity) -> bytes:
        """The client's signature, 64 bytes."""
        return identity.sign(self.encode())

    def verify(self, signature: bytes, identity_key: bytes) -> None:
        """Refuse a Hello that its client did not sign.

        Args:
            signature: as received.
            identity_key: of the client's entry in the roster, the one whose certificate is shown.

        Raises:
            IdentityProblem: `BAD_HELLO`.
        """
        if not verify_bytes(identity_key, signature, self.encode()):
            raise _bad(
                "the signature of Hello does not verify",
                "signed with the identity key that the roster lists beside this certificate, over the nonces"
                " of this connection, the server's name and the version",
                self.client,
                "use the identity folder that this client was enrolled with",
            )


def new_nonce(random: Random = os.urandom) -> bytes:
    """A fresh nonce, 32 bytes."""
    return random(NONCE_BYTES)


def _bad(found: str, rule: str, client: int, fix: str = "") -> IdentityProblem:
    return IdentityProblem(IdentityReason.BAD_HELLO, found, rule=rule, fix=fix, who=f"client {client}")
