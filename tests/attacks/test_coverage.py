"""Coverage: each measure by hand, the laws of all, and what hooks see of a module."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from mycelia.attacks.fuzzing import (
    Activations,
    BoundaryCoverage,
    Coverage,
    KMultisection,
    NeuronCoverage,
    SensitivityConvergence,
    StrongActivation,
    TopKCoverage,
    activations,
    sensitivity,
    tapped,
)
from mycelia.engine.errors import ConfigError, DataError

MEASURES: dict[str, Callable[[], Coverage]] = {
    "neuron": NeuronCoverage,
    "scaled": lambda: NeuronCoverage(0.5, scaled=True),
    "topk": lambda: TopKCoverage(2),
    "strong": StrongActivation,
    "boundary": BoundaryCoverage,
    "multisection": lambda: KMultisection(7),
    "convergence": SensitivityConvergence,
}
measures = pytest.mark.parametrize("make", MEASURES.values(), ids=MEASURES)


def layers(values: Tensor, first: int = 2) -> dict[str, Tensor]:
    """As if from two layers."""
    return {"a": values[:, :first], "b": values[:, first:]}


def one(*rows: list[float]) -> dict[str, Tensor]:
    return {"only": torch.tensor(rows, dtype=torch.float64)}


def still(values: Activations) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in values.items()}


def fitted(make: Callable[[], Coverage]) -> Coverage:
    coverage = make()
    training = layers(torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    coverage.fit(training, still(training))
    return coverage


def add(coverage: Coverage, values: Tensor) -> Tensor:
    found = layers(values)
    return coverage.update(found, still(found))


# --- laws -----------------------------------------------------------------------------------------


@measures
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_laws(make: Callable[[], Coverage], data: st.DataObject) -> None:
    """In [0, 1], never falls, ignores order and batches, and counts a gain for whoever came first."""
    values = torch.randn(
        12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    values = values * data.draw(st.sampled_from([1.5, 3.0]))
    whole = fitted(make)
    gains = add(whole, values)
    assert 0 < whole.value <= 1
    assert int(gains.sum()) == whole.covered
    assert whole.value == whole.covered / whole.units
    shuffled, sizes = fitted(make), data.draw(st.lists(st.integers(1, 5), min_size=12, max_size=12))
    order = torch.tensor(data.draw(st.permutations(range(12))))
    before, place = 0.0, 0
    for size in sizes:
        add(shuffled, values[order[place : place + size]])
        assert shuffled.value >= before
        before, place = shuffled.value, place + size
    assert shuffled.value == whole.value
    single = fitted(make)
    assert torch.equal(torch.cat([add(single, row[None]) for row in values]), gains)
    assert not bool(add(single, values).any())
    assert single.value == whole.value


@measures
def test_a_range_is_streamed(make: Callable[[], Coverage]) -> None:
    training = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = make()
    for some in training.split(7):
        found = layers(some)
        parts.fit(found, still(found))
    values = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 1.5
    whole = fitted(make)
    add(whole, values)
    add(parts, values)
    assert parts.value == whole.value


@measures
def test_what_is_refused(make: Callable[[], Coverage]) -> None:
    values = torch.ones(2, 6, dtype=torch.float64)
    if make().ranged:
        with pytest.raises(ConfigError, match="training"):
            add(make(), values)
        with pytest.raises(ConfigError, match="training"):
            _ = make().value
    else:
        assert make().value == 0.0
    coverage = fitted(make)
    add(coverage, values)
    with pytest.raises(ConfigError, match="fit after update"):
        coverage.fit(layers(values), still(layers(values)))
    with pytest.raises(DataError, match="those of the first call"):
        coverage.update({"a": values}, {"a": values})
    with pytest.raises(DataError, match="layer a"):
        coverage.update({"a": values[:, 0], "b": values}, layers(values))
    with pytest.raises(DataError, match="as many rows"):
        coverage.update({"a": values[:1, :2], "b": values[:, 2:]}, layers(values))
    spoilt = make()
    with pytest.raises(DataError, match="not finite"):
        spoilt.fit(layers(values * math.nan), still(layers(values)))


@measures
def test_what_is_not_a_number_covers_nothing(make: Callable[[], Coverage]) -> None:
    coverage = fitted(make)
    add(coverage, torch.full((3, 6), math.nan, dtype=torch.float64))
    assert coverage.covered == 0


@measures
def test_a_copy_goes_on_by_itself(make: Callable[[], Coverage]) -> None:
    coverage = fitted(make)
    other = coverage.copy()
    add(other, torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2)
    assert coverage.value == 0.0
    assert other.value > 0


# --- by hand --------------------------------------------------------------------------------------


def test_neurons_above_a_threshold() -> None:
    coverage = NeuronCoverage(0.5)
    assert coverage.update(one([0.5, 0.6, 0.0, -2.0], [0.0, 0.9, 0.7, 0.0])).tolist() == [1, 1]
    assert coverage.value == 0.5  # the threshold itself is not above it
    scaled = NeuronCoverage(0.5, scaled=True)
    scaled.update(one([10.0, 20.0, 16.0, 0.0], [3.0, 3.0, 3.0, 3.0]))  # 0.5, 1, 0.8, 0; then nothing to scale
    assert scaled.value == 0.5


def test_the_largest_of_a_layer() -> None:
    coverage = TopKCoverage(2)
    coverage.update({"a": torch.tensor([[1.0, 1.0, 1.0]]), "b": torch.tensor([[0.0, 5.0, -1.0, 5.0]])})
    assert coverage.covered == 4
    coverage.update({"a": torch.tensor([[1.0, 1.0, 0.0]]), "b": torch.tensor([[0.0, 7.0, 0.0, 7.0]])})
    assert coverage.covered == 4  # ties went to the lowest index: the same neurons
    coverage.update({"a": torch.tensor([[0.0, 0.0, 1.0]]), "b": torch.tensor([[9.0, 7.0, 0.0, 0.0]])})
    assert coverage.value == 6 / 7
    wide = TopKCoverage(9)
    wide.update(one([0.0, 0.0]))
    assert wide.value == 1.0


def test_beyond_the_training_range() -> None:
    strong, boundary = StrongActivation(), BoundaryCoverage()
    for coverage in (strong, boundary):
        coverage.fit(one([0.0, 0.0], [1.0, 1.0]))
        coverage.update(one([1.0, 0.0]))  # the ends are inside
        assert coverage.value == 0.0
        coverage.update(one([1.1, -0.1]))
    assert strong.value == 1 / 2
    assert boundary.value == 2 / 4
    boundary.update(one([-1.0, 2.0], [5.0, 5.0]))
    assert boundary.value == 1.0


def test_sections_of_the_training_range() -> None:
    coverage = KMultisection(4)
    coverage.fit(one([0.0, 7.0, -1.0], [1.0, 7.0, 3.0]))  # the second one is constant
    assert coverage.units == 8
    coverage.update(one([0.0, 7.0, 3.0]))  # both ends are inside
    assert coverage.covered == 2
    coverage.update(one([-0.01, 7.0, 3.01]))  # outside is nowhere
    assert coverage.covered == 2
    coverage.update(one([0.25, 7.0, 0.0], [0.2499, 7.0, 0.999]))  # a border belongs to the section above
    assert coverage.covered == 4
    coverage.update(one([0.6, 7.0, 1.5], [0.99, 7.0, -0.5]))
    assert coverage.value == 1.0


def test_constant_neurons_alone_have_no_coverage() -> None:
    coverage = KMultisection(4)
    coverage.fit(one([1.0], [1.0]))
    with pytest.raises(DataError, match="constant"):
        _ = coverage.value


def test_sensitivity_converges_as_its_distribution_is_shown() -> None:
    """Cells have a tenth of the chain each, so more than half of it takes six cells or, by chance, five."""
    draw = torch.Generator().manual_seed(0)
    training = torch.randn(4000, 3, dtype=torch.float64, generator=draw) * 2 + 1
    coverage = SensitivityConvergence(0.5)
    coverage.fit({"l": training}, {"l": torch.zeros_like(training)})
    mean, deviation = training.mean(0), training.std(0)
    needed = []
    for k in range(10):
        place = stats.norm.ppf((k + 0.5) / 10)
        values = (mean + deviation * place)[None]
        coverage.update({"l": values}, {"l": torch.zeros_like(values)})
        needed.append(coverage.covered)
    assert needed[:4] == [0, 0, 0, 0]
    assert needed[6:] == [3, 3, 3, 3]
    assert coverage.value == 1.0


def test_the_difference_counts_not_the_value() -> None:
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(50, 3, dtype=torch.float64, generator=draw) * 100
    noise = torch.randn(50, 3, dtype=torch.float64, generator=draw).round(decimals=3)
    first, second = SensitivityConvergence(), SensitivityConvergence()
    first.fit({"l": (clean + noise)}, {"l": clean})
    second.fit({"l": noise}, {"l": torch.zeros_like(noise)})
    for k in range(50):
        rows = slice(k, k + 1)
        first.update({"l": (clean + noise)[rows]}, {"l": clean[rows]})
        second.update({"l": noise[rows]}, {"l": torch.zeros_like(noise)[rows]})
        assert first.value == second.value
    assert first.value == 1.0


def test_convergence_needs_pairs() -> None:
    coverage = SensitivityConvergence()
    with pytest.raises(ConfigError, match="unchanged inputs"):
        coverage.fit(one([1.0]))
    with pytest.raises(DataError, match="pairs"):
        coverage.fit(one([1.0]), one([1.0], [2.0]))
    coverage.fit(one([1.0, 0.0], [2.0, 0.0]), one([0.0, 0.0], [0.0, 0.0]))
    assert coverage.units == 1  # the second neuron never answers


def test_chains_are_drawn_from_the_stream() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - it must not move
    values = one([-1.0], [0.0], [1.0])
    shares = []
    for rng in (0, 0, 1):
        coverage = SensitivityConvergence(rng=rng)
        coverage.fit(values, still(values))
        coverage.update(values, still(values))
        shares.append(coverage._share)
    assert np.array_equal(shares[0], shares[1])
    assert not np.array_equal(shares[0], shares[2])
    assert np.allclose(shares[0], 0.1, atol=0.06)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_sensitivity_is_the_mean_change_of_each_layer() -> None:
    changed = {"a": torch.tensor([[1.0, 3.0]]), "b": torch.tensor([[5.0]])}
    clean = {"a": torch.tensor([[2.0, 0.0]]), "b": torch.tensor([[4.0]])}
    assert sensitivity(changed, clean).tolist() == [(2.0 + 1.0) / 2]


def test_settings_that_are_refused() -> None:
    for make in (
        lambda: NeuronCoverage(math.nan), lambda: TopKCoverage(0), lambda: KMultisection(0),
        lambda: SensitivityConvergence(1.0), lambda: SensitivityConvergence(-0.1),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make()


# --- hooks ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(1, 3, 3), nn.ReLU()
        self.body = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 4))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("as asked")
        found: Tensor = self.body(self.act(self.act(self.conv(x)) - 0.1))
        return found


def hooks(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())


def test_hooks_see_layers_and_are_removed() -> None:
    model, x = Net().train(), torch.rand(5, 1, 6, 6)
    found = activations(model, x, batch=2)
    assert {name: values.shape for name, values in found.items()} == {
        "conv": (5, 3), "act": (5, 3), "act#2": (5, 3), "body.2": (5, 4),
    }  # fmt: skip
    assert torch.allclose(found["conv"], model.conv(x).mean((2, 3)), atol=1e-6)
    assert torch.allclose(found["act"], model.conv(x).relu().mean((2, 3)), atol=1e-6)
    assert torch.allclose(found["body.2"], model.eval()(x), atol=1e-6)
    assert not found["conv"].requires_grad
    assert hooks(model) == 0
    model.train()
    model.fails = True
    with pytest.raises(RuntimeError, match="as asked"):
        activations(model, x)
    assert hooks(model) == 0
    assert all(each.training for each in model.modules())
    with pytest.raises(RuntimeError, match="mine"), tapped(model):
        raise RuntimeError("mine")
    assert hooks(model) == 0


def test_layers_may_be_named() -> None:
    model, x = Net(), torch.rand(2, 1, 6, 6)
    assert list(activations(model, x, ["body"])) == ["body"]
    with pytest.raises(ConfigError, match="no layer nothing"):
        activations(model, x, ["conv", "nothing"])
    with pytest.raises(ConfigError, match="no layer to look at"):
        activations(nn.Flatten(), x)
    assert list(activations(nn.Linear(3, 2), torch.rand(2, 3))) == ["Linear"]
    assert hooks(model) == 0


def test_features_of_a_sequence_are_last_and_channels_first() -> None:
    x = torch.rand(2, 7, 5)
    words = nn.Sequential(nn.Linear(5, 3), nn.GELU(), nn.LayerNorm(3))
    found = activations(words, x)
    assert {values.shape for values in found.values()} == {(2, 3)}
    assert torch.allclose(found["0"], words[0](x).mean(1), atol=1e-6)
    assert torch.allclose(found["1"], words[1](words[0](x)).mean(1), atol=1e-6)
    wave = nn.Sequential(nn.Conv1d(7, 4, 3), nn.Tanh())
    assert {values.shape for values in activations(wave, x).values()} == {(2, 4)}


def test_what_is_no_tensor_is_left_out_unless_it_was_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.cells(x)[0][:, -1])
            return found

    model, x = Recurrent(), torch.rand(2, 5, 3)
    assert list(activations(model, x)) == ["out"]
    with pytest.raises(DataError, match="layer cells"):
        activations(model, x, ["cells"])
    assert hooks(model) == 0
