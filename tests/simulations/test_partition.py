"""Partitions: storing, sharing, summarising, and the test examples that match a client."""

import json
from pathlib import Path

import numpy as np
import pytest

from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.simulations.dealing import partition
from mycelia.simulations.partition import Dealt, Overlapping, Partition
from mycelia.simulations.partitioners import build

RNG = np.random.default_rng(3)
N = 1200
EXAMPLES = Examples(RNG.random((N, 2), dtype=np.float32), RNG.integers(0, 5, N), RNG.integers(0, 9, N))
REGRESSION = Examples(EXAMPLES.inputs, RNG.random(N))


def dealt_by_hand() -> Dealt:
    labels = np.array([0, 0, 1, 1, 2, 2])
    order, offsets, ends = np.array([4, 0, 1, 3]), np.array([0, 1, 4]), np.array([1, 3])
    return Dealt(2, 0, labels, order, offsets, ends)


def test_reading_a_partition() -> None:
    made = dealt_by_hand()
    assert [made.indices(c).tolist() for c in (0, 1)] == [[4], [0, 1]]
    assert [made.test_indices(c).tolist() for c in (0, 1)] == [[], [3]]
    assert made.sizes().tolist() == [1, 2]
    assert made.label_counts(range(2)).tolist() == [[0, 0, 1], [2, 0, 0]]
    assert made.name(1) == "1"


@pytest.mark.parametrize("client", [-1, 2])
def test_there_is_no_such_client(client: int) -> None:
    with pytest.raises(DataError, match=rf"no client {client}"):
        dealt_by_hand().indices(client)
    with pytest.raises(DataError, match=r"clients are 0\.\.1"):
        dealt_by_hand().test_indices(client)


def test_summary_of_a_partition_made_by_hand() -> None:
    summary = dealt_by_hand().summary()
    assert json.loads(json.dumps(summary)) == summary
    # Labels of client 0: all of class 2; of client 1: all of class 0. Together: 2/3 class 0, 1/3 class 2.
    assert summary["labels"] == [[0, 2], [0, 0], [1, 0]]
    assert summary["total_variation"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert summary["effective_classes"] == pytest.approx(1)
    assert summary["gini"] == pytest.approx(1 / 6)
    assert (summary["clients"], summary["examples"], summary["classes"], summary["measured"]) == (2, 3, 3, 2)
    assert (summary["size_min"], summary["size_median"], summary["size_max"]) == (1, 1.5, 2)


def test_summaries_leave_out_what_there_is_none_of() -> None:
    assert "labels" not in partition(build("iid"), EXAMPLES, 201, seed=0).summary()
    assert "labels" in partition(build("iid"), EXAMPLES, 200, seed=0).summary()
    regression = partition(build("iid"), REGRESSION, 10, seed=0)
    assert "total_variation" not in regression.summary()
    with pytest.raises(DataError, match="only classes can be counted"):
        regression.label_counts(range(10))


def test_a_summary_of_a_million_clients_measures_a_thousand() -> None:
    made = partition(build("iid"), EXAMPLES, 10**6, seed=0, per_client=5, overlap=True)
    summary = made.summary()
    assert summary["measured"] == 1000
    assert summary["examples"] == 5 * 10**6


@pytest.mark.parametrize(
    ("name", "clients", "options"),
    [
        ("noise", 10, {"test_fraction": 0.2}),
        ("natural", 9, {}),
        ("iid", 10**6, {"per_client": 7, "overlap": True, "test_fraction": 0.3}),
        ("dirichlet", 5000, {"per_client": 7, "overlap": True}),
    ],
)
def test_saved_and_opened_it_is_the_same_and_mapped(
    tmp_path: Path, name: str, clients: int, options: dict
) -> None:
    made = partition(build(name), EXAMPLES, clients, seed=4, **options)
    made.save(tmp_path / "folder")
    opened = Partition.open(tmp_path / "folder")
    assert type(opened) is type(made)
    assert (opened.clients, opened.seed, opened.sha256) == (made.clients, made.seed, made.sha256)
    for client in (0, 3, clients - 1):
        assert opened.indices(client).tolist() == made.indices(client).tolist()
        assert opened.test_indices(client).tolist() == made.test_indices(client).tolist()
        assert opened.name(client) == made.name(client)
        inputs = EXAMPLES.inputs[made.indices(client)]
        assert (opened.transform(client, inputs) == made.transform(client, inputs)).all()
    assert isinstance(opened.labels, np.memmap)
    assert not opened.labels.flags.writeable


def test_saved_without_labels(tmp_path: Path) -> None:
    partition(build("iid"), REGRESSION, 10, seed=0).save(tmp_path)
    assert Partition.open(tmp_path).labels is None


def test_another_version_is_refused(tmp_path: Path) -> None:
    dealt_by_hand().save(tmp_path)
    file = tmp_path / "partition.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ConfigError, match="another version"):
        Partition.open(tmp_path)


def test_the_hash_tells_partitions_apart() -> None:
    made = [
        partition(build(name, **options), EXAMPLES, clients, seed=seed, test_fraction=fraction)
        for name, options, clients, seed, fraction in [
            ("iid", {}, 10, 0, 0.0),
            ("iid", {}, 10, 1, 0.0),
            ("iid", {}, 11, 0, 0.0),
            ("iid", {}, 10, 0, 0.2),
            ("noise", {}, 10, 0, 0.0),
            ("noise", {"level": 0.2}, 10, 0, 0.0),
        ]
    ]
    made += [
        partition(build(name, **options), examples, 10, seed=0, per_client=n, overlap=True)
        for name, options, examples, n in [
            ("iid", {}, EXAMPLES, 5),
            ("iid", {}, REGRESSION, 5),
            ("iid", {}, EXAMPLES, 6),
            ("dirichlet", {"alpha": 1.0}, EXAMPLES, 5),
            ("dirichlet", {"alpha": 2.0}, EXAMPLES, 5),
        ]
    ]
    assert len({one.sha256 for one in made}) == len(made)


# Test examples that match a client


def test_matched_examples_have_the_proportions_of_the_client() -> None:
    made = dealt_by_hand()
    test_labels = np.repeat([0, 1, 2], 50)
    assert set(test_labels[made.matched_test_indices(0, test_labels, 20)]) == {2}
    labels = np.array([0] * 30 + [1] * 10)
    one = Dealt(1, 0, labels, np.arange(40), np.array([0, 40]), np.array([40]))
    matched = one.matched_test_indices(0, test_labels, 20)
    assert np.bincount(test_labels[matched]).tolist() == [15, 5]
    assert (np.diff(matched) > 0).all()
    assert matched.tolist() == one.matched_test_indices(0, test_labels, 20).tolist()


def test_matched_examples_fall_short_where_the_test_set_does() -> None:
    labels = np.array([0] * 30 + [7] * 30)
    one = Dealt(1, 0, labels, np.arange(60), np.array([0, 60]), np.array([60]))
    test_labels = np.array([0, 0, 0, 1, 1])
    assert one.matched_test_indices(0, test_labels, 40).tolist() == [0, 1, 2]


def test_without_classes_the_test_examples_are_drawn_uniformly() -> None:
    made = partition(build("iid"), REGRESSION, 4, seed=0)
    matched = made.matched_test_indices(1, np.zeros(100), 30)
    assert len(set(matched.tolist())) == 30
    assert len(made.matched_test_indices(1, np.zeros(10), 30)) == 10


# Overlapping partitions


def test_a_million_clients_take_no_memory() -> None:
    made = partition(build("iid"), EXAMPLES, 10**6, seed=0, per_client=5, overlap=True)
    assert isinstance(made, Overlapping)
    sizes = made.sizes()
    assert sizes.shape == (10**6,)
    assert sizes.strides == (0,)
    assert not sizes.flags.writeable


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("shards", {"per_client": 5}, "iid and dirichlet can overlap"),
        ("iid", {"per_client": 0}, "each client draws 1 to 1200"),
        ("iid", {"per_client": 1201}, "each client draws 1 to 1200"),
    ],
)
def test_overlaps_that_cannot_be(name: str, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        partition(build(name), EXAMPLES, 10, seed=0, overlap=True, **options)


def test_an_overlapping_dirichlet_needs_labels() -> None:
    with pytest.raises(DataError, match="no classes"):
        partition(build("dirichlet"), REGRESSION, 10, seed=0, overlap=True, per_client=5)
