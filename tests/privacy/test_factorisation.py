"""Factorisations: known answers, brute force on small plans, and streams against dense algebra."""

import itertools
import math
from collections.abc import Iterator

import dp_accounting
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.privacy.factorisation import (
    BLT,
    Banded,
    CorrelatedNoise,
    Identity,
    Plan,
    SqrtToeplitz,
    Strategy,
    Tree,
    Workload,
    error,
    optimise,
    sensitivity,
)
from mycelia.privacy.factorisation.toeplitz import Toeplitz
from mycelia.privacy.noise import DiscreteGaussian, Gaussian, Laplace, NoiseSource, Skellam

SOURCE = NoiseSource.seeded(29)
SMALL_BLT = BLT(2, scales=(0.4, 0.1), decays=(0.7, 0.99))
STRATEGIES: list[Strategy] = [
    Identity(),
    Tree(),
    SqrtToeplitz(),
    Banded(1),
    Banded(3),
    Banded(4, (1.0, 0.6, 0.6, 0.1)),
    SMALL_BLT,
    BLT(1, scales=(1.0,), decays=(1.0,)),
]
EACH = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
Matrix = npt.NDArray[np.float64]


def tree_names(steps: int) -> dict[tuple[int, str], tuple[int, int]]:
    """The complete blocks: the name of their draw, and the steps they hold."""
    names = {}
    for level in range(steps.bit_length()):
        for end in range(2**level, steps + 1, 2**level):
            label = f"block {level}" if level else ""
            names[end - 1, label] = (end - 2**level, end)
    return names


def dense(strategy: Strategy, steps: int) -> Matrix:
    """C, from its definition."""
    if isinstance(strategy, Tree):
        blocks = tree_names(steps).values()
        return np.array([[float(low <= step < high) for step in range(steps)] for low, high in blocks])
    assert isinstance(strategy, Toeplitz)
    c = strategy.coefficients(steps).numpy()
    return np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])


def rows(strategy: Strategy, steps: int) -> Matrix:
    """What the stream adds at every step, in terms of the independent draws (the rows of `dense`)."""
    names = list(tree_names(steps)) if isinstance(strategy, Tree) else [(t, "") for t in range(steps)]

    def draw(step: int, label: str) -> Tensor:
        return torch.from_numpy(np.eye(len(names))[names.index((step, label))])

    slots = torch.zeros(strategy.slots(steps), len(names), dtype=torch.float64)
    return np.array([strategy.advance(step, slots, draw).numpy() for step in range(steps)])


@EACH
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 13])
def test_noise_is_the_inverse(strategy: Strategy, steps: int) -> None:
    """C⁻¹ C = 1: decoding the noised C g gives g back, and the prefix sums with it."""
    product = rows(strategy, steps) @ dense(strategy, steps)
    assert product == pytest.approx(np.eye(steps), abs=1e-12)


def patterns(plan: Plan) -> Iterator[list[int]]:
    """All sets of steps that one participant may be in."""
    for uses in range(1, plan.uses + 1):
        for steps in itertools.combinations(range(plan.steps), uses):
            if all(later - step >= plan.separation for step, later in itertools.pairwise(steps)):
                yield list(steps)


@EACH
@pytest.mark.parametrize(
    "plan", [Plan(7), Plan(10, 2, 3), Plan(9, 3, 3), Plan(10, 4, 2), Plan(9, 20, 1), Plan(11, 3, 5)], ids=repr
)
def test_sensitivity_by_brute_force(strategy: Strategy, plan: Plan) -> None:
    matrix = dense(strategy, plan.steps)
    assert (matrix.T @ matrix >= 0).all()  # so equal gradients at every use are the worst case
    worst = max(np.linalg.norm(matrix[:, pattern].sum(1)) for pattern in patterns(plan))
    found = sensitivity(strategy, plan)
    if isinstance(strategy, Tree) and plan.uses > 1:
        assert worst <= found * (1 + 1e-12) <= 1.3 * worst
    else:
        assert found == pytest.approx(worst, rel=1e-12)


def dense_workload(workload: Workload) -> Matrix:
    """θ_t = Σ r_s v_s, v_s = m v_{s-1} + g_s, one unit gradient at a time."""
    columns = []
    for gradient in np.eye(workload.steps):
        velocity, answer, column = 0.0, 0.0, []
        for step in range(workload.steps):
            velocity = workload.momentum * velocity + gradient[step]
            answer += (workload.rates[step] if workload.rates else 1.0) * velocity
            column.append(answer)
        columns.append(column)
    return np.array(columns).T


RATES = tuple(1 / (1 + 0.3 * step) for step in range(13))


@EACH
@pytest.mark.parametrize(
    "workload",
    [Workload(13), Workload(13, 0.9), Workload(13, 0.0, RATES), Workload(13, 0.8, RATES)],
    ids=repr,
)
def test_error_by_dense_algebra(strategy: Strategy, workload: Workload) -> None:
    variances = np.square(dense_workload(workload) @ rows(strategy, 13)).sum(1)
    found = error(strategy, workload)
    assert found.maximum == pytest.approx(variances.max(), rel=1e-10)
    assert found.mean == pytest.approx(variances.mean(), rel=1e-10)


def test_square_root_known_answers() -> None:
    root = SqrtToeplitz()
    assert root.coefficients(4).tolist() == [1, 1 / 2, 3 / 8, 5 / 16]
    for steps, squared in ((10, 1.791344), (1000, 3.265003)):
        assert sensitivity(root, Plan(steps)) ** 2 == pytest.approx(squared, abs=5e-7)
    for steps, loss in ((2, 1.5625), (100, 6.407744), (2000, 12.149954)):
        found = sensitivity(root, Plan(steps)) ** 2 * error(root, Workload(steps)).maximum
        assert found == pytest.approx(loss, abs=5e-7)


def test_tree_known_answer() -> None:
    """1600 steps at multiplier 8.83: eleven blocks hold the first step."""
    squared = sensitivity(Tree(), Plan(1600)) ** 2
    assert squared == pytest.approx(11)
    epsilon = dp_accounting.get_epsilon_gaussian(8.83 / math.sqrt(squared), 1e-6)
    assert 1.5 < epsilon < 2.04
    # the estimates halve the noise of a prefix of all its 1024 steps, at the most
    plain = 1.0  # a complete block has noise of variance 1
    assert 0.5 * plain < error(Tree(), Workload(1024)).maximum < 10


def loss(strategy: Strategy, plan: Plan) -> tuple[float, float]:
    found, squared = error(strategy, Workload(plan.steps)), sensitivity(strategy, plan) ** 2
    return squared * found.maximum, squared * found.mean


def test_four_buffers_come_close_to_the_square_root() -> None:
    plan = Plan(2000)
    best = loss(SqrtToeplitz(), plan)
    found = loss(optimise(BLT(4), plan), plan)
    assert found[0] <= 1.03 * best[0]
    assert found[1] <= 1.03 * best[1]
    assert found[0] >= best[0] * (1 - 1e-9)  # no Toeplitz strategy has less at the worst step
    assert loss(optimise(BLT(3), plan), plan)[0] <= 1.03 * best[0]


def test_bands_come_close_to_the_square_root() -> None:
    plan = Plan(2000)
    best = loss(SqrtToeplitz(), plan)
    assert loss(optimise(Banded(1700), plan), plan)[0] <= 1.03 * best[0]
    assert loss(optimise(Banded(768), plan, "mean"), plan)[1] <= 1.03 * best[1]


def test_bands_win_when_examples_come_back() -> None:
    plan = Plan(2000, uses=20, separation=100)
    banded = optimise(Banded(100), plan)
    assert sensitivity(banded, plan) ** 2 == pytest.approx(20 * sum(c * c for c in banded.band))
    assert loss(banded, plan)[0] < 0.7 * loss(SqrtToeplitz(), plan)[0]


@pytest.mark.parametrize("objective", ["maximum", "mean"])
@pytest.mark.parametrize("family", [Banded(6), BLT(2)], ids=repr)
@pytest.mark.parametrize("workload", [Workload(40), Workload(40, 0.9)], ids=repr)
def test_optimum_cannot_be_improved(family: Banded | BLT, objective: str, workload: Workload) -> None:
    """Small moves of the coefficients in any direction raise the loss, computed by dense algebra."""
    plan = Plan(40, uses=3, separation=10)
    answers = dense_workload(workload)

    def dense_loss(strategy: Strategy) -> float:
        matrix = dense(strategy, 40)
        variances = np.square(answers @ np.linalg.inv(matrix)).sum(1)
        moved = np.linalg.norm(matrix[:, [0, 10, 20]].sum(1)) ** 2
        return float(moved * (variances.max() if objective == "maximum" else variances.mean()))

    found = optimise(family, plan, objective, workload)  # type: ignore[arg-type, type-var]
    least = dense_loss(found)
    assert least < dense_loss(Identity())
    for size in (-1e-3, 1e-3):
        for index in range(5 if isinstance(found, Banded) else 4):
            if isinstance(found, Banded):
                band = list(found.band)
                band[index + 1] *= 1 + size
                if band != sorted(band, reverse=True):
                    continue
                moved: Strategy = Banded(6, tuple(band))
            else:
                values = [*found.scales, *found.decays]
                values[index] *= 1 + size
                if sum(values[:2]) > 1 or max(values[2:]) > 1:
                    continue
                moved = BLT(2, tuple(values[:2]), tuple(values[2:]))
            assert dense_loss(moved) >= least * (1 - 1e-7)


def test_the_inverse_of_a_blt_is_one() -> None:
    """Its coefficients obey a recurrence as long as the buffers: the Hankel matrix has that rank."""
    inverted = np.linalg.inv(dense(SMALL_BLT, 21))[1:, 0]
    hankel = np.array([inverted[i : i + 10] for i in range(10)])
    assert np.linalg.matrix_rank(hankel, tol=1e-10) == 2


@EACH
def test_streams(strategy: Strategy) -> None:
    steps, like = 13, {"w": torch.zeros(2, 3), "b": torch.zeros(())}
    noise = CorrelatedNoise(strategy, steps, std=1.5)
    state = noise.init(like)
    assert set(state.slots) == {"w", "b"}
    found = []
    for _ in range(steps):
        step = noise.next(state, SOURCE)
        assert {name: tensor.shape for name, tensor in step.items()} == {"w": (2, 3), "b": ()}
        found.append(step["w"].double().view(-1).numpy())
    names = list(tree_names(steps)) if isinstance(strategy, Tree) else [(t, "") for t in range(steps)]
    independent = [
        Gaussian()
        .sample((6,), 1.5, SOURCE, f"noise/{label}" if label else "noise", step, "w")
        .double()
        .numpy()
        for step, label in names
    ]
    assert np.array(found) == pytest.approx(rows(strategy, steps) @ np.array(independent), abs=2e-5)
    with pytest.raises(BudgetExceeded, match="all 13 planned steps"):
        noise.next(state, SOURCE)


@EACH
def test_streams_can_be_made_again(strategy: Strategy) -> None:
    like = {"w": torch.zeros(5)}
    noise = CorrelatedNoise(strategy, 9, std=1.0)
    state = noise.init(like)
    for _ in range(6):
        noise.next(state, SOURCE)
    again = noise.resume(like, 6, SOURCE)
    assert again.step == state.step
    assert torch.equal(again.slots["w"], state.slots["w"])
    for _ in range(3):
        assert torch.equal(noise.next(again, SOURCE)["w"], noise.next(state, SOURCE)["w"])


@EACH
def test_rounded_rows(strategy: Strategy) -> None:
    """Totals and rows are integers of the grid; the noise is that of float64 rows and of no total."""
    steps, bound, size = 9, 2.0, 400
    grid = 2.0**-29  # the power of two at or below 2e-9
    noise = CorrelatedNoise(strategy, steps, 3.0, mechanism=DiscreteGaussian(sampler="rounded"), bound=bound)
    plain, shifted = (noise.init({"w": torch.zeros(size)}) for _ in range(2))
    assert plain.slots["w"].dtype is torch.float64
    names = list(tree_names(steps)) if isinstance(strategy, Tree) else [(t, "") for t in range(steps)]
    drawn = torch.stack([
        Gaussian().sample(
            (size,), 3.0, SOURCE, f"noise/{label}" if label else "noise", step, "w", dtype=torch.float64
        ) for step, label in names
    ])  # fmt: skip
    expected = torch.from_numpy(rows(strategy, steps)) @ drawn / grid
    totals = torch.linspace(-5, 5, size, dtype=torch.float64)
    for step in range(steps):
        alone = noise.add({"w": torch.zeros(size).double()}, plain, SOURCE)["w"] / grid
        assert torch.equal(alone, alone.round())
        assert (alone - expected[step]).abs().max() < 0.51
        both = noise.add({"w": totals}, shifted, SOURCE)["w"] / grid
        assert torch.equal(both - alone, (totals / grid).round())


def test_memory() -> None:
    assert Identity().slots(2000) == 0
    assert SqrtToeplitz().slots(2000) == 0
    assert Banded(16).slots(2000) == 15
    assert Banded(16).slots(4) == 3
    assert SMALL_BLT.slots(2000) == 2
    assert Tree().slots(2000) == 12  # one for each of 11 levels, and the last prefix


def test_no_noise() -> None:
    noise = CorrelatedNoise(Tree(), 4, std=0.0)
    state = noise.init({"w": torch.zeros(3)})
    assert all(noise.next(state, SOURCE)["w"].tolist() == [0, 0, 0] for _ in range(4))


def test_refused_mechanisms() -> None:
    for mechanism in (DiscreteGaussian(), Laplace(), Skellam()):
        with pytest.raises(ConfigError, match='sampler="rounded"'):
            CorrelatedNoise(Tree(), 4, std=1.0, mechanism=mechanism)
    with pytest.raises(ConfigError, match="grid steps"):
        CorrelatedNoise(Tree(), 4, std=1.0, mechanism=DiscreteGaussian(0.01, "rounded"))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="std is"):
        CorrelatedNoise(Tree(), 4, std=math.inf)
    with pytest.raises(ConfigError, match="steps"):
        CorrelatedNoise(Tree(), 0, std=1.0)
    for use in (
        lambda: CorrelatedNoise(BLT(3), 4, std=1.0),
        lambda: sensitivity(BLT(3), Plan(4)),
        lambda: error(BLT(3), Workload(4)),
    ):
        with pytest.raises(ConfigError, match="optimise"):
            use()
    for band in ((1.0, 0.5), (0.9, 0.5, 0.1), (1.0, 0.5, 0.6), (1.0, 0.5, -0.1), (1.0, 0.5, math.nan)):
        with pytest.raises(ConfigError, match="never rising"):
            Banded(3, band)
    for scales, decays in (
        ((0.5,), (0.5, 0.5)),
        ((0.5, 0.6), (0.5, 0.5)),
        ((0.5, -0.1), (0.5, 0.5)),
        ((0.5, 0.1), (0.5, 1.1)),
        ((0.5, 0.1), (0.5, 0.0)),
    ):
        with pytest.raises(ConfigError, match="scales"):
            BLT(2, scales, decays)
    with pytest.raises(ConfigError, match="bands"):
        Banded(0)
    with pytest.raises(ConfigError, match="buffers"):
        BLT(0)
    for settings in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match="plan"):
            Plan(*settings)
    with pytest.raises(ConfigError, match="momentum"):
        Workload(3, 1.0)
    with pytest.raises(ConfigError, match="2 rates"):
        Workload(3, 0.0, (1.0, 1.0))
    with pytest.raises(ConfigError, match="not finite"):
        Workload(1, 0.0, (math.nan,))
    with pytest.raises(ConfigError, match="workload"):
        Workload(0)
    with pytest.raises(ConfigError, match="maximum or mean"):
        optimise(Banded(2), Plan(3), "median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no rates"):
        optimise(Banded(2), Plan(3), workload=Workload(3, 0.0, (1.0, 1.0, 1.0)))


def test_degenerate_fits() -> None:
    assert optimise(Banded(1), Plan(5)) == Banded(1)
    assert optimise(Banded(9), Plan(3)).bands == 3
    assert sensitivity(Identity(), Plan(100, 7, 10)) == pytest.approx(math.sqrt(7))
    assert loss(Banded(1), Plan(5)) == pytest.approx(loss(Identity(), Plan(5)))
