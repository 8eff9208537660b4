"""What both ends know of the gRPC channel below a stream: method, limits, addresses, and plain text."""

from __future__ import annotations

import ipaddress
from typing import Final

from mycelia.aggregator.wire.frames import MAX_FRAME
from mycelia.engine.errors import ConfigError

__all__ = [
    "METHOD", "NO_CERTIFICATE", "OPTIONS", "SERVICE", "check_plaintext", "is_loopback", "split_address",
]  # fmt: skip

SERVICE: Final = "mycelia.Federation"
METHOD: Final = f"/{SERVICE}/Connect"
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a size is what it says
)
"""Settings of gRPC that hold on both sides."""

NO_CERTIFICATE: Final = bytes(32)
"""What Hello signs without TLS in place of a fingerprint; over TLS it is refused: no certificate has it."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    >>> split_address("[::1]:8443")
    ('::1', 8443)

    Args:
        address: `host:port`; an IPv6 address in brackets.

    Raises:
        ConfigError: anything else.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    good = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16
    plain = bare and bare.isascii() and not any(letter in "/@%[]" or letter.isspace() for letter in bare)
    if not (colon and good and plain) or (":" in bare and bare == host):
        raise ConfigError(
            f"the address {address!r}",
            rule="host:port, an IPv6 address in brackets",
            fix="for example fl.example.org:8443",
            who="address",
        )
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_plaintext(host: str, *, secure_sum: bool) -> None:
    """Refuse to run a secure sum in plain text over a network.

    Args:
        host: name or address that is bound or connected to.
        secure_sum: whether one may be asked for.

    Raises:
        ConfigError: it is not on this machine, and a secure sum may be asked for.
    """
    if secure_sum and not is_loopback(host):
        raise ConfigError(
            f"no TLS at {host}, with a secure sum",
            rule="without TLS, secure sums run on loopback addresses only",
            fix="leave --insecure away; mycelia enrol makes the certificates",
            who="--insecure",
        )
