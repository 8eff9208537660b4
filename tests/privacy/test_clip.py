"""Clip functions and sensitivities against their formulas, and the adaptive bound against its law."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.clip import (
    CLIPS,
    PSAC,
    Abadi,
    AutoS,
    ClipFunction,
    ClipState,
    Indicator,
    PerLayer,
    QuantileClip,
    Sensitivity,
    build,
)
from mycelia.privacy.groups import Group
from mycelia.privacy.noise import DiscreteGaussian, Gaussian, NoiseSource

SOURCE = NoiseSource.seeded(23)
FUNCTIONS = [Abadi(1.3), AutoS(1.3), AutoS(0.2, gamma=1.0), PSAC(1.3), PSAC(2.0, r=0.01), Indicator(1.3)]
NORMS = [0.0, 1e-30, 1e-3, 0.5, 1.2999, 1.3, 1.3001, 7.0, 1e30]


def expected(clip: ClipFunction, n: float) -> float:
    """The formulas of the papers."""
    c = clip.bound
    match clip:
        case Abadi():
            return min(1.0, c / n) if n else 1.0
        case AutoS(gamma=gamma):
            return c / (n + gamma)
        case PSAC(r=r):
            return c / (n + r / (n + r))
        case _:
            return float(n <= c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", FUNCTIONS, ids=repr)
def test_factors(clip: ClipFunction, dtype: torch.dtype) -> None:
    norms = torch.tensor(NORMS, dtype=dtype)
    factors = clip(norms)
    assert factors.dtype is dtype
    wanted = [expected(clip, n) for n in norms.tolist()]
    if isinstance(clip, Indicator) and dtype is torch.float32:
        wanted[5] = float(factors[5])  # 1.3 is not a float32
    assert factors.tolist() == pytest.approx(wanted, rel=1e-6 if dtype is torch.float32 else 1e-14)


@given(st.sampled_from(FUNCTIONS), st.floats(0, 1e100))
def test_the_bound_holds(clip: ClipFunction, norm: float) -> None:
    clipped = float(clip(torch.tensor([norm], dtype=torch.float64))) * norm
    assert 0 <= clipped <= clip.sensitivity().bound * (1 + 1e-15)
    assert clip.sensitivity() == Sensitivity(clip.bound, "l2", 0.0)


@pytest.mark.parametrize("clip", FUNCTIONS, ids=repr)
def test_nan_example_has_factor_zero(clip: ClipFunction) -> None:
    norms = torch.tensor([math.nan, math.inf, 0.5])
    factors = clip(norms)
    assert factors[:2].tolist() == [0, 0]
    assert factors[2:].equal(clip(norms[2:]))
    assert clip(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, True, "1"])
@pytest.mark.parametrize("kind", [Abadi, AutoS, PSAC, Indicator])
def test_bounds_out_of_range(kind: type[ClipFunction], bound: float) -> None:
    with pytest.raises(ConfigError, match="bound is"):
        kind(bound)


def test_other_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="gamma"):
        AutoS(1.0, gamma=0.0)
    with pytest.raises(ConfigError, match="r is"):
        PSAC(1.0, r=-1.0)


def test_per_layer() -> None:
    groups = (("a.weight", "a.bias"), ("b",), ("c",), ("d",))
    clip = PerLayer(2.0, groups)
    assert clip.bounds == (1.0,) * 4
    assert clip.sensitivity().bound == pytest.approx(2.0)
    given_bounds = PerLayer((3.0, 4.0), (("a",), ("b",)))
    assert given_bounds.sensitivity().bound == pytest.approx(5.0)
    norms = torch.tensor([[1.5, 8.0], [6.0, 1.0], [math.nan, 1.0], [0.0, math.inf]])
    assert given_bounds(norms).tolist() == [[1.0, 0.5], [0.5, 1.0], [0, 0], [0, 0]]
    assert clip.columns(("b", "a.bias", "a.weight", "d", "c")) == (1, 0, 0, 3, 2)


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_per_layer_bound_holds(rows: list[list[float]]) -> None:
    clip = PerLayer((0.5, 1.0, 2.0), (("a",), ("b",), ("c",)))
    norms = torch.tensor(rows, dtype=torch.float64)
    assert ((clip(norms) * norms).norm(dim=1) <= clip.sensitivity().bound * (1 + 1e-15)).all()


def test_per_layer_refusals() -> None:
    for groups in ((), ((),), (("a",), ("a",))):
        with pytest.raises(ConfigError, match="the groups are"):
            PerLayer(1.0, groups)
    with pytest.raises(ConfigError, match="2 bounds for 1 groups"):
        PerLayer((1.0, 2.0), (("a",),))
    with pytest.raises(ConfigError, match="bound is"):
        PerLayer((1.0, 0.0), (("a",), ("b",)))
    clip = PerLayer(1.0, (("a",), ("b",)))
    with pytest.raises(ConfigError, match=r"in no group: \['c'\]"):
        clip.columns(("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"not in the model: \['b'\]"):
        clip.columns(("a",))
    with pytest.raises(ConfigError, match="one column"):
        clip(torch.zeros(4))


def test_relations() -> None:
    found = Sensitivity(1.5, slack=0.25)
    assert found.total == 1.75
    assert found.under("add-remove") == found.under("zero-out") == 1.75
    assert found.under("replace-one") == 3.5
    with pytest.raises(ConfigError, match="replace-one"):
        found.under("swap")


def test_grid_slack() -> None:
    assert Sensitivity(1.0).on_grid(0.25, 16) == Sensitivity(1.0, "l2", 1.0)
    assert Sensitivity(1.0, "l1", 0.5).on_grid(0.25, 16) == Sensitivity(1.0, "l1", 4.5)
    mechanism = DiscreteGaussian()
    assert Sensitivity(2.0).on_grid(mechanism.grid(2.0), 100).slack == mechanism.slack(2.0, 100)
    assert Sensitivity(1.0, slack=0.5).in_l1(9) == Sensitivity(3.0, "l1", 1.5)
    assert Sensitivity(1.0, "l1").in_l1(9) == Sensitivity(1.0, "l1")


def in_order(rows: np.ndarray) -> np.ndarray:
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total += row
    return total


def test_summation_slack_holds() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 40)).astype(np.float32)
    rows /= np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True).astype(np.float32) * np.float32(
        1.001
    )
    limit = Sensitivity(1.0).summed(300)
    moved = np.linalg.norm(in_order(rows).astype(np.float64) - in_order(rows[1:]))
    assert abs(moved - np.linalg.norm(rows[0])) <= limit.slack
    # 2 g m C by hand: g = 299 u / (1 - 299 u), u = 2**-24
    u = 2.0**-24
    assert limit.slack == pytest.approx(2 * 299 * u / (1 - 299 * u) * 300)
    assert Sensitivity(1.0).summed(300, depth=9).slack < limit.slack / 30
    assert Sensitivity(1.0).summed(300, dtype=torch.float64).slack < 1e-10
    assert Sensitivity(1.0).summed(0).slack == 0
    with pytest.raises(ConfigError, match="float64"):
        Sensitivity(1.0).summed(2**25)


def test_group_clip_sensitivity() -> None:
    """Two groups that differ in one example can have opposite clipped means."""
    clip = Abadi(1.0)

    def clipped_mean(group: Tensor) -> Tensor:
        mean = group.mean(0)
        return mean * clip(mean.norm().view(1))

    group = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1e4, 0.0]])
    other = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1e4, 0.0]])
    moved = float((clipped_mean(group) - clipped_mean(other)).norm())
    assert moved == pytest.approx(2.0)
    limit = clip.sensitivity()
    assert limit.bound < moved <= limit.under("zero-out", Group(3)) * (1 + 1e-6)


def test_sensitivity_out_of_range() -> None:
    with pytest.raises(ConfigError, match="bound"):
        Sensitivity(0.0)
    with pytest.raises(ConfigError, match="slack"):
        Sensitivity(1.0, slack=-1.0)
    with pytest.raises(ConfigError, match="norm"):
        Sensitivity(1.0, "linf")  # type: ignore[arg-type]


def test_adaptive_clip_honest() -> None:
    """Gradient at z_Δ and count at 2 σ_b cost together what the ledger records: z. The noise is public."""
    adaptive = QuantileClip(sigma_b=3.0)
    for total in (0.0, 0.1, 1.0, 5.9):
        gradient = adaptive.gradient_multiplier(total, expected_batch=100)
        assert gradient >= total
        if total:
            assert gradient**-2 + 6.0**-2 == pytest.approx(total**-2, rel=1e-12)
    orders = [1.5, 2.0, 8.0, 32.0]
    both, one = RdpAccountant(orders), RdpAccountant(orders)
    both.compose(dp_accounting.GaussianDpEvent(adaptive.gradient_multiplier(1.2, 100)))
    both.compose(dp_accounting.GaussianDpEvent(3.0 / 0.5))  # one example moves the count by a half
    one.compose(dp_accounting.GaussianDpEvent(1.2))
    assert both.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    for total in (6.0, 7.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="z < 2 sigma_b"):
            adaptive.gradient_multiplier(total, 100)
    # without sigma_b it is a twentieth of the public expected batch
    assert QuantileClip().count_noise(256) == 12.8
    with pytest.raises(ConfigError, match="expected_batch"):
        QuantileClip().count_noise(0)


def test_adaptive_clip_finds_the_quantile() -> None:
    rng = np.random.default_rng(0)
    for target in (0.3, 0.5, 0.9):
        adaptive = QuantileClip(target=target, bound=0.01)
        state, last = adaptive.init(), []
        for step in range(400):
            norms = torch.from_numpy(rng.lognormal(0, 1, rng.poisson(500)))
            signal = adaptive.signal(state, norms)
            state = adaptive.update(state, signal, 500, Gaussian(), SOURCE, step)
            last.append(math.log(state.bound))
        wanted = {0.3: -0.524401, 0.5: 0.0, 0.9: 1.281552}[target]  # quantiles of the normal law
        assert np.mean(last[200:]) == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize("mechanism", [Gaussian(), DiscreteGaussian()], ids=lambda value: value.name)
def test_adaptive_clip_edges(mechanism: Gaussian | DiscreteGaussian) -> None:
    adaptive = QuantileClip(bound=2.0)
    state = adaptive.init()
    assert state == ClipState(2.0)
    assert adaptive.clip(state) == Abadi(2.0)
    # an empty batch: no signal, full noise, by the formula
    empty = adaptive.signal(state, torch.zeros(0))
    assert empty == 0
    after = adaptive.update(state, empty, 100, mechanism, SOURCE, 0)
    zero = torch.zeros(1, dtype=torch.float64)
    noise = float(mechanism.add(zero, 5.0, SOURCE, "clip count", 0, bound=0.5))
    assert noise != 0
    assert after.bound == pytest.approx(2.0 * math.exp(-0.2 * (noise / 100 + 0.5 - 0.5)))
    assert after == adaptive.update(state, empty, 100, mechanism, SOURCE, 0)  # and can be made again
    assert after != adaptive.update(state, empty, 100, mechanism, SOURCE, 1)
    # half precision, padding, and a norm that is not finite
    norms = torch.tensor([1.0, 2.0, 3.0, math.nan, 0.0], dtype=torch.float16)
    assert adaptive.signal(state, norms) == 0.5 * (3 - 2)
    mask = torch.tensor([True, True, True, True, False])
    assert adaptive.signal(state, norms, mask) == 0
    # parts of a batch add
    assert adaptive.signal(state, norms[:2]) + adaptive.signal(state, norms[2:]) == 0.5
    # the noise is that of the public batch, whatever was drawn
    many = adaptive.signal(state, torch.ones(1000))
    drawn = adaptive.update(state, many, 100, mechanism, SOURCE, 0)
    assert math.log(drawn.bound / after.bound) == pytest.approx(-0.2 * 500 / 100)


def test_adaptive_clip_settings_out_of_range() -> None:
    for settings in ({"target": 1.1}, {"rate": 0.0}, {"sigma_b": 0.0}, {"bound": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            QuantileClip(**settings)
    with pytest.raises(ConfigError, match="next bound"):
        QuantileClip(rate=1e6).update(ClipState(1.0), 1e6, 1.0, Gaussian(), SOURCE, 0)


def test_build_by_name() -> None:
    assert build("abadi", bound=2.0) == Abadi(2.0)
    assert build("per-layer", bound=[1.0, 2.0], groups=[["a"], ["b"]]) == PerLayer(
        (1.0, 2.0), (("a",), ("b",))
    )
    assert build("quantile", target=0.9) == QuantileClip(0.9)
    assert set(CLIPS) == {"abadi", "auto-s", "psac", "indicator", "per-layer", "quantile"}
    with pytest.raises(ConfigError, match="did you mean 'abadi'"):
        build("abbadi", bound=1.0)
    with pytest.raises(ConfigError, match="gama"):
        build("auto-s", bound=1.0, gama=0.1)
