"""Each selector's own distribution, and how selectors are named."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from mycelia.aggregator.selectors import build
from mycelia.engine.errors import ConfigError

ROUNDS = 3000


def test_uniform_draws_every_client_and_every_place_equally_often() -> None:
    selector = build("uniform")
    drawn = np.array([selector.select(range(12), 5, round=r, seed=1) for r in range(ROUNDS)])
    for place in range(5):
        assert chisquare(np.bincount(drawn[:, place], minlength=12)).pvalue > 1e-4


def test_weighted_follows_the_sequential_draw() -> None:
    # Probability of the ordered pair (a, b) without replacement: w_a/W · w_b/(W - w_a).
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    selector = build("weighted")
    drawn = [tuple(selector.select(range(4), 2, round=r, seed=2, weights=weights)) for r in range(ROUNDS)]
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    expected = np.array([weights[a] / 10 * weights[b] / (10 - weights[a]) for a, b in pairs])
    observed = np.array([drawn.count(pair) for pair in pairs])
    assert chisquare(observed, expected * ROUNDS).pvalue > 1e-4


def test_weights_of_its_own_take_the_place_of_sizes_and_zero_is_never_drawn() -> None:
    selector = build("weighted", weights=[0.0, 1.0, 0.0, 1e-300])
    for r in range(50):
        drawn = selector.select(range(4), 4, round=r, seed=0, weights=np.ones(4))
        assert sorted(drawn) == [1, 3]


def test_weighted_without_usable_weights() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        build("weighted").select(range(3), 1, round=0, seed=0)
    with pytest.raises(ConfigError, match="2 weights for 3 clients"):
        build("weighted", weights=[1, 2]).select(range(3), 1, round=0, seed=0)
    with pytest.raises(ConfigError, match=r"weights\.1 = -1"):
        build("weighted", weights=[1, -1])


def test_poisson_sizes_are_binomial_and_may_be_zero() -> None:
    selector = build("poisson")
    assert not selector.fixed_size
    sizes = [len(selector.select(range(20), 2, round=r, seed=3)) for r in range(ROUNDS)]
    expected = binom.pmf(np.arange(6), 20, 0.1) * ROUNDS
    observed = np.bincount(np.minimum(sizes, 6), minlength=7)
    assert chisquare(observed, [*expected, ROUNDS - expected.sum()]).pvalue > 1e-4
    assert observed[0] > 0


def test_poisson_tosses_a_coin_for_every_client_also_beyond_one_block() -> None:
    drawn = build("poisson").select(range(200_000), 20_000, round=0, seed=0)
    counts = np.histogram(drawn, bins=20, range=(0, 200_000))[0]
    assert abs(counts - 1000).max() < 6 * np.sqrt(1000 * 0.9)  # six standard deviations
    assert len(build("poisson").select(range(7), 7, round=0, seed=0)) == 7


def test_poisson_with_more_expected_than_there_are() -> None:
    with pytest.raises(ConfigError, match="8 expected of 7"):
        build("poisson").select(range(7), 8, round=0, seed=0)


def test_groups_take_turns_and_sizes_within_one_are_binomial() -> None:
    """A client is in one group for good; a coin of probability groups x k/N for each of those in turn."""
    selector = build("cyclic-poisson", groups=4)
    assert not selector.fixed_size
    drawn = [selector.select(range(200), 10, round=r, seed=3) for r in range(ROUNDS)]
    members = [set(np.concatenate(drawn[group::4]).tolist()) for group in range(4)]
    assert sum(map(len, members)) == len(set().union(*members)) == 200
    size = len(members[1])
    lowest, highest = binom.ppf([0.02, 0.98], size, 0.2).astype(int)
    sizes = [len(each) for each in drawn[1::4]]
    expected = binom.pmf(np.arange(lowest, highest + 1), size, 0.2)
    observed = [sizes.count(each) for each in range(lowest, highest + 1)]
    rest, chances = len(sizes) - sum(observed), [*expected, 1 - expected.sum()]
    assert chisquare([*observed, rest], np.array(chances) * len(sizes)).pvalue > 1e-4
    grown = [set(selector.select(range(300), 15, round=r, seed=4).tolist()) for r in range(400)]
    for group in range(4):  # whoever else is there
        assert {each for each in set().union(*grown[group::4]) if each < 200} <= members[group]


def test_groups_beyond_one_block_and_of_names() -> None:
    drawn = build("cyclic-poisson", groups=2).select(range(200_000), 20_000, round=1, seed=0)
    assert len(drawn) == pytest.approx(20_000, abs=6 * np.sqrt(100_000 * 0.2 * 0.8) + 6 * np.sqrt(50_000))
    assert drawn[-1] > 199_000
    names = np.array([f"device {number}" for number in range(50)])
    halves = [set(build("cyclic-poisson", groups=2).select(names, 25, round=r, seed=0)) for r in range(2)]
    assert halves[0] | halves[1] == set(names)
    assert not halves[0] & halves[1]


def test_more_expected_than_a_group_holds() -> None:
    with pytest.raises(ConfigError, match="3 expected of 11 clients in 4 groups"):
        build("cyclic-poisson", groups=4).select(range(11), 3, round=0, seed=0)
    with pytest.raises(ConfigError, match="groups"):
        build("cyclic-poisson")


def test_availability_asks_only_those_that_can_be_reached() -> None:
    selector = build("availability")

    def even(ids: np.ndarray) -> np.ndarray:
        return ids % 2 == 0

    drawn = np.array([selector.select(range(10), 3, round=r, seed=4, available=even) for r in range(ROUNDS)])
    assert chisquare(np.bincount(drawn.ravel(), minlength=10)[::2]).pvalue > 1e-4
    assert not (drawn % 2).any()
    assert sorted(selector.select(range(10), 8, round=0, seed=4, available=even)) == [0, 2, 4, 6, 8]
    nobody = selector.select(
        range(10), 3, round=0, seed=4, available=lambda ids: np.zeros(len(ids), dtype=bool)
    )
    assert nobody.shape == (0,)


def test_unknown_names_and_options_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'poisson'"):
        build("poison")
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        build("weighted", weight=[1])
    with pytest.raises(ConfigError, match="rate: unknown key"):
        build("poisson", rate=0.1)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_selectors.py").write_text(
        "import numpy as np\n"
        "def first(ids, k, *, round, seed, weights, available, skip=0):\n"
        "    return np.asarray(ids)[skip:skip + k]\n"
        "class Last:\n"
        "    fixed_size = True\n"
        "    def __init__(self, count=1):\n"
        "        self.count = count\n"
        "    def select(self, ids, k, *, round, seed, weights=None, available=None):\n"
        "        return np.asarray(ids)[-self.count:]\n"
        "class Nothing:\n"
        "    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_selectors", raising=False)


@pytest.mark.usefixtures("own")
def test_a_selector_of_the_user() -> None:
    first = build("own_selectors:first", skip=2)
    assert first.fixed_size
    assert first.select(range(9), 3, round=0, seed=0, weights=None, available=None).tolist() == [2, 3, 4]
    assert build("own_selectors:Last", count=2).select(range(9), 3, round=0, seed=0).tolist() == [7, 8]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["own_selectors:first", "own_selectors:Last"])
def test_a_selector_of_the_user_with_a_wrong_option(name: str) -> None:
    with pytest.raises(ConfigError, match="skipp"):
        build(name, skipp=2)


@pytest.mark.usefixtures("own")
def test_a_class_that_is_no_selector() -> None:
    with pytest.raises(ConfigError, match="a selector has select and fixed_size"):
        build("own_selectors:Nothing")
