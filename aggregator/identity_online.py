"""What a server answers that holds the operator's folder: enrolment by token, and renewals on the stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from mycelia.aggregator.identity_authority import CERTIFICATE_DAYS, ROSTER, TOKENS, Authority
from mycelia.aggregator.identity_tokens import TokenFile
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK, Problem, Reason
from mycelia.privacy.secagg.enrolment import Request
from mycelia.privacy.secagg.key_files import read_public
from mycelia.privacy.secagg.private_keys import certificate_pem
from mycelia.privacy.secagg.roster import MAX_ROSTER_BYTES, Issuer

__all__ = ["OnlineAuthority", "issue_by_token", "renew_on_stream"]

_WAITING: Final = 64
"""Questions that may wait for the folder; each is answered in a few milliseconds."""
_Answer = TypeVar("_Answer")


class OnlineAuthority:
    """An operator's folder in the hands of a server, for an event loop; the files are used in a thread.

    The folder is locked only while a question is answered, so that `mycelia enrol` works beside the server.
    A new roster is handed on before the answer, so that whoever was enrolled is let in at once.

    Args:
        folder: the operator's.
        on_roster: takes the document of a new epoch; if it fails, so does the answer, and it is called with
            that document again when the same is asked again.
        days: validity of the certificates.
        wall: Unix time in seconds.

    Attributes:
        folder: as given.
    """

    def __init__(
        self,
        folder: Path,
        on_roster: Callable[[bytes], Awaitable[None]],
        *,
        days: int = CERTIFICATE_DAYS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self._on_roster, self._days, self._wall = folder, on_roster, days, wall
        self._thread = ThreadPoolExecutor(1, "operator")
        self._waiting = 0
        self._told = b""
        self._telling = asyncio.Lock()
        self._jobs: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """End; questions that were asked are answered first. Closing twice is harmless."""
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def enrol(self, asked: pb.EnrolRequest) -> pb.EnrolReply:
        """See `issue_by_token`.

        Raises:
            Problem: `BUSY` if too many are asking.
        """
        return await self._answer(
            partial(issue_by_token, self.folder, asked, now=self._now(), days=self._days)
        )

    async def renew(self, client: int, asked: pb.Renew) -> pb.Renewed:
        """See `renew_on_stream`.

        Raises:
            Problem: `BUSY` if too many are asking.
        """
        return await self._answer(
            partial(renew_on_stream, self.folder, client, asked, now=self._now(), days=self._days)
        )

    async def settle(self, client: int, identity_key: bytes) -> None:
        """Drop the older keys of a device that said Hello with these, see `Authority.settle`.

        Raises:
            DataError: the folder cannot be used, or another process is using it.
            Problem: `BUSY` if too many are asking.
        """

        def settle() -> None:
            with Authority.open(self.folder) as authority:
                authority.settle(client, identity_key, self._now())

        await self._answer(settle)

    async def tokens_until(self) -> int:
        """The last second that any unused token is good, Unix time; 0 with none.

        Raises:
            DataError: the tokens cannot be read.
        """
        return await self._in_thread(partial(TokenFile(self.folder / TOKENS).good_until, self._now()))

    async def _answer(self, question: Callable[[], _Answer]) -> _Answer:
        """Answer, and hand the new roster on; both go on if whoever asked has gone."""
        task = asyncio.create_task(self._work(question))
        self._jobs.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked has it, if they are still there

    async def _work(self, question: Callable[[], _Answer]) -> _Answer:
        answer = await self._in_thread(question)
        async with self._telling:
            document = await self._in_thread(partial(read_public, self.folder / ROSTER, MAX_ROSTER_BYTES))
            if document != self._told:
                await self._on_roster(document)
                self._told = document
        return answer

    async def _in_thread(self, call: Callable[[], _Answer]) -> _Answer:
        if self._waiting >= _WAITING:
            raise Problem(
                Reason.BUSY,
                f"{self._waiting} others are asking",
                rule="one is answered after the other",
                fix="ask again later",
                who="enrolment",
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._waiting -= 1

    def _now(self) -> int:
        return int(self._wall())


def issue_by_token(
    folder: Path,
    asked: pb.EnrolRequest,
    *,
    now: int,
    days: int = CERTIFICATE_DAYS,
) -> pb.EnrolReply:
    """Answer what came to the enrolment port; the entry says that the server made it.

    Args:
        folder: the operator's, which the server then holds.
        asked: as decoded, within its limits.
        now: Unix time in seconds.
        days: validity of the certificate.

    Raises:
        IdentityProblem: `FRAME`, `BAD_TOKEN`, `BAD_HELLO` or `REVOKED`.
        DataError: the folder cannot be used, or another process is using it.
    """
    request = Request(0, asked.request, asked.identity_key, asked.name, asked.proof, b"")
    request.check()  # a request that is none uses no token up
    with Authority.open(folder) as authority:
        authority.tokens.use(asked.token, request.encode(), now)
        entry, certificate = authority.issue(request, now, issuer=Issuer.ONLINE, days=days)
        roster, document = authority.roster, authority.document
        return pb.EnrolReply(
            client=entry.client,
            certificate=certificate_pem(certificate),
            authority=authority.operator.pem,
            roster_epoch=roster.epoch,
            roster_sha256=roster.sha256,
            roster=document if len(document) <= MAX_CHUNK else b"",
        )


def renew_on_stream(
    folder: Path, client: int, asked: pb.Renew, *, now: int, days: int = CERTIFICATE_DAYS
) -> pb.Renewed:
    """Answer a renewal on the stream of a device; the entry says that the server made it.

    Args:
        folder: the operator's, which the server then holds.
        client: whose stream it is.
        asked: as decoded, within its limits.
        now: Unix time in seconds.
        days: validity of the certificate.

    Raises:
        IdentityProblem: see `Authority.renew`.
        DataError: the folder cannot be used, or another process is using it.
    """
    request = Request(client, asked.request, asked.identity_key, "", asked.proof, asked.signature)
    with Authority.open(folder) as authority:
        _, certificate = authority.renew(request, now, issuer=Issuer.ONLINE, days=days)
        roster, document = authority.roster, authority.document
        return pb.Renewed(
            certificate=certificate_pem(certificate),
            roster_epoch=roster.epoch,
            roster_sha256=roster.sha256,
            roster=document if len(document) <= MAX_CHUNK else b"",
        )
