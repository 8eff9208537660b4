"""The spool: bounded memory and disk, and where there is no room, credit withheld and not data dropped."""

import errno
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.spool import COMING, OPEN, POOLED, UNDER_WAY, Spool, Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import LEAST_CHUNK, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.sinks import FileSink
from mycelia.aggregator.wire.transfer import Outgoing
from mycelia.engine.errors import ConfigError

AT = Position("study", 5, 1)
STALL = 10.0
LARGE = POOLED + LEAST_CHUNK + 1


def bytes_of(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Device:
    """A client with one payload to send."""

    def __init__(
        self, client: int, size: int, *, at: Position = AT, kind: pb.Kind = pb.UPDATE, seed: int = 0
    ) -> None:
        self.client, self.data = client, bytes_of(size, seed or client)
        payload = Payload(self.data, chunk_size=LEAST_CHUNK if size > LEAST_CHUNK else size)
        self.outgoing = Outgoing(payload, payload.offer(kind, at))

    def offer(self, spool: Spool, now: float = 0) -> bool:
        """Whether there was room."""
        reply = spool.offer(self.client, self.outgoing.restart(), now)
        if reply is None:
            return False
        assert reply.want is not None
        self.outgoing.want(reply.want)
        return True

    def send(self, spool: Spool, most: int | None = None, now: float = 0) -> Spooled | None:
        """Send what was asked for, up to so many chunks."""
        payload = None
        while most != 0 and (chunk := self.outgoing.next()) is not None:
            most = None if most is None else most - 1
            reply = spool.chunk(self.client, chunk, now)
            assert reply.client == self.client
            payload = payload or reply.payload
            if reply.want is not None:
                self.outgoing.want(reply.want)
        return payload

    def whole(self, spool: Spool) -> Spooled:
        assert self.offer(spool)
        payload = self.send(spool)
        assert payload is not None
        assert self.outgoing.done
        return payload


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", quota=4 * LARGE, stall_s=STALL)


def files(spool: Spool) -> list[Path]:
    return sorted(spool._folder.glob("*.part"))


def content(payload: Spooled) -> bytes:
    with payload.open() as data:
        return bytes(data)


def refused(reason: Reason, device: Device, spool: Spool) -> None:
    with pytest.raises(Problem) as caught:
        device.offer(spool)
    assert caught.value.reason is reason


# --- assembly ---


@pytest.mark.parametrize("size", [1, 100_000, POOLED, LARGE])
def test_a_payload_is_assembled_and_deleted(spool: Spool, size: int) -> None:
    device = Device(1, size)
    payload = device.whole(spool)
    assert content(payload) == device.data
    in_memory = size <= POOLED
    assert (spool.pool_used, spool.disk_used) == ((size, 0) if in_memory else (0, size))
    assert len(files(spool)) == (0 if in_memory else 1)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(spool))
    spool.release(payload)
    assert (spool.pool_used, spool.disk_used, files(spool)) == (0, 0, [])


def test_the_same_update_twice_counts_once(spool: Spool) -> None:
    device = Device(1, 100_000)
    payload = device.whole(spool)
    for released in (False, True):
        if released:
            spool.release(payload)
        assert device.offer(spool)  # nothing is asked for
        assert device.outgoing.done
        assert device.send(spool) is None
    late = pb.Chunk(sha256=device.outgoing.offer.sha256, index=0, data=b"x", at=AT.to_wire())
    assert spool.chunk(1, late, 0) == (1, None, None, None)


def test_another_update_of_the_same_position_is_refused(spool: Spool) -> None:
    first = Device(1, 1000).whole(spool)
    refused(Reason.EQUIVOCATION, Device(1, 1000, seed=9), spool)
    spool.release(first)
    refused(Reason.EQUIVOCATION, Device(1, 1000, seed=9), spool)
    Device(1, 1000, at=Position("study", 5, 2), seed=9).whole(spool)
    Device(1, 1000, kind=pb.ENVELOPE, seed=8).whole(spool)
    Device(1, 1000, kind=pb.ENVELOPE, seed=9).whole(spool)
    Device(2, 1000, seed=9).whole(spool)


def test_rounds_that_are_over_are_forgotten(spool: Spool) -> None:
    Device(1, LARGE).whole(spool)
    spool.release(Device(2, 1000).whole(spool))
    spool.forget("study", 5)
    spool.forget("another", 6)
    assert spool.disk_used == LARGE
    spool.forget("study", 6)
    assert (spool.disk_used, spool.pool_used, files(spool)) == (0, 0, [])
    assert not spool._taken
    assert not spool._first
    assert not spool._of


def test_one_client_cannot_fill_it(spool: Spool) -> None:
    for seed in range(1, OPEN + 1):
        assert Device(1, 1000, kind=pb.ENVELOPE, seed=seed).offer(spool)
    refused(Reason.BUSY, Device(1, 1000, kind=pb.ENVELOPE, seed=99), spool)
    assert Device(2, 1000).offer(spool)


def test_what_can_never_be_here_is_too_large(spool: Spool) -> None:
    refused(Reason.TOO_LARGE, Device(1, 4 * LARGE + 1), spool)
    assert spool.waiting == 0
    refused(
        Reason.TOO_LARGE,
        Device(1, LARGE),
        Spool(spool._folder / "two", quota=2 * LARGE, stall_s=1, most=LARGE - 1),
    )


def test_chunks_of_nothing_are_refused(spool: Spool) -> None:
    for at in (AT.to_wire(), None):
        with pytest.raises(Problem, match="nobody asked for") as caught:
            spool.chunk(1, pb.Chunk(sha256=bytes(32), data=b"x", at=at), 0)
        assert caught.value.reason is Reason.FRAME


def test_a_payload_that_stays_damaged_is_forgotten(spool: Spool) -> None:
    device = Device(1, LARGE)
    payload = Payload(device.data)
    device.outgoing = Outgoing(payload, payload.offer(pb.UPDATE, AT))
    assert device.offer(spool)
    bad = pb.Chunk(sha256=device.outgoing.offer.sha256, index=0, data=b"x", at=AT.to_wire())
    for _ in range(3):
        assert spool.chunk(1, bad, 0).problem is None
    with pytest.raises(Problem, match="damaged 4 times"):
        spool.chunk(1, bad, 0)
    assert (spool.disk_used, files(spool)) == (0, [])


@pytest.mark.parametrize(("quota", "stall_s"), [(-1, 1), (1, 0), (1, float("inf")), (1, float("nan"))])
def test_settings_out_of_range(tmp_path: Path, quota: int, stall_s: float) -> None:
    with pytest.raises(ConfigError, match="quota"):
        Spool(tmp_path, quota=quota, stall_s=stall_s)


def test_a_folder_has_one_owner(spool: Spool) -> None:
    with pytest.raises(ConfigError, match="another process"):
        Spool(spool._folder, quota=1, stall_s=1)
    spool.close()
    spool.close()
    Spool(spool._folder, quota=1, stall_s=1).close()


# --- room ---


def test_without_room_credit_is_withheld(spool: Spool) -> None:
    devices = [Device(client, LARGE) for client in range(1, 7)]
    assert [device.offer(spool) for device in devices] == [True] * 4 + [False] * 2
    assert (spool.waiting, spool.disk_used) == (2, 4 * LARGE)
    assert spool.deadline == STALL
    payloads = [device.send(spool) for device in devices[:4]]
    assert spool.tick(1) == []
    first = payloads[0]
    assert first is not None
    spool.release(first)
    assert spool.deadline == float("-inf")
    replies = spool.tick(2)
    assert [reply.client for reply in replies] == [5]
    assert replies[0].want is not None
    devices[4].outgoing.want(replies[0].want)
    payload = devices[4].send(spool)
    assert payload is not None
    assert content(payload) == devices[4].data
    assert spool.waiting == 1
    assert not devices[5].offer(spool)  # again, and no second place in the queue
    assert spool.waiting == 1
    spool.disconnect(6)
    assert spool.waiting == 0


def test_who_came_first_is_served_first(spool: Spool) -> None:
    for client in range(1, 5):
        assert Device(client, LARGE).offer(spool)
    big, small = Device(8, 2 * LARGE), Device(9, LARGE)
    assert not big.offer(spool)
    spool.disconnect(1)  # its file is kept
    assert not small.offer(spool)
    for client in (1, 2):
        payload = Device(client, LARGE).whole(spool)
        assert spool.tick(0) == []
        spool.release(payload)
    assert [reply.client for reply in spool.tick(0)] == [8]


def test_small_ones_go_past_those_that_wait_for_a_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quota=LARGE, stall_s=STALL, pool=200_000)
    assert Device(1, LARGE).offer(spool)
    assert not Device(2, LARGE).offer(spool)
    assert Device(3, 150_000).offer(spool)
    assert not Device(4, 150_000).offer(spool)  # neither memory nor disk
    assert spool.pool_used == 150_000


def test_small_ones_come_in_turn(spool: Spool) -> None:
    """Together they would be in memory several times while they are on their way; nobody is refused."""
    size = COMING // 8
    devices = {client: Device(client, size) for client in range(1, 31)}
    asked: list[int] = []
    for client, device in devices.items():
        reply = spool.offer(client, device.outgoing.restart(), 0)
        assert reply is not None
        if reply.want is not None:
            device.outgoing.want(reply.want)
            asked.append(client)
    assert (asked, spool.waiting, spool.pool_used) == (list(range(1, 9)), 22, COMING)
    spool.disconnect(30)
    for client in asked:
        payload = devices[client].send(spool)
        assert payload is not None
        assert content(payload) == devices[client].data
        for reply in spool.room(0):
            assert reply.want is not None
            devices[reply.client].outgoing.want(reply.want)
            asked.append(reply.client)
        spool.release(payload)
        assert spool.pool_used <= COMING + size
    assert asked == list(range(1, 30))
    assert (spool.waiting, spool.pool_used, files(spool)) == (0, 0, [])


def test_memory_that_is_full_spills_to_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quota=LARGE, stall_s=STALL, pool=200_000)
    payloads = [Device(client, 150_000).whole(spool) for client in (1, 2, 3)]
    assert (spool.pool_used, spool.disk_used) == (150_000, 300_000)
    assert [content(payload) == bytes_of(150_000, payload.client) for payload in payloads] == [True] * 3


# --- streams that end ---


def test_a_stall_ends_the_stream_and_keeps_what_came(spool: Spool) -> None:
    device = Device(1, LARGE)
    assert device.offer(spool)
    device.send(spool, most=10)
    assert spool.deadline == STALL
    assert spool.tick(STALL) == []  # ten chunks have come
    (reply,) = spool.tick(2 * STALL)
    assert reply.problem is not None
    assert reply.problem.reason is Reason.STALL
    spool.disconnect(1)
    assert spool.deadline == float("inf")
    assert device.offer(spool, now=20)
    assert len(device.outgoing) == 8
    payload = device.send(spool)
    assert payload is not None
    assert content(payload) == device.data


def test_a_small_payload_begins_again_after_a_cut(spool: Spool) -> None:
    device = Device(1, 5 * LEAST_CHUNK)
    assert device.offer(spool)
    device.send(spool, most=2)
    spool.disconnect(1)
    assert spool.pool_used == 0
    assert content(device.whole(spool)) == device.data


def test_a_spool_that_was_restarted_goes_on(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quota=4 * LARGE, stall_s=STALL)
    device, other = Device(1, LARGE), Device(2, LARGE)
    assert device.offer(spool)
    assert other.offer(spool)
    device.send(spool, most=12)
    other.send(spool, most=3)
    spool.close()
    spool = Spool(tmp_path, quota=LARGE, stall_s=STALL)
    assert spool.disk_used == 2 * LARGE
    assert device.offer(spool)  # the other one's file makes room
    assert spool.disk_used == LARGE
    sent = 18 - 12
    payload = device.send(spool, most=sent)
    assert payload is not None
    assert content(payload) == device.data
    assert len(files(spool)) == 1


def test_other_chunks_of_the_same_bytes_go_on_too(spool: Spool) -> None:
    device = Device(1, LARGE)
    assert device.offer(spool)
    device.send(spool, most=16)
    payload = Payload(device.data, chunk_size=2 * LEAST_CHUNK)
    device.outgoing = Outgoing(payload, payload.offer(pb.UPDATE, AT))
    assert device.offer(spool)
    assert len(device.outgoing) == 1
    assert device.send(spool, most=1) is not None
    assert spool.disk_used == LARGE


def test_a_file_that_was_whole_needs_nothing_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path, quota=LARGE, stall_s=STALL)
    device = Device(1, LARGE)
    device.whole(spool)
    spool.close()
    spool = Spool(tmp_path, quota=LARGE, stall_s=STALL)
    reply = spool.offer(1, device.outgoing.restart(), 0)
    assert reply is not None
    assert reply.payload is not None
    assert reply.want is not None
    assert not reply.want.missing
    assert content(reply.payload) == device.data


def test_a_full_disk_is_waited_for(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others fill the disk: nobody says when there is room again, so it is tried; nothing is dropped."""
    device, write, full = Device(1, LARGE), FileSink.write, True

    def fills_up(sink: FileSink, offset: int, data: bytes) -> None:
        if full and offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(sink, offset, data)

    monkeypatch.setattr(FileSink, "write", fills_up)
    assert device.offer(spool)
    sent = 0
    while (chunk := device.outgoing.next()) is not None:  # all that were under way come
        sent += 1
        if sent == 1:
            spool.chunk(1, chunk, 0)
            continue
        with pytest.raises(Problem, match="No space left") as caught:
            spool.chunk(1, chunk, 0)
        assert (caught.value.reason, caught.value.ends_stream) == (Reason.SPOOL_FULL, False)
    assert sent > 1
    assert spool.deadline == STALL

    def ask_again(now: float) -> pb.Chunk:
        (reply,) = spool.tick(now)
        assert reply.want is not None
        device.outgoing.want(reply.want)
        chunk = device.outgoing.next()
        assert chunk is not None
        return chunk

    with pytest.raises(Problem, match="No space left"):
        spool.chunk(1, ask_again(STALL), STALL)
    assert (spool.waiting, spool.deadline) == (1, 2 * STALL)
    full = False
    while device.outgoing.next() is not None:  # these were on their way as well, and got lost
        pass
    reply = spool.chunk(1, ask_again(2 * STALL), 2 * STALL)
    assert spool.waiting == 0
    if reply.want is not None:
        device.outgoing.want(reply.want)
    payload = device.send(spool, now=2 * STALL)
    assert payload is not None
    assert content(payload) == device.data


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_happens_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool"), quota=2 * LARGE, stall_s=STALL, pool=300_000)
    devices = [Device(client, data.draw(st.sampled_from([1000, 200_000, LARGE]))) for client in range(1, 6)]
    done: dict[int, Spooled] = {}
    for step in range(data.draw(st.integers(0, 40))):
        device = data.draw(st.sampled_from(devices))
        match data.draw(st.integers(0, 4)):
            case 0 if not len(device.outgoing):
                device.offer(spool, step)
            case 1:
                payload = device.send(spool, most=data.draw(st.integers(1, 12)), now=step)
                if payload is not None:
                    done[device.client] = payload
            case 2:
                spool.disconnect(device.client)
                device.outgoing.restart()
            case 3 if device.client in done:
                assert content(done[device.client]) == device.data
                spool.release(done.pop(device.client))
            case _:
                for reply in spool.tick(step):
                    if reply.want is not None:
                        devices[reply.client - 1].outgoing.want(reply.want)
                    else:
                        spool.disconnect(reply.client)
                        devices[reply.client - 1].outgoing.restart()
        assert 0 <= spool.pool_used <= 300_000
        assert 0 <= spool.disk_used <= 2 * LARGE
        assert spool.disk_used == sum(file.stat().st_size for file in files(spool))
    spool.forget("study", 6)
    assert (spool.pool_used, spool.disk_used, files(spool)) == (0, 0, [])
    spool.close()


def test_many_senders_share_the_credit(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", quota=200 * LARGE, stall_s=STALL)
    devices = [Device(client, LARGE) for client in range(1, 101)]
    assert devices[0].offer(spool)
    assert len(devices[0].outgoing) == 8  # alone, it has all that a transfer can have
    for device in devices[1:]:
        assert device.offer(spool)
    done: list[Spooled] = []
    for turn in range(100):  # a chunk of each in turn
        done += [payload for device in devices if (payload := device.send(spool, 1)) is not None]
        under_way = sum(len(device.outgoing) for device in devices)
        if turn >= 8:  # those who came before the others had more at first
            assert under_way <= max(UNDER_WAY, len(devices))
    assert len(done) == len(devices)
    late = [Device(client, LARGE) for client in range(201, 301)]
    for device in late:
        assert device.offer(spool)
    for device in late[50:]:
        device.send(spool, 1)
    assert sum(len(device.outgoing) for device in late[50:]) <= len(late[50:])
