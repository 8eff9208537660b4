"""One-time tokens: who brings one may enrol one device, without the operator looking.

A token is 256 random bits, so its SHA-256 tells nothing and needs no salt. Only hashes are kept.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Final

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason, date
from mycelia.privacy.secagg.key_files import SECRET, read_secret, write_file
from mycelia.privacy.secagg.keys import Random

__all__ = ["MAX_TOKENS", "Token", "TokenFile", "TokenTries"]

MAX_TOKENS: Final = 10_000
"""Tokens that may be unused at a time."""
_TOKEN_BYTES: Final = 32
_KEPT: Final = 90 * 86_400  # so long a used token says that it was used
_MAX_FILE: Final = 2**24


@dataclass(frozen=True)
class Token:
    """What is kept of a token.

    Attributes:
        sha256: of the token, in hex.
        expires: last second that it is good, Unix time.
        used_by: SHA-256 of the request that used it, in hex, or "".
    """

    sha256: str
    expires: int
    used_by: str = ""


class TokenFile:
    """The tokens of one operator's folder.

    Args:
        path: the file.

    Attributes:
        EMPTY: the file with no token in it.
    """

    EMPTY: ClassVar[bytes] = b'{"version": 1, "tokens": []}\n'

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self, count: int, expires: int, now: int, random: Random = os.urandom) -> list[str]:
        """Make tokens; this is the only time that they are seen.

        Args:
            count: how many.
            expires: last second that they are good, Unix time.
            now: Unix time in seconds.
            random: where they come from.

        Returns:
            each in hex, 64 characters.

        Raises:
            DataError: too many, or the file is damaged.
        """
        tokens = self._read()
        if count < 1 or count + sum(not token.used_by for token in tokens) > MAX_TOKENS:
            raise DataError(
                f"{count} new tokens",
                rule=f"at least 1, and at most {MAX_TOKENS} unused ones",
                who=str(self._path),
            )
        secrets = [random(_TOKEN_BYTES) for _ in range(count)]
        self._write([*tokens, *(Token(sha256(secret).hexdigest(), expires) for secret in secrets)], now)
        return [secret.hex() for secret in secrets]

    def unused(self, now: int) -> int:
        """How many could still be used; with none, nobody needs the enrolment port."""
        return sum(not token.used_by and token.expires >= now for token in self._read())

    def good_until(self, now: int) -> int:
        """The last second that any of those that could still be used is good, Unix time; 0 with none."""
        ends = [token.expires for token in self._read() if not token.used_by and token.expires >= now]
        return max(ends, default=0)

    def use(self, token: bytes, request: bytes, now: int) -> None:
        """Use a token up for a request; the same request may come again, if its answer was lost.

        Args:
            token: as it came.
            request: the bytes that it allows.
            now: Unix time in seconds.

        Raises:
            IdentityProblem: `BAD_TOKEN`: unknown, expired, or used by another request.
        """
        tokens, wanted, by = self._read(), sha256(token).hexdigest(), sha256(request).hexdigest()
        place = -1
        for index, kept in enumerate(tokens):  # all of them, whichever it is
            place = index if hmac.compare_digest(kept.sha256, wanted) else place
        if place < 0:
            raise _bad("the token is not known", "mycelia enrol token makes new ones")
        found = tokens[place]
        if found.used_by:
            if hmac.compare_digest(found.used_by, by):
                return
            raise _bad(
                "the token was used already", "each device needs a token of its own: mycelia enrol token"
            )
        if now > found.expires:
            raise _bad(f"the token expired on {date(found.expires)}", "mycelia enrol token makes new ones")
        tokens[place] = replace(found, used_by=by)
        self._write(tokens, now)

    def _read(self) -> list[Token]:
        data = read_secret(self._path, _MAX_FILE)
        try:
            whole = json.loads(data.decode())
            if set(whole) != {"version", "tokens"} or whole["version"] != 1:
                raise ValueError("another version")
            tokens = [Token(**token) for token in whole["tokens"]]
            for token in tokens:
                hashes = [bytes.fromhex(token.sha256), bytes.fromhex(token.used_by)]
                if len(hashes[0]) != _TOKEN_BYTES or type(token.expires) is not int:
                    raise ValueError("a field of another kind")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                "it was damaged",
                rule="only mycelia enrol writes it",
                fix=f"write {TokenFile.EMPTY.decode().strip()} into it: then no token is valid any more",
                who=str(self._path),
            ) from error
        return tokens

    def _write(self, tokens: list[Token], now: int) -> None:
        kept = [asdict(token) for token in tokens if token.expires + _KEPT >= now]
        data = json.dumps({"version": 1, "tokens": kept}, indent=1)
        write_file(self._path, data.encode() + b"\n", SECRET, replace=True)


class TokenTries:
    """At most so many tries a minute for each address; nobody's clock is read here.

    Args:
        most: tries in `period`.
        period: seconds.
        addresses: how many are remembered; while so many are trying, a new one is refused.
    """

    def __init__(self, most: int = 5, period: float = 60.0, addresses: int = 10_000) -> None:
        self._most, self._period, self._addresses = most, period, addresses
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str, clock: float) -> None:
        """Count a try, or refuse it.

        Args:
            address: where it comes from, also as gRPC names a peer; its port does not count, and IPv6 counts
                by network of 64 bits, which one host has for itself.
            clock: seconds of a monotonic clock.

        Raises:
            IdentityProblem: `RATE`.
        """
        while self._tries and clock - next(iter(self._tries.values()))[-1] >= self._period:
            self._tries.popitem(last=False)  # ordered by their last try
        place = _network(address)
        tries = self._tries.get(place, deque(maxlen=self._most))
        full = len(self._tries) >= self._addresses and place not in self._tries
        if full or (len(tries) == self._most and clock - tries[0] < self._period):
            raise IdentityProblem(
                IdentityReason.RATE,
                "too many tries to enrol",
                rule=f"at most {self._most} in {self._period:g} s from one address",
                fix="wait a minute",
                who="enrolment",
            )
        tries.append(clock)
        self._tries[place] = tries
        self._tries.move_to_end(place)


def _network(address: str) -> str:
    host = address.replace("%5B", "[").replace("%5D", "]").removeprefix("ipv4:").removeprefix("ipv6:")
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def _bad(found: str, fix: str) -> IdentityProblem:
    return IdentityProblem(
        IdentityReason.BAD_TOKEN, found, rule="a token enrols one device, once", fix=fix, who="enrolment"
    )
