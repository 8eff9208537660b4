"""A real browser without a window, driven over its pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

CHROMIUM: Final = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_S: Final = 60.0

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Page:
    """One tab.

    Attributes:
        said: what the browser logged as an error or a warning, and uncaught exceptions.
    """

    def __init__(self, write: asyncio.StreamWriter, read: asyncio.StreamReader) -> None:
        self._write, self._ids = write, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.said: list[str] = []
        self._reader = asyncio.create_task(self._read(read))

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def attach(
        self, width: int, height: int = 900, *, scheme: str = "light", script: bool = True
    ) -> None:
        """Open the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])
        await self.call("Emulation.setScriptExecutionDisabled", value=not script)

    async def open(self, url: str) -> None:
        """Go there, and wait until the page is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What some JavaScript gives; promises are waited for."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until some JavaScript gives something that is true."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(AssertionError):  # the page was left while the script ran
                    found = await self.value(
                        f"""new Promise((done) => {{
                          const end = performance.now() + 1000;
                          const look = () => {{
                            let found;
                            try {{ found = {expression} }} catch {{ found = null }}
                            if (found || performance.now() > end) done(found); else setTimeout(look, 20);
                          }};
                          look();
                        }})"""
                    )
                    if found:
                        return found

    async def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _read(self, read: asyncio.StreamReader) -> None:
        while True:
            try:
                message = json.loads((await read.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(AssertionError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{said['entry']['source']}: {said['entry']['text']}")
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.said.append(str(said["args"]))

    def close(self) -> None:
        """No more is read."""
        self._reader.cancel()


@contextlib.asynccontextmanager
async def browser(
    profile: Path, width: int = 1280, height: int = 900, *, scheme: str = "light", script: bool = True
) -> AsyncIterator[Page]:
    """A browser with one tab, which ends with the block.

    Args:
        profile: a folder for its files.
        width: of the window.
        height: of the window.
        scheme: light or dark.
        script: whether pages run JavaScript of their own.
    """
    down, up = _pipe(), _pipe()
    # Chromium reads commands from file 3 and writes answers to file 4.
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f'exec "$@" 3<&{down[0]} 4>&{up[1]} {down[0]}<&- {up[1]}>&-', "bash", *command,
        pass_fds=(down[0], up[1]), start_new_session=True, stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(down[0])
    os.close(up[1])
    loop = asyncio.get_running_loop()
    read = asyncio.StreamReader(limit=2**27)
    into, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(read), os.fdopen(up[0], "rb", 0)
    )
    out, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(down[1], "wb", 0))
    page = Page(asyncio.StreamWriter(out, flow, None, loop), read)
    try:
        await page.attach(width, height, scheme=scheme, script=script)
        yield page
    finally:
        page.close()
        out.close()
        into.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own group: nothing else is in it
        await process.wait()


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 or 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
