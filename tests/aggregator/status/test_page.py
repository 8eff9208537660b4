"""The page over HTTP: who may read it, what it says, how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import pytest

from mycelia.aggregator.status import Board, StatusServer, app, available, connections
from mycelia.aggregator.status import page as page_module
from mycelia.engine.errors import ConfigError, DataError
from tests.aggregator.status.boards import Clock, ask, full, play, run, serving, start

PATHS = ("/", "/events", "/metrics", "/healthz", "/api/status", "/status.css", "/status.js")
TOKEN = "correct horse battery staple"


def token_file(folder: Path, text: str = TOKEN + "\n", mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


class Events:
    """A reader of `/events` that speaks HTTP 1.0, so that the answer has no chunks."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.head = ""

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, query: str = "", *headers: str) -> AsyncIterator[Events]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        lines = [f"GET /events{query} HTTP/1.0", "Host: 127.0.0.1", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        events = cls(reader)
        events.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        try:
            yield events
        finally:
            writer.close()

    async def block(self) -> dict[str, str]:
        """The next block: fields by name; a comment has the name ""."""
        text = (await self._reader.readuntil(b"\n\n")).decode().rstrip("\n")
        return {name: value.lstrip() for name, _, value in (line.partition(":") for line in text.split("\n"))}

    async def news(self) -> tuple[str, dict[str, str]]:
        """Id and parts of the next event."""
        while True:
            block = await self.block()
            if "data" in block:
                return block["id"], json.loads(block["data"])["parts"]

    async def rest(self) -> bytes:
        return await self._reader.read()


class Text(HTMLParser):
    """Text and tags of a page, and where it asks for more."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.links, self.ids = "", set[str](), list[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name != "style"
            assert not name.startswith("on")
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


# --- reading only ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_status_page_is_read_only(method: str) -> None:
    async def work() -> None:
        board = Board()
        start(board)
        async with serving(board) as port:
            before = board.version
            for path in (*PATHS, "/login", "/nothing"):
                answer = await ask(port, path, method)
                assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD"), path
            assert board.version == before

    run(work())


def test_head_is_get_without_a_body() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            for path in PATHS:
                answer = await ask(port, path, "HEAD")
                assert (answer.status, answer.body) == (200, b""), path

    run(work())


def test_every_answer_has_the_safe_headers() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            answers = [await ask(port, path, "HEAD") for path in (*PATHS, "/nothing")]
            answers += [await ask(port, "/", "POST"), await ask(port, "/", headers={"Host": "evil.example"})]
            for answer in answers:
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; ")
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert "*" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
                assert answer.headers["cache-control"] == "no-store"
                assert "server" not in answer.headers
            assert [answer.status for answer in answers[-3:]] == [404, 405, 421]

    run(work())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("127.0.0.1:9000", 200), ("localhost:8445", 200), ("LOCALHOST", 200),
        ("[::1]:8445", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421),
        ("10.0.0.1", 421), ("localhost.", 421), ("[127.0.0.1", 200), ("127.0.0.1@evil.example", 421),
    ],
)  # fmt: skip
def test_the_host_must_be_the_bound_one(host: str, status: int) -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            assert (await ask(port, "/healthz", headers={"Host": host})).status == status

    run(work())


def test_a_request_without_a_host_is_refused() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 421 ")
            writer.close()

    run(work())


def test_a_page_that_is_no_number_is_refused() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            for said in ("x", "-1", "0", "1e9", "", "9" * 50, "١"):
                for path in ("/", "/events", "/api/status"):
                    answer = await ask(port, f"{path}?page={quote(said)}")
                    assert answer.status == 400, (path, said)

    run(work())


# --- the token -------------------------------------------------------------------------------------


def test_another_address_needs_a_token() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "fl.example.org:8445"):
        with pytest.raises(ConfigError, match="anybody could read the page"):
            StatusServer(Board(), listen)


def test_the_token_opens_every_path_and_nothing_else_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    good = [f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(f"anybody:{TOKEN}"), basic(f":{TOKEN}")]
    bad = [
        "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Digest {TOKEN}", TOKEN,
        basic(f"{TOKEN}:"), basic(TOKEN), "Basic !", basic("a:b"), f"Bearer {TOKEN.upper()}",
    ]  # fmt: skip

    async def work() -> None:
        async with serving(Board(), "0.0.0.0:0", token_file(tmp_path)) as port:
            for path in PATHS:
                answer = await ask(port, path, "HEAD")
                assert answer.status == 401
                assert answer.headers["www-authenticate"].startswith("Basic ")
                assert (await ask(port, path, "HEAD", {"Authorization": good[0]})).status == 200
            for said in good:
                assert (await ask(port, "/", headers={"Authorization": said})).status == 200
            for said in bad:
                assert (await ask(port, "/", headers={"Authorization": said})).status == 401, said
            query = f"/?token={TOKEN.replace(' ', '+')}"
            assert (await ask(port, query)).status == 401
            # A name that somebody else points here is no name of this machine.
            evil = {"Authorization": good[0], "Host": "evil.example"}
            assert (await ask(port, "/", headers=evil)).status == 421

    run(work())
    assert any("has no TLS" in record.getMessage() for record in caplog.records)
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (TOKEN, 0o644, "its mode is 0644"),
        (TOKEN, 0o640, "its mode is 0640"),
        ("short", 0o600, "no token"),
        ("", 0o600, "no token"),
        ("line\nline\nline\nline", 0o600, "no token"),
        ("ungültig genug und lang", 0o600, "no token"),
    ],
)
def test_a_token_file_that_is_not_safe_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        StatusServer(Board(), "127.0.0.1:0", token_file(tmp_path, text, mode))


def test_a_token_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        StatusServer(Board(), "127.0.0.1:0", tmp_path / "nothing")


# --- what it says ----------------------------------------------------------------------------------


def test_the_page_says_what_the_board_knows() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)
    board.phase("study-12", 13, 2, "train", clock.monotonic + 90)

    async def work() -> None:
        async with serving(board) as port:
            answer = await ask(port)
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            shown = Text(answer.text)
            for words in (
                "agg-1", "Insecure:", "client 17: ends within 7 days", "149 of 150 seen", "Round 13 of 200",
                "attempt 2", "secure sum", "ε 1.25 spent of 4", "2.75 left", "Dropouts per phase",
                "QUORUM: 3 of 4 needed updates", "REVOKED: its id is revoked", "page 1 of 2", "10 MB",
                "20 MB", "4.1 kB", "2 waiting", "/srv/runs/warm-up", "9f" * 32, "finished",
            ):  # fmt: skip
                assert words in " ".join(shown.text.split()), words
            assert len(shown.ids) == len(set(shown.ids))
            assert "svg" in shown.tags
            last = Text((await ask(port, "/?page=2")).text)
            assert "ward 150" in last.text
            assert "ward 100" not in last.text

    run(work())


def test_a_page_of_an_empty_board() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            shown = Text((await ask(port)).text)
            assert "No run has started yet." in shown.text
            assert "No device has connected" in shown.text
            assert (await ask(port, "/healthz")).body == b"ok\n"

    run(work())


def test_nothing_comes_from_outside() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)

    async def work() -> None:
        async with serving(board) as port:
            links = Text((await ask(port)).text).links
            assert all(link.startswith(("/", "data:image/svg+xml,")) for link in links), links
            for link in links:
                if link.startswith("/"):
                    assert (await ask(port, link.partition("#")[0])).status == 200
            for path in ("/status.css", "/status.js"):
                text = (await ask(port, path)).text
                assert not any(mark in text for mark in ("http:", "https:", "@import", "url("))

    run(work())


def test_hostile_text_stays_text_and_the_page_small() -> None:
    evil = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'{{ 7*7 }}\u202e&" * 9
    board = Board()
    for number in range(4):
        name = f"{evil}{number}"
        start(board, name, rounds=1000)
        board._runs[name].about["algorithm"] = evil
        play(board, name, 1, [1, 2])
        for turn in range(200):
            reason = f"{evil}{turn}"
            board.round_ended(
                name, turn, result="failed", reason=reason, dropped={evil: 3}, metrics={evil: 1}
            )
            board.evaluation(name, turn, {evil: float("nan"), "accuracy": 0.5, "loss": float("inf")})
    board.stopped(f"{evil}3", evil * 20)
    board.server(evil, evil, evil, insecure=True)
    board.expiries([(evil, number) for number in range(100)])
    for client in range(1, 301):
        board.connected(client, evil)
        board.outcome(f"{evil}3", 1, client, "DECLINED", evil, evil, evil)
        board.refused(evil)

    async def work() -> None:
        async with serving(board) as port:
            answers = [await ask(port, path) for path in ("/", "/status.css", "/status.js")]
            shown = Text(answers[0].text)
            assert "img" not in shown.tags
            assert answers[0].text.count("<script") == 1
            assert "alert(1)" in shown.text
            assert "{{ 7*7 }}" in shown.text
            assert sum(len(answer.body) for answer in answers) < 200_000
            async with Events.opened(port) as events:
                _, parts = await events.news()
                for html in parts.values():
                    assert not Text(html).tags & {"img", "script"}

    run(work())


def test_the_json_is_the_snapshot() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)

    async def work() -> None:
        async with serving(board) as port:
            answer = await ask(port, "/api/status?page=2")
            assert answer.headers["content-type"] == "application/json"
            assert json.loads(answer.text) == board.snapshot(2)

    run(work())


def test_metrics_have_the_type_that_prometheus_wants() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            answer = await ask(port, "/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert "mycelia_clients_connected 0.0" in answer.text

    run(work())


# --- live ------------------------------------------------------------------------------------------


def test_a_change_is_told_and_only_what_changed() -> None:
    async def work() -> None:
        board = Board()
        start(board)
        board.phase("study-12", 1, 1, "train", None)
        async with serving(board) as port, Events.opened(port) as events:
            assert "content-type: text/event-stream" in events.head
            assert (await events.block()) == {"retry": "1000"}
            first, parts = await events.news()
            assert {"head", "tiles", "devices", "run-study-12-now"} < parts.keys()
            board.phase("study-12", 2, 1, "select", None)
            second, parts = await events.news()
            assert parts.keys() == {"run-study-12-now"}
            assert 'data-round="2"' in parts["run-study-12-now"]
            assert first != second

    run(work())


def test_a_stream_is_resumed_where_it_ended() -> None:
    async def work() -> None:
        board = Board()
        start(board)
        async with serving(board) as port:
            async with Events.opened(port) as events:
                last, _ = await events.news()
            board.connected(1, "ward 1")
            async with Events.opened(port, "", f"Last-Event-ID: {last}") as events:
                newer, parts = await events.news()
                assert parts.keys() == {"devices", "tiles"}
            async with Events.opened(port, f"?last={newer}") as events:
                assert await events.block() == {"retry": "1000"}
                board.refused("STALL")
                _, parts = await events.news()
                assert parts.keys() == {"refused"}
            # An id of another start of the server, or none at all, gives everything.
            for odd in ("ffffffff-3", "nonsense", f"{board.boot}-", f"{board.boot}-x", "-" * 9000):
                async with Events.opened(port, "", f"Last-Event-ID: {odd}") as events:
                    _, parts = await events.news()
                    assert "head" in parts

    run(work())


def test_a_quiet_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_ALIVE_S", 0.05)

    async def work() -> None:
        async with serving(Board()) as port, Events.opened(port) as events:
            await events.block()
            await events.news()
            for _ in range(3):
                assert await events.block() == {"": "nothing new"}

    run(work())


def test_many_changes_are_few_events() -> None:
    async def work() -> None:
        board = Board()
        start(board)
        async with serving(board) as port, Events.opened(port) as events:
            await events.news()
            for number in range(1000):
                board.phase("study-12", number, 1, "train", None)
                if number % 50 == 0:
                    await ask(port, "/healthz")
            seen = 0
            while True:
                _, parts = await events.news()
                seen += 1
                if 'data-round="999"' in parts["run-study-12-now"]:
                    break
            assert seen < 100

    run(work())


def test_live_pages_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_STREAMS", 2)

    async def work() -> None:
        async with serving(Board()) as port:
            async with Events.opened(port) as one, Events.opened(port) as two:
                await one.news()
                await two.news()
                answer = await ask(port, "/events")
                assert (answer.status, answer.headers["retry-after"]) == (503, "5")
                assert (await ask(port, "/")).status == 200
            while True:  # until the server has seen that they went
                async with Events.opened(port) as again:
                    if " 200 " in again.head:
                        break

    run(work())


# --- its life --------------------------------------------------------------------------------------


def test_it_ends_while_pages_are_open() -> None:
    async def work() -> None:
        board = Board()
        server = StatusServer(board, "127.0.0.1:0")
        port = await server.start()
        async with Events.opened(port) as events:
            await events.news()
            await server.stop()
            assert await events.rest() == b""
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", port)
        async with serving(board, f"127.0.0.1:{port}") as again:
            assert again == port

    run(work())


def test_stopping_what_never_started_is_fine() -> None:
    async def work() -> None:
        server = StatusServer(Board(), "127.0.0.1:0")
        await server.stop()
        await server.stop()

    run(work())


def test_signals_and_loggers_stay_the_programs_own(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        handlers = list(logging.getLogger().handlers)
        async with serving(Board()) as port:
            await ask(port)
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
            assert logging.getLogger().handlers == handlers
            assert not logging.getLogger("uvicorn").handlers

    with caplog.at_level(logging.INFO):
        run(work())
    assert not caplog.records  # nobody's visit is written down


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=r"cannot be bound.*\n.*Rule"):
                await StatusServer(Board(), f"127.0.0.1:{port}").start()

    run(work())


def test_a_request_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.05)

    async def work() -> None:
        async with serving(Board()) as port:
            for begun in (b"", b"GET / HTTP/1.1\r\nHost: local"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begun)
                assert await reader.read() == b""
                writer.close()
            async with Events.opened(port) as events:  # an answer may take as long as it likes
                await events.news()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.read() == b""
                writer.close()
                assert (await ask(port, "/healthz")).status == 200

    run(work())


def test_a_request_that_is_too_large_is_refused() -> None:
    async def work() -> None:
        async with serving(Board()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(work())


def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)

    async def work() -> None:
        async with serving(Board()) as port, Events.opened(port) as one, Events.opened(port) as two:
            await one.news()
            await two.news()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionResetError):  # closed or reset, as it comes
                assert await reader.read() == b""
            writer.close()

    run(work())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available()
    monkeypatch.setattr(page_module, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert not available()
    with pytest.raises(ConfigError, match=r"pip install 'mycelia\[status\]'"):
        StatusServer(Board())


def test_the_board_needs_nothing_of_the_extra() -> None:
    script = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client", "h11", "anyio"):
    sys.modules[name] = None
from mycelia.aggregator.status import Board, StatusServer, available
board = Board()
board.refused("STALL")
print(board.snapshot()["refused"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{'STALL': 1}\n", "")


def test_the_files_are_in_the_package() -> None:
    folder = resources.files("mycelia.aggregator.status") / "templates"
    assert {file.name for file in folder.iterdir()} == {
        "page.html.j2", "parts.html.j2", "status.css", "status.js",
    }  # fmt: skip


def test_what_is_spent_and_what_is_left_are_never_too_good() -> None:
    board = Board()
    start(board)
    board.phase("study-12", 1, 1, "waiting", None)
    board.privacy("study-12", 2.74235, 1e-6, 4.0, "client")  # 1.25765 are left

    async def work() -> None:
        async with serving(board) as port:
            shown = " ".join(Text((await ask(port)).text).text.split())
            assert "ε 2.743 spent of 4" in shown
            assert "1.257 left" in shown
            board.privacy("study-12", 4.5, 1e-6, 4.0, "client")
            shown = " ".join(Text((await ask(port)).text).text.split())
            assert "ε 4.5 spent of 4" in shown
            assert "0 left" in shown

    run(work())


def test_runs_in_progress_come_first() -> None:
    board = Board()
    for name in ("long", "a", "b", "c", "d"):
        start(board, name)
        if name != "long":
            board.finished(name, "", "")

    async def work() -> None:
        async with serving(board) as port:
            ids = Text((await ask(port)).text).ids
            shown = [name for name in ids if name.endswith("-now")]
            assert shown == ["run-long-now", "run-d-now", "run-c-now"]
            assert "others" in ids

    run(work())
