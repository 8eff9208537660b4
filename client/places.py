"""Where a device puts payloads together: in files below one folder, so that a restart asks only for the rest.

A file is named by the hash of what will be in it. The model of a round is that of the evaluation before it,
and comes over the line once.
"""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Manifest
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.sinks import FileSink, MemorySink
from mycelia.aggregator.wire.transfer import Sink
from mycelia.client.transport import Place

__all__ = ["Places", "mapped"]

_SPARE: Final = 2**26  # bytes of the disk that stay free
_KEPT: Final = 2  # files that no work needs any more
_LARGEST_ENVELOPE: Final = 2**26
_EXPECTED: Final = (pb.MODEL, pb.MESSAGE, pb.ENVELOPE)


class Places:
    """The places of one device; called by its transport with each offer.

    Args:
        folder: made if it is not there, for this device's owner only.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._sinks: dict[Position, list[FileSink]] = {}

    def __call__(self, offer: pb.Offer, manifest: Manifest) -> Place:
        """See `Transport`.

        Raises:
            Problem: a payload of a kind that no server sends, or one there is no room for.
        """
        at = manifest.at
        if at is None or offer.kind not in _EXPECTED:
            raise Problem(
                Reason.WRONG_PHASE, f"a payload {pb.Kind.Name(offer.kind)}", rule="what a device takes"
            )
        if offer.kind == pb.ENVELOPE:
            if manifest.size > _LARGEST_ENVELOPE:
                raise Problem(
                    Reason.TOO_LARGE, f"a message of {manifest.size} bytes", rule=f"{_LARGEST_ENVELOPE}"
                )
            return Place(MemorySink(manifest.size))
        path = self._folder / f"{manifest.sha256.hex()}-{manifest.size}"
        kept = path.exists()
        try:
            room = shutil.disk_usage(self._folder).free - _SPARE
            if not kept and room < manifest.size:
                raise Problem(
                    Reason.SPOOL_FULL,
                    f"no room for {manifest.size} bytes",
                    rule=f"{_SPARE} bytes of a device's disk stay free",
                    fix="free space on the device",
                )
            sink = FileSink(path, manifest.size)
        except OSError as error:
            raise Problem(Reason.SPOOL_FULL, f"no file for it: {error.strerror or error}") from error
        self._sinks.setdefault(at, []).append(sink)
        return Place(sink, kept)

    def forget(self, at: Position) -> None:
        """Work is over: its files go, but for the newest."""
        for sink in self._sinks.pop(at, []):
            sink.close()
        used = {sink.path for sinks in self._sinks.values() for sink in sinks}
        spare = [path for path in self._folder.iterdir() if path not in used]
        spare.sort(key=lambda path: path.stat().st_mtime)
        for path in spare[:-_KEPT]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of all files, which stay."""
        for sinks in self._sinks.values():
            for sink in sinks:
                sink.close()
        self._sinks.clear()


def mapped(sink: Sink, size: int) -> mmap.mmap | memoryview:
    """The bytes of a payload that is complete."""
    if isinstance(sink, FileSink):
        with suppress(OSError):
            os.utime(sink.path)  # the newest stay longest
        return sink.map()
    return memoryview(sink.read(0, size))
