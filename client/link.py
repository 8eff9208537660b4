"""Frames over one gRPC stream to a server, and what it means when that ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc import aio

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import METHOD, OPTIONS, split_address
from mycelia.aggregator.wire.frames import (
    FrameError,
    Problem,
    Reason,
    Sequence,
    decode_server,
    encode_client,
)
from mycelia.client.backoff import Then, TransportError, then
from mycelia.client.diagnosis import diagnose
from mycelia.client.identity import DeviceKeys
from mycelia.privacy.secagg.certificates import Operator

__all__ = ["Link", "Server", "explained", "opened"]

_UNAVAILABLE: Final = 14
_OPTIONS: Final = (
    *OPTIONS,
    ("grpc.enable_retries", 0),  # what is tried again, and when, is decided here
    ("grpc.use_local_subchannel_pool", 1),  # nothing is remembered of an earlier try
)


@dataclass(frozen=True)
class Server:
    """Where a server is.

    Attributes:
        host: name or address.
        port: of it.
    """

    host: str
    port: int

    @classmethod
    def of(cls, address: str) -> Server:
        """Read `host:port`.

        Raises:
            ConfigError: it is none.
        """
        return cls(*split_address(address))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Link:
    """One stream.

    Args:
        call: of gRPC.
        server: at the other end.

    Attributes:
        server: as given.
        spoke: whether it has said anything.
    """

    def __init__(self, call: Any, server: Server) -> None:
        self._call, self.server = call, server
        self._in, self._out = Sequence(), Sequence()
        self._came: deque[pb.ServerFrame] = deque()
        self.spoke = False

    async def read(self) -> pb.ServerFrame:
        """The next frame.

        Raises:
            TransportError: the server has ended the stream, or it broke.
            FrameError: it is none, or not the next.
            aio.AioRpcError: the connection was never there.
        """
        if not self._came:
            data = await self._call.read()
            if not isinstance(data, bytes):  # aio.EOF
                raise _retried("the server has closed the stream", str(self))
            self._came.extend(decode_server(data).frames)
        frame = self._came.popleft()
        self._in.check(frame.seq)
        self.spoke = True
        if frame.HasField("goodbye") and not frame.goodbye.code:
            raise _retried("the server says Goodbye", str(self), frame.goodbye.delay_ms / 1000)
        if frame.HasField("goodbye"):
            raise explained(Problem.of(frame.goodbye), str(self), frame.goodbye.delay_ms / 1000)
        return frame

    async def write(self, *frames: pb.ClientFrame) -> bool:
        """Send frames together; they get their numbers. Whether the stream was still there."""
        for frame in frames:
            frame.seq = self._out.next()
        try:
            await self._call.write(encode_client(*frames))
        except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):
            return False  # `read` says why
        return True

    def __str__(self) -> str:
        return f"server {self.server}"


@contextlib.asynccontextmanager
async def opened(
    server: Server, keys: DeviceKeys, operator: Operator, *, insecure: bool
) -> AsyncIterator[Link]:
    """A stream to a server, which is cancelled at the end; what gRPC raises inside is explained.

    Raises:
        TransportError: there is no connection, or it ended.
    """
    if insecure:
        channel = aio.insecure_channel(str(server), _OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(operator.pem, keys.tls_key_pem, keys.certificate_pem)
        channel = aio.secure_channel(str(server), credentials, _OPTIONS)
    said, code = "", 0
    try:
        call = channel.stream_stream(METHOD, None, None)(None)
        link = Link(call, server)
        try:
            yield link
        finally:
            call.cancel()
    except aio.AioRpcError as error:
        code, said = error.code().value[0], error.details() or ""
    finally:
        await channel.close(None)
    if not code:
        return
    word, _, hint = said.partition(": ")
    if word in Reason.__members__:  # the server said so itself
        raise explained(Problem(Reason[word], hint, hint=hint), f"server {server}", 0.0)
    if link.spoke and code == _UNAVAILABLE:
        raise _retried(f"the connection broke ({said})", str(link))
    if code == _UNAVAILABLE:
        raise await diagnose(server.host, server.port, operator, insecure=insecure, said=said)
    name = next(status.name for status in grpc.StatusCode if status.value[0] == code)
    other = name == "UNIMPLEMENTED"
    raise TransportError(
        then(code),
        "another service answers there" if other else f"{name}: {said}",
        rule="the port for rounds of mycelia serve",
        fix="look at the port in server = […]: 8443 unless the server says otherwise" if other else "",
        who=f"server {server}",
    )


def _retried(found: str, who: str, delay_s: float = 0.0) -> TransportError:
    return TransportError(Then.RETRY, found, fix="nothing: it is tried again", who=who, delay_s=delay_s)


def explained(problem: Problem, who: str, delay_s: float) -> TransportError:
    """A problem that ended a stream, as an error of this device."""
    fixes = {
        Reason.SUPERSEDED: "end the other process that uses this identity, also on other machines",
        Reason.VERSION: "install a release that speaks one of the server's versions",
    }
    return TransportError(
        Then.RETRY if isinstance(problem, FrameError) else then(problem.status, problem.reason),
        f"{problem.reason}: {problem.hint}",
        fix=fixes.get(problem.reason, ""),
        who=who,
        reason=problem.reason,
        delay_s=delay_s,
    )
