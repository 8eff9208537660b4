"""The seeded hash is uniform and independent, and every random operator is seeded or refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.engine.program import Program
from mycelia.engine.seeding import is_random, seeded_bits, seeded_uniform
from mycelia.engine.verify import verify

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**63 - 1)
LEVEL = 1e-5  # of a test with fixed draws: a good hash fails one in a hundred thousand


def uniform(seed: int, salt: int = 1, shape: tuple[int, ...] = (200, 500), **options: Any) -> np.ndarray:
    return seeded_uniform(shape, torch.tensor(seed), salt, rows=(0, 1), **options).double().numpy().ravel()


def chi_square(values: np.ndarray, bins: int) -> float:
    """p-value of equal shares of [0, 1)."""
    return float(stats.chisquare(np.bincount((values * bins).astype(int), minlength=bins)).pvalue)


def joint(one: np.ndarray, two: np.ndarray, bins: int = 16) -> float:
    """p-value of equal shares of the unit square."""
    cells = (one * bins).astype(int) * bins + (two * bins).astype(int)
    return float(stats.chisquare(np.bincount(cells, minlength=bins * bins)).pvalue)


@pytest.mark.parametrize("salt", [1, 2, 1024])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**62 + 5])
def test_numbers_are_uniform(seed: int, salt: int) -> None:
    values = uniform(seed, salt)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert chi_square(values, 256) > LEVEL
    assert stats.kstest(values, "uniform").pvalue > LEVEL
    assert chi_square((values * 2**16) % 1, 256) > LEVEL, "the low bits too"


@pytest.mark.parametrize("rows", [(0, 1), None])
def test_every_bit_is_fair(rows: tuple[int, int] | None) -> None:
    bits = seeded_bits((400, 500), torch.tensor(3), 1, rows=rows).numpy().ravel()
    for place in range(32):
        ones = int(((bits >> place) & 1).sum())
        assert stats.binomtest(ones, bits.size).pvalue > LEVEL, place


@pytest.mark.parametrize(
    ("one", "two"), [(0, 1), (0, 2**32), (5, 5 + 2**16), (7, 7 ^ 2**31), (2**62, 2**62 + 1), (1, 2**32)]
)
def test_seeds_are_independent(one: int, two: int) -> None:
    assert joint(uniform(one), uniform(two)) > LEVEL


@pytest.mark.parametrize(("one", "two"), [(1, 2), (1, 1024), (1024, 2048), (1025, 2049)])
def test_salts_are_independent(one: int, two: int) -> None:
    assert joint(uniform(4, one), uniform(4, two)) > LEVEL


def test_examples_and_positions_are_independent() -> None:
    values = uniform(9).reshape(200, 500)
    assert joint(values[:-1].ravel(), values[1:].ravel()) > LEVEL, "neighbouring examples"
    assert joint(values[:, :-1].ravel(), values[:, 1:].ravel()) > LEVEL, "neighbouring positions"
    assert joint(values[:, ::2].ravel(), values[:, 1::2].ravel()) > LEVEL
    assert abs(stats.pearsonr(values[:-1].ravel(), values[1:].ravel()).statistic) < 0.02


def test_a_seed_says_nothing_about_another_ones_stream_shifted() -> None:
    """Streams of two seeds are not the same numbers in another order."""
    streams = [
        set(seeded_bits((300, 300), torch.tensor(seed), 1, rows=(0, 1)).ravel().tolist()) for seed in (1, 2)
    ]
    # two draws of n out of 2**32 share n * n / 2**32 on average
    assert len(streams[0] & streams[1]) < 10 * 90_000**2 / 2**32


@settings(deadline=None, max_examples=50)
@given(
    seed=SEEDS,
    salt=st.integers(0, 10**6),
    rows=st.integers(1, 6),
    inner=st.integers(1, 5),
    first=st.integers(0, 9),
)
def test_an_example_draws_the_same_wherever_it_stands(
    seed: int, salt: int, rows: int, inner: int, first: int
) -> None:
    """By its number in the batch, whatever the batch's size, its axis, and where the batch was cut."""
    tensor = torch.tensor(seed)
    whole = seeded_bits((first + rows, inner), tensor, salt, rows=(0, 1))
    assert whole.min() >= 0
    assert whole.max() < 2**32
    part = seeded_bits((rows, inner), tensor, salt, rows=(0, 1), first=first)
    assert torch.equal(whole[first:], part)
    assert torch.equal(whole.T, seeded_bits((inner, first + rows), tensor, salt, rows=(1, 1)))
    heads = seeded_bits((2 * (first + rows), inner), tensor, salt, rows=(0, 2))
    assert torch.equal(
        heads[2 * first :], seeded_bits((2 * rows, inner), tensor, salt, rows=(0, 2), first=first)
    )


@settings(deadline=None, max_examples=25)
@given(seeds=st.lists(SEEDS, min_size=1, max_size=4))
def test_vmap_over_seeds_gives_the_same_bits(seeds: list[int]) -> None:
    found = torch.func.vmap(lambda seed: seeded_bits((3, 4), seed, 5, rows=(0, 1)))(torch.tensor(seeds))
    for row, seed in zip(found, seeds, strict=True):
        assert torch.equal(row, seeded_bits((3, 4), torch.tensor(seed), 5, rows=(0, 1)))


# --- operators


class Draws(nn.Module):
    """Returns what a function of the test's draws beside the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.scale


def program_of(function: Callable[[Tensor], Tensor]) -> Program:
    return capture(Draws(function), lambda o, t: o.flatten(1).sum(1), (torch.rand(2, 100), torch.zeros(2)))


Distribution = Callable[[np.ndarray], float]


def follows(distribution: Any) -> Distribution:
    return lambda values: float(stats.kstest(values, distribution.cdf).pvalue)


def shares(expected: dict[float, float]) -> Distribution:
    def check(values: np.ndarray) -> float:
        found, counts = np.unique(values, return_counts=True)
        assert set(found) == set(expected)
        return float(stats.chisquare(counts, [expected[value] * values.size for value in found]).pvalue)

    return check


COIN = shares({0.0: 0.5, 1.0: 0.5})

SEEDED: dict[str, tuple[Callable[[Tensor], Tensor], Distribution]] = {
    "rand": (lambda x: torch.rand(x.shape[0], 100), follows(stats.uniform())),
    "rand float64": (lambda x: torch.rand(x.shape[0], 100, dtype=torch.float64), follows(stats.uniform())),
    "rand_like": (torch.rand_like, follows(stats.uniform())),
    "randn": (lambda x: torch.randn(x.shape[0], 100), follows(stats.norm())),
    "randn_like": (torch.randn_like, follows(stats.norm())),
    "normal_": (lambda x: torch.empty_like(x).normal_(1.0, 2.0), follows(stats.norm(1, 2))),
    "normal of tensors": (lambda x: torch.normal(x * 0 + 3, x * 0 + 2), follows(stats.norm(3, 2))),
    "normal of mean": (lambda x: torch.normal(x * 0 + 3, 0.5), follows(stats.norm(3, 0.5))),
    "normal of deviation": (lambda x: torch.normal(-1.0, x * 0 + 2), follows(stats.norm(-1, 2))),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), follows(stats.uniform(-1, 4))),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), follows(stats.expon(scale=0.5))),
    "bernoulli": (lambda x: torch.bernoulli(x * 0 + 0.3), shares({0.0: 0.7, 1.0: 0.3})),
    "bernoulli of a number": (lambda x: torch.bernoulli(x, 0.3), shares({0.0: 0.7, 1.0: 0.3})),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.9), shares({0.0: 0.1, 1.0: 0.9})),
    "randint": (lambda x: torch.randint(5, x.shape), shares({n: 0.2 for n in range(5)})),
    "randint from": (lambda x: torch.randint(-2, 2, x.shape), shares({n: 0.25 for n in range(-2, 2)})),
    "randint_like": (lambda x: torch.randint_like(x, 4), shares({n: 0.25 for n in range(4)})),
    "randint_like from": (lambda x: torch.randint_like(x, 3, 5), shares({3: 0.5, 4: 0.5})),
    "dropout": (lambda x: F.dropout(x * 0 + 1, 0.25), shares({0.0: 0.25, float(np.float32(4 / 3)): 0.75})),
    "rrelu": (lambda x: F.rrelu(x * 0 - 1, 0.1, 0.3, training=True), follows(stats.uniform(-0.3, 0.2))),
    "gumbel": (lambda x: F.gumbel_softmax(x[..., None] * torch.zeros(2), hard=True)[..., 0], COIN),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_operators_draw_from_the_seed_with_the_right_distribution(name: str) -> None:
    function, pvalue = SEEDED[name]
    program = program_of(function)
    for graph in program.graphs or ():
        verify(graph, program.schema)

    def draw(seed: int, first: int = 0, rows: int = 300) -> Tensor:
        inputs = torch.rand(rows, 100, generator=torch.Generator().manual_seed(1))
        return program.forward(*program.init(), inputs, torch.zeros(rows), seed=seed, first=first).outputs

    values = draw(5)
    assert pvalue(values.double().numpy().ravel()) > LEVEL
    state = torch.get_rng_state()
    assert torch.equal(values, draw(5))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(values, draw(6))
    assert not torch.equal(values[:-1], values[1:]), "examples draw apart"
    if name != "rrelu":
        assert torch.equal(values[100:150], draw(5, first=100, rows=50)), "a part draws what the whole does"


@pytest.mark.parametrize("p", [0.2, 0.6])
def test_alpha_dropout_keeps_mean_and_variance(p: float) -> None:
    """Klambauer et al. (2017), section 3: self-normalising dropout."""
    program = program_of(lambda x: F.alpha_dropout(x, p, training=True))
    inputs = torch.randn(500, 100, generator=torch.Generator().manual_seed(0))
    found = program.forward(*program.init(), inputs, torch.zeros(500), seed=1).outputs
    assert abs(float(found.mean())) < 0.03
    assert abs(float(found.var()) - 1) < 0.05


def test_two_operators_of_one_graph_draw_apart() -> None:
    program = program_of(
        lambda x: torch.stack([torch.rand_like(x), torch.rand_like(x), torch.randn_like(x)], 1)
    )
    found = (
        program.forward(*program.init(), torch.rand(300, 100), torch.zeros(300))
        .outputs.detach()
        .double()
        .numpy()
    )
    assert joint(found[:, 0].ravel(), found[:, 1].ravel()) > LEVEL
    assert joint(found[:, 0].ravel(), stats.norm.cdf(found[:, 2]).ravel()) > LEVEL


def test_numbers_without_a_batch_are_shared_by_the_examples() -> None:
    program = program_of(lambda x: x * 0 + torch.rand(100))
    found = program.forward(*program.init(), torch.rand(7, 100), torch.zeros(7), seed=2, first=5).outputs
    assert torch.equal(found, found[:1].expand(7, 100))
    assert len(found[0].unique()) > 90


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.poisson": lambda x: torch.poisson(x.abs()),
    "aten.randperm": lambda x: x[:, torch.randperm(100)],
    "aten.multinomial": lambda x: torch.multinomial(x.abs() + 1, 3),
    "aten.geometric": lambda x: x.clone().geometric_(0.5),
    "aten.cauchy": lambda x: x.clone().cauchy_(),
    "aten.log_normal": lambda x: x.clone().log_normal_(),
    "aten.binomial": lambda x: torch.binomial(x * 0 + 5, x.clamp(0, 1)),
    "aten._standard_gamma": lambda x: torch._standard_gamma(x.abs() + 1),
    "a range below 2**31": lambda x: torch.randint(2**40, x.shape),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_operators_are_refused_by_name_and_line(name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        program_of(REFUSED[name])
    assert name in caught.value.found + caught.value.rule
    assert "test_seeding.py" in str(caught.value)


def test_random_numbers_inside_a_branch_are_refused() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x.sin(), (x,))

    with pytest.raises(CaptureError, match=r"native_dropout.*inside a branch or loop"):
        program_of(branch)


def test_every_random_operator_of_pytorch_is_known_to_be_random() -> None:
    """What the library tags is seeded or refused; recurrent and attention operators have no tag."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    tagged = [
        getattr(getattr(aten, name), form)
        for name in dir(aten)
        if name.startswith(("rand", "bernoulli", "normal", "uniform", "exponential", "native_dropout"))
        for form in getattr(aten, name).overloads()
    ]
    assert len(tagged) > 30
    for operator in tagged:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            assert is_random(graph.call_function(operator, (value,))), operator
    layers = (value, [value], [value], True, 2, 0.5, True, False, True)
    for recurrent in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        assert is_random(graph.call_function(recurrent, layers))
        assert not is_random(graph.call_function(recurrent, (*layers[:6], False, *layers[7:]))), "evaluation"
        assert not is_random(graph.call_function(recurrent, (*layers[:4], 1, *layers[5:]))), "one layer"
    assert is_random(
        graph.call_function(aten.scaled_dot_product_attention.default, (value,) * 3 + (None, 0.1))
    )
    assert not is_random(graph.call_function(aten.scaled_dot_product_attention.default, (value,) * 3))
