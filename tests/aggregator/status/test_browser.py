"""The status page in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mycelia.aggregator.status import Board, StatusServer
from tests.aggregator.status.boards import full, play, run, serving, start
from tests.aggregator.status.browser import browser, needs_chromium

pytestmark = [pytest.mark.browser, needs_chromium]

LIVE = "document.getElementById('live').className === 'on'"
ROUND = "document.querySelector('#run-study-12-now [data-round]').textContent"


def test_the_round_counter_moves_without_a_reload(tmp_path: Path) -> None:
    async def work() -> None:
        board = Board()
        full(board, time.time())
        async with serving(board) as port, browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            assert await page.value(ROUND) == "12"
            await page.value("window.mark = 'the same page'; document.getElementById('devices').id")
            board.phase("study-12", 13, 1, "train", time.monotonic() + 200)
            await page.until(f"{ROUND} === '13'")
            left = await page.until("document.querySelector('[data-ends]').textContent")
            assert left.endswith(" s left")
            await page.until(f"document.querySelector('[data-ends]').textContent !== {left!r}")
            start(board, "another")
            await page.until("document.querySelector('main').children[2].id === 'run-another-now'")
            order = await page.value("[...document.querySelector('main').children].map((part) => part.id)")
            assert order == [
                "head", "tiles", "run-another-now", "run-another-rounds", "run-study-12-now",
                "run-study-12-rounds", "run-warm-up-now", "run-warm-up-rounds", "devices", "refused",
            ]  # fmt: skip
            assert await page.value("window.mark") == "the same page"
            assert page.said == []

    run(work())


def test_it_comes_back_after_the_server_was_started_again(tmp_path: Path) -> None:
    async def work() -> None:
        board = Board()
        start(board)
        board.phase("study-12", 3, 1, "train", None)
        server = StatusServer(board, "127.0.0.1:0")
        port = await server.start()
        async with browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            await page.value("window.mark = 'the same page'")
            await server.stop()
            await page.until("document.getElementById('live').textContent.startsWith('no connection')")
            newer = Board()
            start(newer)
            newer.phase("study-12", 4, 1, "train", None)
            async with serving(newer, f"127.0.0.1:{port}"):
                await page.until(f"{LIVE} && {ROUND} === '4'")
                newer.phase("study-12", 5, 1, "train", None)
                await page.until(f"{ROUND} === '5'")
                assert await page.value("window.mark") == "the same page"

    run(work())


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror='hit=1'><script>hit=1</script>\u202e"

    async def work() -> None:
        board = Board()
        board.connected(1, evil)
        async with serving(board) as port, browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            name = "document.querySelector('#devices td.name').textContent"
            assert await page.value(name) == evil
            # What comes later goes another way, through the script.
            board.connected(1, f"2{evil}")
            board.outcome(evil, 1, 1, "DECLINED", evil, evil, evil)
            await page.until(f"{name}.startsWith('2<img')")
            await page.until(f"document.querySelector('#devices .error').textContent.includes('{evil[:8]}')")
            assert await page.value("document.querySelectorAll('img').length") == 0
            assert await page.value("document.querySelectorAll('script').length") == 1
            assert await page.value("window.hit === undefined")
            assert page.said == []

    run(work())


def test_the_readers_place_is_kept(tmp_path: Path) -> None:
    async def work() -> None:
        board = Board()
        start(board)
        play(board, "study-12", 60, [1, 2, 3])
        async with serving(board) as port, browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            box = "document.getElementById('run-study-12-rounds-scroll')"
            await page.value(f"{box}.scrollTo(0, 500); {box}.focus({{preventScroll: true}})")
            play(board, "study-12", 1, [1, 2, 3])
            await page.until("document.querySelectorAll('#run-study-12-rounds tbody tr').length === 61")
            assert await page.value(f"{box}.scrollTop") == 500
            assert await page.value("document.activeElement.id") == "run-study-12-rounds-scroll"

    run(work())


def test_without_javascript_everything_is_there(tmp_path: Path) -> None:
    async def work() -> None:
        board = Board()
        full(board, time.time())
        board.phase("study-12", 13, 1, "train", time.monotonic() + 200)
        async with serving(board) as port, browser(tmp_path, script=False) as page:
            answer = await page.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
            text = ""
            while "Read-only." not in text:  # its last words; scripts of a test do not run either
                tree = await page.call("DOMSnapshot.captureSnapshot", computedStyles=[])
                text = " ".join(tree["strings"])
            assert "errorText" not in answer
            for words in ("load again for news", "until ", "2.75 left", "ward 100"):
                assert words in text
            assert page.said == []

    run(work())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 700, 1280])
def test_the_page_fits_its_window(tmp_path: Path, width: int, scheme: str) -> None:
    """Nothing reaches beyond the window, and text stands out from its background."""

    async def work() -> None:
        board = Board()
        full(board, time.time())
        board.connected(5, "a-name-without-any-place-to-break-it-" * 6)
        board.phase("study-12", 13, 2, "configure", time.monotonic() + 200)
        async with serving(board) as port, browser(tmp_path, width, scheme=scheme) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            assert await page.value("document.documentElement.scrollWidth") == width
            background = await page.value("getComputedStyle(document.body).backgroundColor")
            assert background == {"light": "rgb(251, 251, 249)", "dark": "rgb(19, 23, 22)"}[scheme]
            weak = await page.value(
                """(() => {
                  const light = (color) => {
                    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((part) => {
                      const c = part / 255;
                      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
                    });
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                  };
                  const behind = (e) => {
                    for (; e; e = e.parentElement) {
                      const color = getComputedStyle(e).backgroundColor;
                      if (color !== "rgba(0, 0, 0, 0)") return color;
                    }
                    return getComputedStyle(document.body).backgroundColor;
                  };
                  const weak = new Set();
                  for (const e of document.querySelectorAll("main *, .top *")) {
                    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
                    const two = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
                    const contrast = (two[0] + 0.05) / (two[1] + 0.05);
                    if (contrast < 4.5) weak.add(e.className + " " + e.textContent + " " + contrast);
                  }
                  return [...weak];
                })()"""
            )  # WCAG 2.2, 1.4.3: a contrast of 4.5 or more
            assert weak == []

    run(work())


def test_a_second_page_of_devices_stays_there(tmp_path: Path) -> None:
    async def work() -> None:
        board = Board()
        full(board, time.time())
        async with serving(board) as port, browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until(LIVE)
            await page.value("document.querySelector('a[rel=next]').click()")
            await page.until(f"location.search === '?page=2' && {LIVE}")
            board.connected(120, "renamed")
            await page.until("document.getElementById('devices').textContent.includes('renamed')")
            assert not await page.value("document.getElementById('devices').textContent.includes('ward 99')")
            assert page.said == []

    run(work())


def test_a_browser_with_the_token_is_let_in_and_stays_live(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    token.chmod(0o600)

    async def work() -> None:
        board = Board()
        start(board)
        async with serving(board, "127.0.0.1:0", token) as port, browser(tmp_path / "profile") as page:
            # As if the reader had typed the password that the browser asks for.
            await page.call("Page.navigate", url=f"http://me:0123456789abcdef0123@127.0.0.1:{port}/")
            await page.until(LIVE)
            board.phase("study-12", 9, 1, "train", None)
            await page.until(f"{ROUND} === '9'")
            assert page.said == []

    run(work())
