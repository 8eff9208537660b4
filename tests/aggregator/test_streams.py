"""Chunks take turns: few are in memory at a time, and whoever reads slowly keeps nobody waiting."""

import asyncio

import pytest

from mycelia.aggregator import streams
from mycelia.aggregator.streams import Turns
from tests.aggregator.connections import run


def test_few_chunks_are_handed_over_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_TURN_S", 60.0)
    most = streams._AT_ONCE

    async def test() -> None:
        turns, gate = Turns(), asyncio.Event()
        inside = 0

        async def write() -> None:
            nonlocal inside
            async with turns.taken():
                inside += 1
                assert inside <= most
                await gate.wait()
                inside -= 1

        writes = [asyncio.create_task(write()) for _ in range(3 * most)]
        while inside < most:
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*writes)
        assert turns._free._value == most

    run(test())


def test_a_slow_reader_gives_its_turn_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_TURN_S", 0.01)
    most = streams._AT_ONCE

    async def test() -> None:
        turns, read, written = Turns(), asyncio.Event(), asyncio.Event()

        async def stuck() -> None:
            async with turns.taken():
                await read.wait()

        writes = [asyncio.create_task(stuck()) for _ in range(most)]
        async with turns.taken():  # it comes through, although nobody has read
            written.set()
        assert written.is_set()
        read.set()
        await asyncio.gather(*writes)
        assert turns._free._value == most
        lost = asyncio.create_task(stuck())
        read.clear()
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert turns._free._value == most

    run(test())
