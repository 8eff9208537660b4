"""The enrolment port: a device without a certificate brings a token, and is enrolled by the server.

Everybody on the network may knock here, so that little is held for one who does: one small message, a few
tries a minute, a short time. The port is open only while there are tokens that somebody could still bring.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc import aio

from mycelia.aggregator.admission import told
from mycelia.aggregator.file_watch import FileWatch
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_authority import TOKENS
from mycelia.aggregator.identity_online import OnlineAuthority
from mycelia.aggregator.identity_tokens import TokenTries
from mycelia.aggregator.limits import Gate, Limits, network
from mycelia.aggregator.wire.channel import OPTIONS, split_address
from mycelia.aggregator.wire.frames import Problem, Reason, decode_enrol_request, encode
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg.certificates import IdentityProblem

__all__ = ["ENROL", "MAX_REQUEST", "EnrolmentPort"]

ENROL: Final = "/mycelia.Enrolment/Enrol"
"""The method of gRPC."""
MAX_REQUEST: Final = 2**14 + 2**10
"""Bytes of a request; more are refused before they are read."""
_LIMITS: Final = Limits(streams=64, address_streams=4, handshakes=50, address_handshakes=2)
_CONNECTIONS: Final = 256
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger(__name__)

Context = aio.ServicerContext[bytes, bytes]


class EnrolmentPort:
    """Listens for devices that bring a token.

    Args:
        keys: of this server; devices know its certificate by their operator.
        authority: enrols them.
        tries: of each address; by default five a minute.
        limits: of calls that are open; frames have none here.
        patience_s: seconds in which a connection is made, in which a call is over, and after which a
            connection that asks nothing is ended.
        wall: Unix time in seconds.

    Attributes:
        refused: how many calls ended for each reason.
        enrolled: how many calls were answered.
    """

    def __init__(
        self,
        keys: ServerKeys,
        authority: OnlineAuthority,
        *,
        tries: TokenTries | None = None,
        limits: Limits = _LIMITS,
        patience_s: float = 10.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._keys, self._authority, self._tries = keys, authority, tries or TokenTries()
        self._gate, self._patience, self._wall = Gate(limits), patience_s, wall
        self.refused, self.enrolled = Counter[Reason](), 0
        self._listen = ""
        self._server: aio.Server | None = None
        self._changed, self._moved = asyncio.Event(), asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._ending = False
        self._watch = FileWatch([authority.folder / TOKENS], self._changed.set)

    @property
    def open(self) -> bool:
        """Whether it listens at this moment."""
        return self._server is not None

    async def start(self, listen: str) -> int:
        """Take the address, and from then on listen whenever there are unused tokens.

        Args:
            listen: `host:port`; port 0 takes a free one.

        Returns:
            The port, which stays the same.

        Raises:
            ConfigError: the address cannot be bound.
            DataError: the tokens cannot be read.
        """
        host, _ = split_address(listen)
        until = await self._authority.tokens_until()
        server, port = self._bind(listen)  # also without a token: that it works is known now
        self._listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await server.start()
        self._server = server
        if not until:
            await self._close()
        self._watch.start()
        self._keeper = asyncio.create_task(self._keep())
        return port

    async def stop(self) -> None:
        """End; calls that are being answered get their answer. Stopping twice is harmless."""
        self._watch.stop()
        self._ending = True
        self._changed.set()
        if self._keeper is not None:
            await self._keeper  # told and not cancelled: gRPC's own waiting could swallow that
            self._keeper = None
        await self._close()

    async def wait_for(self, open: bool) -> None:
        """Until it is open, or closed."""
        while self.open is not open:
            self._moved.clear()
            await self._moved.wait()

    # --- open and closed --------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Open and close as there are tokens; a change of their file or the end of the last one wakes it."""
        while not self._ending:
            self._changed.clear()
            until = 0
            try:
                until = await self._authority.tokens_until()
                if until and self._server is None:
                    server, _ = self._bind(self._listen)
                    await server.start()
                    self._server = server
                    self._moved.set()
                    _log.info("the enrolment port %s is open", self._listen)
            except Problem:  # many are asking, and each of them wakes this when it is answered
                until = int(self._wall())
            except (ConfigError, DataError) as error:
                _log.error("the enrolment port stays closed: %s", error)
            if not until and self._server is not None:
                await self._close()
                _log.info("the enrolment port %s is closed: there is no unused token", self._listen)
            left = max(1.0, until + 1 - self._wall()) if until else None
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._patience)
            self._moved.set()

    def _bind(self, listen: str) -> tuple[aio.Server, int]:
        service, method = ENROL[1:].split("/")
        enrol = grpc.unary_unary_rpc_method_handler(self._enrol)  # bytes: they are read in there
        milliseconds = round(1000 * self._patience)
        settings: dict[str, int] = dict(OPTIONS)
        settings |= {
            "grpc.max_receive_message_length": MAX_REQUEST,
            "grpc.so_reuseport": 0,  # another process on this port is an error
            "grpc.max_metadata_size": 2**13,
            "grpc.max_concurrent_streams": 1,
            "grpc.max_allowed_incoming_connections": _CONNECTIONS,
            "grpc.server_handshake_timeout_ms": milliseconds,
            "grpc.max_connection_idle_ms": milliseconds,
            "grpc.max_connection_age_ms": milliseconds,  # whoever sends no message has no more than that
            "grpc.max_connection_age_grace_ms": milliseconds,
        }
        server = aio.server(
            handlers=[grpc.method_handlers_generic_handler(service, {method: enrol})],
            options=list(settings.items()),
        )
        try:
            credentials = grpc.ssl_server_credentials([(self._keys.tls_key_pem, self._keys.certificate_pem)])
            port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"{listen} cannot be bound",
                rule="an address of this machine, and a port that nobody uses",
                fix="end the other process, or enrol on another port",
                who="server.enrol_listen",
            ) from error
        return server, port

    # --- a call -----------------------------------------------------------------------------------

    async def _enrol(self, data: bytes, context: Context) -> bytes:
        address, clock = network(context.peer()), asyncio.get_running_loop().time()
        problem: Problem
        try:
            self._gate.enter(address, clock)
            try:
                self._tries.check(address, clock)
                asked = decode_enrol_request(data)
                reply = encode(await self._authority.enrol(asked))
                self.enrolled += 1
                return reply
            finally:
                self._gate.leave(address)
                self._changed.set()
        except Problem as error:
            problem = error
        except IdentityProblem as error:
            problem = told(error)
        except DataError as error:  # the operator's command has the folder at this moment
            _log.warning("a device was not enrolled: %s", error)
            problem = Problem(
                Reason.BUSY,
                "the operator's folder is in use, or cannot be used",
                rule="one process at a time uses it",
                fix="ask again in a minute; then ask the operator",
                who="enrolment",
            )
        except Exception as error:  # of this call only
            problem = _incident(error)
        self.refused[problem.reason] += 1
        await _abort(context, problem)
        raise AssertionError("abort does not return")  # pragma: no cover


async def _abort(context: Any, problem: Problem) -> None:
    await context.abort(_CODES[problem.status], f"{problem.reason}: {problem.hint}")


def _incident(error: Exception) -> Problem:
    """An error that nobody foresaw, with a number that is in the log."""
    number = secrets.token_hex(4)
    _log.error("incident %s at the enrolment port", number, exc_info=error)
    return Problem(
        Reason.BUG,
        f"incident {number}",
        rule="this should not happen",
        fix="the server's log has more under this number",
        who="enrolment",
    )
