"""The state of a run between two rounds, as two blobs: the model as it is sent, and all that goes with it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mycelia.aggregator.log_records import Merged
from mycelia.aggregator.merging import Blocks
from mycelia.aggregator.round_log import BlobStore, StoredBlob
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import Layout, check_tensors, read_tensors, write_tensors
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.engine.algorithms import ServerState
from mycelia.engine.program import Program
from mycelia.engine.schema import Role, model_sha256
from mycelia.engine.types import Tensors

__all__ = ["Counters", "Current", "first_state", "load_state", "store_blocks", "store_state"]

_FORMAT: Final = 1


@dataclass(frozen=True)
class Counters:
    """What a run counts.

    Attributes:
        round: rounds that are over, failed ones that were not tried again included.
        failed: failed attempts at rounds.
        failed_in_a_row: the newest of them.
        accepted: updates in published sums.
        dropped: devices that were asked and are in no sum.
        bytes_up: from devices.
        bytes_down: to devices.
        seconds: that the run took so far.
    """

    round: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    accepted: int = 0
    dropped: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Current:
    """The newest model and what belongs to it.

    Attributes:
        state: of the algorithm. The vector may be a map of the model's file.
        public: what the pipeline keeps from round to round.
        counters: of the run.
        model: the payload MODEL, mapped.
        layout: of it.
        model_sha256: of its bytes.
        state_sha256: of the blob with the rest.
    """

    state: ServerState
    public: Tensors
    counters: Counters
    model: Payload
    layout: Layout
    model_sha256: bytes
    state_sha256: bytes

    def values_sha256(self, program: Program) -> str:
        """Hash of the model's values, as simulations say it."""
        return model_sha256(program.unflatten(self.state.vector) | self.state.buffers)

    def close(self) -> None:
        """Let go of the model's file."""
        self.model.close()


def first_state(program: Program, state: ServerState, public: Tensors, blobs: BlobStore) -> Current:
    """The state before the first round, stored."""
    return store_state(program, state, public, Counters(), blobs)


def store_state(
    program: Program, state: ServerState, public: Tensors, counters: Counters, blobs: BlobStore
) -> Current:
    """Write both blobs; nothing refers to them yet.

    Args:
        program: the model and its loss.
        state: of the algorithm.
        public: of the pipeline.
        counters: of the run.
        blobs: where they go.

    Raises:
        Problem: `STORE`: they cannot be written.
    """
    return _stored(program, blobs.put(_model_parts(program, state)), state, public, counters, blobs)


def store_blocks(
    program: Program, blocks: Blocks, before: Current, counters: Counters, blobs: BlobStore
) -> Current:
    """As `store_state`, of a model that is merged while it is written.

    Args:
        program: the model and its loss.
        blocks: the merge.
        before: the state it comes from.
        counters: of the run.
        blobs: where they go.

    Raises:
        MergeFailed: the model is not sound; nothing was stored.
        Problem: `STORE`: they cannot be written.
    """
    if not _is_flat(before.layout):
        vector = torch.cat(list(blocks))
        state = replace(blocks.rest, vector=vector)
        return store_state(program, state, before.public, counters, blobs)
    model = blobs.put(_merged_parts(program, blocks, before))
    return _stored(program, model, blocks.rest, before.public, counters, blobs)


def _stored(
    program: Program,
    model: StoredBlob,
    state: ServerState,
    public: Tensors,
    counters: Counters,
    blobs: BlobStore,
) -> Current:
    rest = {f"extra/{name}": tensor for name, tensor in state.extra.items()}
    rest |= {f"public/{name}": tensor for name, tensor in public.items()}
    facts = {"format": _FORMAT, "model": model.sha256.hex(), "counters": vars(counters)}
    body = save(
        {name: tensor.detach().contiguous() for name, tensor in rest.items()},
        {"facts": json.dumps(facts, sort_keys=True)},
    )
    kept = blobs.put([body])
    return _opened(program, model, kept.sha256, state, public, counters)


def load_state(program: Program, merged: Merged, blobs: BlobStore) -> Current:
    """Both blobs, as the log names them.

    Args:
        program: the model and its loss.
        merged: the record.
        blobs: where they are.

    Raises:
        Problem: `STORE_CORRUPT`: a blob is missing, damaged, or of another model.
    """
    where = f"blob {merged.state_sha256.hex()}"
    with blobs.get(merged.state_sha256).open() as data:
        body = bytes(data)
    try:
        length = int.from_bytes(body[:8], "little")
        facts = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["facts"])
        tensors = load(body)
        counters = Counters(**facts["counters"])
        known = facts["format"] == _FORMAT and facts["model"] == merged.model_sha256.hex()
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise corrupt("it is no state of a run", where) from error
    if not known:
        raise corrupt("it belongs to another model, or to another version", where)
    extra = {name.removeprefix("extra/"): t for name, t in tensors.items() if name.startswith("extra/")}
    public = {name.removeprefix("public/"): t for name, t in tensors.items() if name.startswith("public/")}
    empty = ServerState(torch.empty(0), {}, extra)
    return _opened(program, blobs.get(merged.model_sha256), merged.state_sha256, empty, public, counters)


def _opened(
    program: Program,
    blob: StoredBlob,
    state_sha256: bytes,
    state: ServerState,
    public: Tensors,
    counters: Counters,
) -> Current:
    payload = Payload(_copy_on_write(blob), whole=blob.sha256)
    layout = check_tensors(payload.data, payload.size, program.schema, MODEL_ROLES)
    vector, buffers = _tensors(program, payload, layout)
    state = replace(state, vector=vector, buffers=buffers)
    return Current(state, public, counters, payload, layout, blob.sha256, state_sha256)


def _merged_parts(program: Program, blocks: Blocks, before: Current) -> Iterator[bytes | memoryview]:
    """The payload: the header of before, the new parameters as they come, and then the buffers."""
    yield bytes(before.model.data[: before.layout.start])
    for block in blocks:
        yield block.contiguous().view(torch.uint8).numpy().data
    for place in before.layout.places:
        if place.entry.role is not Role.PARAMETER:
            tensor = blocks.rest.buffers[place.entry.name].detach().reshape(-1).contiguous()
            yield tensor.view(torch.uint8).numpy().data


def _is_flat(layout: Layout) -> bool:
    """Whether all parameters lie side by side in one dtype, before everything else."""
    places = [place for place in layout.places if place.entry.role is Role.PARAMETER]
    first = layout.places[: len(places)] == tuple(places)
    return first and len({place.entry.dtype for place in places}) == 1


def _model_parts(program: Program, state: ServerState) -> Iterator[bytes]:
    params = program.unflatten(state.vector)
    return write_tensors(params | state.buffers, program.schema, MODEL_ROLES)


def _copy_on_write(blob: StoredBlob) -> mmap.mmap:
    """The bytes, mapped; whoever wrote into them would change a copy. Read-only memory is no tensor's."""
    with blob.path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _tensors(program: Program, payload: Payload, layout: Layout) -> tuple[Tensor, Tensors]:
    """The flat vector, without a copy where the parameters lie side by side in one dtype; and the buffers."""
    places = [place for place in layout.places if place.entry.role is Role.PARAMETER]
    rest = replace(
        layout, places=tuple(place for place in layout.places if place.entry.role is not Role.PARAMETER)
    )
    buffers = read_tensors(payload.data, rest)
    first = layout.start
    if _is_flat(layout) and first % places[0].entry.dtype.itemsize == 0:
        size = sum(place.size for place in places)
        raw = np.frombuffer(payload.data, np.uint8, size, first)
        return torch.from_numpy(raw).view(places[0].entry.dtype), buffers
    params = read_tensors(payload.data, replace(layout, places=tuple(places)))
    return program.flatten(params).clone(), buffers
