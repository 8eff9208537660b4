"""A partition: which examples each client holds, and what is measured on them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, final

import numpy as np

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator
from mycelia.simulations.draws import DRAWS, Indices, apportion, pools_by_label
from mycelia.simulations.imbalance import effective_classes, gini, total_variation

__all__ = ["Dealt", "Overlapping", "Partition"]

Array = np.ndarray[Any, Any]

_FORMAT = 1
_MATRIX_CLIENTS = 200
_MEASURED_CLIENTS = 1000  # of an overlapping partition, whose clients are drawn when asked for


@dataclass(frozen=True, eq=False)
class Partition(ABC):
    """The examples of clients 0..clients-1, as indices into the training set.

    Args:
        clients: how many there are.
        seed: the root seed; a partition is a pure function of it, of the sorted ids and of the labels.
        labels: [N] classes of the training set; None where the targets are none.
    """

    clients: int
    seed: int
    labels: Array | None

    @abstractmethod
    def indices(self, client: int) -> Indices:
        """Sorted indices of the client's training examples."""

    @abstractmethod
    def test_indices(self, client: int) -> Indices:
        """Sorted indices of the examples that the client keeps for testing."""

    @abstractmethod
    def sizes(self) -> Indices:
        """[clients] numbers of training examples."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Hash of who holds what."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes .npy files that `open` maps into memory."""

    @staticmethod
    def open(folder: Path) -> Partition:
        """The partition saved in a folder, shared with every other process that opens it."""
        meta = json.loads((folder / "partition.json").read_text(encoding="utf-8"))
        if meta.pop("format", None) != _FORMAT:
            raise ConfigError("partition of another version", rule=f"format {_FORMAT}", who=str(folder))
        kind = meta.pop("kind")
        arrays = {
            file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in folder.glob("*.npy")
        }
        return _KINDS[kind]._restore(meta, arrays)

    def name(self, client: int) -> str:
        """What the data calls the client; its number where the data has no clients of its own."""
        return str(client)

    @property
    def transforms(self) -> bool:
        """Whether any client sees other inputs than the data set holds."""
        return getattr(self, "noise", None) is not None

    def transform(self, client: int, inputs: Array, *, test: bool = False) -> Array:
        """The inputs as this client sees them; `inputs` are all those of `indices` (or `test_indices`)."""
        return inputs

    def label_counts(self, clients: Array | range) -> Indices:
        """[len(clients), classes] training examples of each label."""
        if self.labels is None:
            raise DataError("the targets are no classes", rule="only classes can be counted", who="partition")
        labels, classes = self.labels, self.classes
        return np.stack([np.bincount(labels[self.indices(int(c))], minlength=classes) for c in clients])

    @cached_property
    def classes(self) -> int:
        """Number of classes, 0 where the targets are none."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    def matched_test_indices(self, client: int, test_labels: Array, limit: int) -> Indices:
        """Up to `limit` examples of a common test set in the proportions of the client's own labels.

        Without classes they are drawn uniformly. A label of which the test set has too few falls short.
        """
        rng = generator(self.seed, "matched-test", client=client)
        if self.labels is None:
            size = min(limit, len(test_labels))
            return np.sort(rng.choice(len(test_labels), size, replace=False))
        counts = np.bincount(self.labels[self.indices(client)], minlength=self.classes)
        chosen = [np.empty(0, dtype=np.int64)]
        for label, wanted in enumerate(apportion(counts, limit)):
            if wanted:
                pool = np.flatnonzero(test_labels == label)
                chosen.append(rng.choice(pool, min(int(wanted), len(pool)), replace=False))
        return np.sort(np.concatenate(chosen))

    def summary(self) -> dict[str, Any]:
        """Sizes and imbalance as JSON values.

        Keys: clients, examples, size_min, size_median, size_max, gini, sha256; with classes also classes,
        measured (how many clients the two means are over), total_variation, effective_classes; and for 200
        clients or fewer labels, the counts as [classes][clients].
        """
        sizes = self.sizes()
        found: dict[str, Any] = {
            "clients": self.clients,
            "examples": int(sizes.sum()),
            "size_min": int(sizes.min()),
            "size_median": float(np.median(sizes)),
            "size_max": int(sizes.max()),
            "gini": gini(sizes),
            "sha256": self.sha256,
        }
        if self.labels is not None:
            measured = self._measured()
            counts = self.label_counts(measured)
            found["classes"] = self.classes
            found["measured"] = len(measured)
            found["total_variation"] = float(total_variation(counts).mean())
            found["effective_classes"] = float(effective_classes(counts).mean())
            if self.clients <= _MATRIX_CLIENTS:
                found["labels"] = counts.T.tolist()
        return found

    def _measured(self) -> Array | range:
        return range(self.clients)

    @classmethod
    @abstractmethod
    def _restore(cls, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> Partition: ...


@final
@dataclass(frozen=True, eq=False)
class Dealt(Partition):
    """Every example belongs to at most one client.

    Args:
        order: indices grouped by client, those for training before those for testing.
        offsets: [clients + 1] where each group begins.
        ends: [clients] where its training examples end.
        names: [clients] names from the data, or None.
        noise: [clients] standard deviations of the noise on the inputs, or None.
    """

    order: Indices
    offsets: Indices
    ends: Indices
    names: Array | None = None
    noise: Array | None = None

    def indices(self, client: int) -> Indices:
        """See `Partition.indices`."""
        _check_client(client, self.clients)
        return self.order[self.offsets[client] : self.ends[client]]

    def test_indices(self, client: int) -> Indices:
        """See `Partition.test_indices`."""
        _check_client(client, self.clients)
        return self.order[self.ends[client] : self.offsets[client + 1]]

    def sizes(self) -> Indices:
        """See `Partition.sizes`."""
        return self.ends - self.offsets[:-1]

    def name(self, client: int) -> str:
        """See `Partition.name`."""
        return str(client if self.names is None else self.names[client])

    def transform(self, client: int, inputs: Array, *, test: bool = False) -> Array:
        """See `Partition.transform`: with noise, Gaussian noise of this client's own strength is added."""
        if self.noise is None or not self.noise[client]:
            return inputs
        rng = generator(self.seed, "input-noise/test" if test else "input-noise", client=client)
        noisy: Array = inputs + (self.noise[client] * rng.standard_normal(inputs.shape)).astype(inputs.dtype)
        return noisy

    @cached_property
    def sha256(self) -> str:
        """See `Partition.sha256`."""
        seed = self.seed if self.noise is not None else ""  # otherwise the indices say it all
        digest = sha256(f"partition {_FORMAT} {self.clients} {seed}".encode())
        for array in (self.order, self.offsets, self.ends, self.noise, self.names):
            digest.update(b"\x00" if array is None else np.ascontiguousarray(array).tobytes() + b"\x01")
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """See `Partition.save`."""
        names = ("order", "offsets", "ends", "labels", "names", "noise")
        _write(folder, self, {}, {name: getattr(self, name) for name in names})

    @classmethod
    def _restore(cls, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> Dealt:
        return cls(**{"labels": None, **meta, **arrays})


@final
@dataclass(frozen=True, eq=False)
class Overlapping(Partition):
    """Every client draws its examples from all when asked: a million clients cost nothing beforehand.

    Args:
        recipe: name (of `draws.DRAWS`) and options.
        per_client: examples each client draws.
        tests: how many of these it keeps for testing.
        examples: size of the training set.
    """

    recipe: Mapping[str, Any]
    per_client: int
    tests: int
    examples: int

    def indices(self, client: int) -> Indices:
        """See `Partition.indices`."""
        return np.sort(self._drawn(client)[self.tests :])

    def test_indices(self, client: int) -> Indices:
        """See `Partition.test_indices`."""
        return np.sort(self._drawn(client)[: self.tests])

    def sizes(self) -> Indices:
        """See `Partition.sizes`; a read-only view that takes no memory."""
        return np.broadcast_to(np.int64(self.per_client - self.tests), self.clients)

    @cached_property
    def sha256(self) -> str:
        """See `Partition.sha256`."""
        facts = [
            _FORMAT,
            self.clients,
            self.seed,
            dict(self.recipe),
            self.per_client,
            self.tests,
            self.examples,
        ]
        digest = sha256(json.dumps(facts, sort_keys=True).encode())
        if self.labels is not None:
            digest.update(np.ascontiguousarray(self.labels, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """See `Partition.save`."""
        names = ("recipe", "per_client", "tests", "examples")
        _write(folder, self, {name: getattr(self, name) for name in names}, {"labels": self.labels})

    def _drawn(self, client: int) -> Indices:
        _check_client(client, self.clients)
        options = dict(self.recipe)
        draw = DRAWS[options.pop("name")]
        return draw(generator(self.seed, "overlap", client=client), self._pools, self.per_client, **options)

    @cached_property
    def _pools(self) -> list[Indices]:
        if self.labels is None:
            return [np.arange(self.examples)]
        return pools_by_label(self.labels)

    def _measured(self) -> Array | range:
        return range(0, self.clients, max(1, -(-self.clients // _MEASURED_CLIENTS)))

    @classmethod
    def _restore(cls, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> Overlapping:
        return cls(**{"labels": None, **meta, **arrays})


_KINDS: Mapping[str, type[Partition]] = {"Dealt": Dealt, "Overlapping": Overlapping}


def _check_client(client: int, clients: int) -> None:
    if not 0 <= client < clients:
        raise DataError(f"there is no client {client}", rule=f"clients are 0..{clients - 1}", who="partition")


def _write(
    folder: Path, partition: Partition, more: Mapping[str, Any], arrays: Mapping[str, Array | None]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    meta = {
        "format": _FORMAT,
        "kind": type(partition).__name__,
        "clients": partition.clients,
        "seed": partition.seed,
        **more,
    }
    (folder / "partition.json").write_text(json.dumps(meta, default=dict), encoding="utf-8")
