"""Partial sums: what a server that does not lead hands to the one that does.

The rule. A partial sum names the updates in it. The leader adds it whole if it waits for every one of them
and there is room for all, and else throws it away whole and asks for those that it still waits for again:
nothing can be taken out of a sum, and so an update that is in two of them is counted once. An update counts
as accepted only when the leader has added it, so a server that ends takes nothing with it but what is asked
for again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from mycelia.aggregator.round_log import BlobStore
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.engine.sums import ExactSum

__all__ = ["Given", "Item", "Partial", "accumulated", "add_partial", "read_partial", "write_partial"]

_PART: Final = 2**20


class Given(NamedTuple):
    """An update in a partial sum, as its device signed it.

    Attributes:
        client: the device.
        header: as it was sent.
        signature: over it.
        size: bytes of the payload.
    """

    client: int
    header: bytes
    signature: bytes
    size: int


class Item(NamedTuple):
    """The same for the leader, which has looked at the signature.

    Attributes:
        client: the device.
        at: the position.
        header: of the update.
        size: bytes of the payload.
    """

    client: int
    at: Position
    header: UpdateHeader
    size: int


class Partial(NamedTuple):
    """A partial sum.

    Attributes:
        items: what is in it.
        sha256: of the blob with the sum.
    """

    items: tuple[Item, ...]
    sha256: bytes


def write_partial(at: Position, sha256: bytes, given: Sequence[Given]) -> bytes:
    """What the leader is told of a partial sum."""
    items = [
        [one.client, one.header.hex(), one.signature.hex(), one.size] for one in given
    ]  # JSON: both sides are this program, and of the same version of the store
    return json.dumps({"at": list(at), "sum": sha256.hex(), "items": items}).encode()


def read_partial(body: bytes, keys: Mapping[int, bytes]) -> Partial:
    """The same read again; the devices' signatures are looked at.

    Args:
        body: as `write_partial` made it.
        keys: identity keys of the devices.

    Raises:
        Problem: a header that its device has not signed, or of another position.
    """
    said = json.loads(body)
    at = Position(*said["at"])
    items = []
    for client, data, signature, size in said["items"]:
        encoded = bytes.fromhex(data)
        header = UpdateHeader.verified(
            encoded, bytes.fromhex(signature), key=keys[client], client=client, at=at,
            sha256=UpdateHeader.decode(encoded).sha256,
        )  # fmt: skip
        items.append(Item(client, at, header, size))
    return Partial(tuple(items), bytes.fromhex(said["sum"]))


def add_partial(exact: ExactSum, partial: Partial, blobs: BlobStore) -> None:
    """Add a partial sum, block by block; whole or not at all.

    Raises:
        Problem: `STORE_CORRUPT`: the blob is missing, damaged, or no sum of this run; nothing was added.
    """
    with blobs.get(partial.sha256).open() as data:
        if len(data) != 8 * len(exact.accumulator):
            raise corrupt("it is no sum of this run", f"blob {partial.sha256.hex()}")
        for start in range(0, len(exact.accumulator), _PART // 8):
            part = np.frombuffer(data[8 * start : 8 * start + _PART], np.int64)
            exact.accumulator[start : start + len(part)] += torch.from_numpy(part.copy())
    exact.count += len(partial.items)


def accumulated(exact: ExactSum) -> Iterator[memoryview]:
    """The bytes of a sum."""
    view = exact.accumulator.numpy().data.cast("B")
    return (view[start : start + _PART] for start in range(0, len(view), _PART))
