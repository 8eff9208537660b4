"""What each partitioner promises beyond the laws of all."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency, kstest, spearmanr

from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.simulations.dealing import partition
from mycelia.simulations.partition import Dealt
from mycelia.simulations.partitioners import build

RNG = np.random.default_rng(0)
N, CLASSES = 3000, 6
EXAMPLES = Examples(
    RNG.standard_normal((N, 4)).astype(np.float32), RNG.integers(0, CLASSES, N), RNG.integers(0, 25, N) * 10
)


def deal(name: str, clients: int, examples: Examples = EXAMPLES, *, seed: int = 0, **options: Any) -> Dealt:
    ours = {key: options.pop(key) for key in ("per_client", "test_fraction", "overlap") if key in options}
    made = partition(build(name, **options), examples, clients, seed=seed, **ours)
    assert isinstance(made, Dealt)
    return made


def test_iid_sizes_differ_by_one_and_labels_are_independent_of_the_client() -> None:
    made = deal("iid", 7)
    assert sorted(set(made.sizes().tolist())) == [428, 429]
    assert chi2_contingency(made.label_counts(range(7))).pvalue > 1e-4


def test_contiguous_is_in_file_order() -> None:
    made = deal("contiguous", 50, per_client=20)
    for client in (0, 17, 49):
        assert made.indices(client).tolist() == list(range(client * 20, client * 20 + 20))
    everything = deal("contiguous", 7)
    assert np.concatenate([everything.indices(c) for c in range(7)]).tolist() == list(range(N))


def test_dirichlet_skew_goes_with_alpha() -> None:
    distance = [
        deal("dirichlet", 20, alpha=alpha).summary()["total_variation"] for alpha in (0.1, 1.0, 100.0)
    ]
    assert distance[0] > 0.5 > distance[1] > 0.15 > distance[2]


def test_dirichlet_shares_of_a_class_are_beta_distributed() -> None:
    # A client's share of one class under Dir(a, …, a) over n clients is Beta(a, (n - 1)·a).
    alpha, clients = 2.0, 8
    shares = [
        deal("dirichlet", clients, alpha=alpha, seed=seed).label_counts(range(clients)) for seed in range(60)
    ]
    first = np.array([counts[0] / counts.sum(axis=0) for counts in shares]).ravel()
    assert kstest(first, "beta", args=(alpha, (clients - 1) * alpha)).pvalue > 1e-4


def test_dirichlet_keeps_its_minimum_size() -> None:
    assert deal("dirichlet", 50, alpha=0.3, min_size=10).sizes().min() >= 10


def test_dirichlet_with_a_number_of_examples_draws_proportions_for_each_client() -> None:
    made = deal("dirichlet", 60, alpha=0.1, per_client=40)
    assert set(made.sizes().tolist()) == {40}
    skew = made.summary()
    assert skew["effective_classes"] < 2.6
    assert deal("dirichlet", 60, alpha=1e5, per_client=40).summary()["effective_classes"] > 5


def test_a_partition_that_is_too_skewed_ends_with_an_error() -> None:
    with pytest.raises(
        DataError, match=r"client \d+ has \d+ examples in the best of 100 draws, alpha = 0.001"
    ) as caught:
        deal("dirichlet", 100, alpha=0.001)
    assert "min_size" in caught.value.rule
    assert "raise alpha" in caught.value.fix


def test_what_cannot_be_dealt_is_refused_before_drawing() -> None:
    with pytest.raises(ConfigError, match="100 clients with 31 examples each need 3100, there are 3000"):
        deal("dirichlet", 100, min_size=31)
    with pytest.raises(ConfigError, match="need 3001"):
        deal("iid", 3001)
    with pytest.raises(ConfigError, match=r"overlap"):
        deal("iid", 100, per_client=31)
    with pytest.raises(ConfigError, match="its shards"):
        deal("shards", 2000)


def test_shards_give_few_labels_to_each_client() -> None:
    made = partition(build("shards", per_client=2), EXAMPLES, 50, seed=0)
    counts = made.label_counts(range(50))
    assert (made.sizes() == 60).all()
    # A shard of 30 from about 500 of a label spans two labels at most.
    assert (counts > 0).sum(axis=1).max() <= 4
    assert np.median((counts > 0).sum(axis=1)) <= 2


def test_quantity_by_a_power_law() -> None:
    sizes = np.sort(deal("quantity", 30, law="power", exponent=1.0).sizes())[::-1]
    harmonic = np.sum(1 / np.arange(1, 31))
    expected = 1 + (N - 30) / harmonic / np.arange(1, 31)
    assert np.abs(sizes - expected).max() <= 1
    by_client = deal("quantity", 30, law="power").sizes()
    assert abs(spearmanr(np.arange(30), by_client).statistic) < 0.6  # ranks are not the ids


def test_quantity_by_log_normal_sizes() -> None:
    sizes = np.concatenate([deal("quantity", 40, sigma=0.5, seed=s).sizes() for s in range(20)])
    logs = np.log(sizes) - np.log(sizes).mean()
    assert kstest(logs / 0.5, "norm").pvalue > 1e-4
    assert deal("quantity", 40, sigma=3.0, min_size=20).sizes().min() >= 20
    assert set(deal("quantity", 30, sigma=0.0).sizes().tolist()) == {100}


def test_quantity_decides_the_sizes_itself() -> None:
    with pytest.raises(ConfigError, match="quantity makes sizes uneven"):
        deal("quantity", 10, per_client=5)


def test_noise_grows_with_the_client_and_repeats() -> None:
    made = deal("noise", 4, level=2.0)
    zeros = np.zeros((20_000, 3), dtype=np.float32)
    for client in range(4):
        noisy = made.transform(client, zeros)
        assert noisy.dtype == np.float32
        assert noisy.std() == pytest.approx(2.0 * (client + 1) / 4, rel=0.02)
        assert (made.transform(client, zeros) == noisy).all()
        assert (made.transform(client, zeros, test=True) != noisy).any()
    assert deal("noise", 4, level=0.0).transform(3, zeros) is zeros
    assert deal("iid", 4).transform(3, zeros) is zeros
    assert made.transforms
    assert not deal("iid", 4).transforms


def test_noise_needs_inputs_of_floats() -> None:
    tokens = Examples(np.zeros((10, 3), dtype=np.int64), np.zeros(10, dtype=np.int64))
    with pytest.raises(DataError, match="inputs are int64"):
        deal("noise", 2, tokens)


def test_natural_follows_the_client_column() -> None:
    assert EXAMPLES.clients is not None
    made = deal("natural", 25)
    for client in range(25):
        assert made.indices(client).tolist() == np.flatnonzero(EXAMPLES.clients == client * 10).tolist()
        assert made.name(client) == str(client * 10)
    assert deal("natural", 0).sha256 == made.sha256


def test_natural_with_fewer_clients_draws_them() -> None:
    assert EXAMPLES.clients is not None
    made = deal("natural", 5)
    names = [int(made.name(c)) for c in range(5)]
    assert names == sorted(names)
    assert made.indices(2).tolist() == np.flatnonzero(EXAMPLES.clients == names[2]).tolist()
    assert {made.name(0) for seed in range(20) for made in [deal("natural", 5, seed=seed)]} != {names[0]}


def test_natural_names_may_be_text_and_limits_are_at_most() -> None:
    examples = Examples(np.zeros((6, 1)), np.zeros(6, np.int64), np.array(["b", "a", "b", "b", "c", "a"]))
    made = deal("natural", 3, examples, per_client=2)
    assert [made.name(c) for c in range(3)] == ["a", "b", "c"]
    assert made.sizes().tolist() == [2, 2, 1]


def test_natural_without_a_column_or_with_too_many_clients() -> None:
    with pytest.raises(DataError, match="no client column"):
        deal("natural", 2, Examples(EXAMPLES.inputs, EXAMPLES.targets))
    with pytest.raises(DataError, match="25 clients, not 26"):
        deal("natural", 26)
    with pytest.raises(ConfigError, match="natural"):
        deal("iid", 0)


def test_clusters_of_inputs_are_found() -> None:
    centre = np.repeat([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0]], [100, 200, 300], axis=0)
    inputs = (centre + RNG.standard_normal((600, 2))).astype(np.float32)
    examples = Examples(inputs, RNG.integers(0, 2, 600))
    made = deal("cluster", 12, examples, clusters=3)
    blob = np.repeat([0, 1, 2], [100, 200, 300])
    held = [set(blob[made.indices(c)].tolist()) for c in range(12)]
    assert all(len(blobs) == 1 for blobs in held)
    clients_of = sorted(held.count({b}) for b in range(3))
    assert clients_of[0] >= 2
    assert sum(clients_of) == 12


def test_clusters_of_labels_group_neighbouring_labels() -> None:
    counts = deal("cluster", 9, clusters=3, by="labels").label_counts(range(9)) > 0
    groups = {tuple(np.flatnonzero(row).tolist()) for row in counts}
    assert groups == {(0, 1), (2, 3), (4, 5)}


def test_clusters_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="5 clusters for 4 clients"):
        deal("cluster", 4)
    with pytest.raises(ConfigError, match="7 clusters of 6 labels"):
        deal("cluster", 20, clusters=7, by="labels")
    same = Examples(np.zeros((50, 2), np.float32), np.zeros(50, np.int64))
    with pytest.raises(DataError, match="1 distinct rows"):
        deal("cluster", 10, same, clusters=2)


@pytest.mark.parametrize("name", ["dirichlet", "shards"])
@pytest.mark.parametrize(
    "targets",
    [np.linspace(0, 1, N), np.zeros((N, 3), dtype=np.int64), np.full(N, -1)],
    ids=["float", "tokens", "negative"],
)
def test_label_skew_needs_labels(name: str, targets: np.ndarray) -> None:
    with pytest.raises(DataError, match="a class 0, 1, … for each example"):
        deal(name, 3, Examples(EXAMPLES.inputs, targets))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("dirichelt", {}, "did you mean 'dirichlet'"),
        ("dirichlet", {"alfa": 1.0}, "alfa: unknown key; did you mean 'alpha'"),
        ("dirichlet", {"alpha": 0}, "alpha = 0: must be greater than 0"),
        ("dirichlet", {"alpha": "small"}, "alpha = 'small': must be a valid number"),
        ("dirichlet", {"min_size": 0}, "min_size = 0"),
        ("shards", {"per_client": 0}, "per_client = 0"),
        ("quantity", {"law": "zipf"}, "must be 'power' or 'lognormal'"),
        ("quantity", {"sigma": -1.0}, "sigma = -1.0"),
        ("noise", {"level": -0.1}, "level = -0.1"),
        ("cluster", {"by": "colour"}, "must be 'inputs' or 'labels'"),
        ("iid", {"alpha": 1.0}, "alpha: unknown key"),
        ("no_such_module:rule", {}, "no_such_module"),
    ],
)
def test_bad_names_and_options(name: str, options: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, **options)
    assert says in str(caught.value)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_partitioners.py").write_text(
        "import numpy as np\n"
        "def modulo(examples, clients, *, seed, per_client, shift=0):\n"
        "    return (np.arange(len(examples)) + shift) % clients\n"
        "def greedy(examples, clients, *, seed, per_client):\n"
        "    return np.zeros(len(examples), dtype=int)\n"
        "def short(examples, clients, *, seed, per_client):\n"
        "    return np.zeros(3, dtype=int)\n"
        "def beyond(examples, clients, *, seed, per_client):\n"
        "    return np.arange(len(examples)) - 1\n"
        "class Reverse:\n"
        "    def __init__(self, by=1):\n"
        "        self.by = by\n"
        "    def deal(self, examples, clients, *, seed, per_client):\n"
        "        return (len(examples) - self.by - np.arange(len(examples))) % clients\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_partitioners", raising=False)


@pytest.mark.usefixtures("own")
def test_a_partitioner_of_the_user() -> None:
    made = deal("own_partitioners:modulo", 10, shift=1)
    assert made.indices(1).tolist() == list(range(0, N, 10))
    assert deal("own_partitioners:Reverse", 10, by=1).indices(9).tolist() == list(range(0, N, 10))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("own_partitioners:greedy", DataError, "client 1 has no examples, nor have 8 others"),
        ("own_partitioners:short", DataError, r"integers of shape \(3000,\)"),
        ("own_partitioners:beyond", DataError, "example 11 goes to client 10"),
    ],
)
def test_a_partitioner_of_the_user_that_is_wrong(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        deal(name, 10)
    with pytest.raises(ConfigError, match="unknown_option"):
        build(name, unknown_option=1)
