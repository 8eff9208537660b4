"""What the two sides of a stream sign before anything else, and which version they speak."""

from __future__ import annotations

from typing import Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.privacy.secagg.canonical import struct

__all__ = ["VERSIONS", "common_version", "hello_bytes"]

VERSIONS: Final = (1, 1)
"""The lowest and the highest version of the protocol that this release speaks."""


def hello_bytes(challenge: pb.Challenge, hello: pb.Hello, fingerprint: bytes) -> bytes:
    """What the signature of a `Hello` covers.

    Args:
        challenge: that it answers.
        hello: apart from its signature.
        fingerprint: SHA-256 of the device's certificate key, or empty where the stream is not encrypted.
    """
    return struct(
        "FED1/hello",
        challenge.nonce,
        challenge.server,
        challenge.version_min,
        challenge.version_max,
        hello.client,
        hello.version_min,
        hello.version_max,
        hello.nonce,
        fingerprint,
    )


def common_version(theirs: tuple[int, int], ours: tuple[int, int] = VERSIONS) -> int:
    """The highest version that both sides speak.

    Args:
        theirs: lowest and highest of the other side.
        ours: lowest and highest of this one.

    Raises:
        Problem: `VERSION`: there is none; the message names both ranges.
    """
    version = min(theirs[1], ours[1])
    if version < max(theirs[0], ours[0]):
        raise Problem(
            Reason.VERSION,
            f"the other side speaks versions {theirs[0]} to {theirs[1]}, this one {ours[0]} to {ours[1]}",
            rule="both sides speak a common version",
            fix="install the newer release on both",
            who="hello",
        )
    return version
