"""Faults in parameters: NumPy's views of the same memory, closed forms of affine models, and laws."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks.faults import FAULTS, Injection, campaign, flip_bit, inject
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import affine, images, small

WIDTHS = {
    torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64, torch.int8: 8,
    torch.uint8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64,
}  # fmt: skip
FLOATS = [dtype for dtype in WIDTHS if dtype.is_floating_point]
DTYPES = pytest.mark.parametrize("dtype", WIDTHS, ids=str)


def bits(values: Tensor) -> np.ndarray:
    """The memory of each value as an unsigned integer, by NumPy."""
    raw = values.contiguous().view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, dtype=f"<u{values.element_size()}").reshape(values.shape)


def some(dtype: torch.dtype, n: int = 40, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (3 * torch.randn(n, generator=draw, dtype=torch.float64)).to(dtype)
    return torch.randint(-100, 100, (n,), generator=draw).to(dtype)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "first.weight": some(dtype, 60, 1).view(6, 10), "first.bias": some(dtype, 6, 2),
        "second.weight": some(dtype, 24, 3).view(4, 6), "firstly": some(dtype, 10, 4),
    }  # fmt: skip


def changed(before: Mapping[str, Tensor], after: Injection) -> int:
    return sum(int((bits(before[name]) != bits(value)).sum()) for name, value in after.params.items())


# --- bits -----------------------------------------------------------------------------------------


@DTYPES
def test_each_bit_is_that_of_the_memory(dtype: torch.dtype) -> None:
    values = some(dtype)
    kept = bits(values).copy()
    for bit in range(WIDTHS[dtype]):
        found = flip_bit(values, bit)
        assert (found.dtype, found.shape) == (dtype, values.shape)
        assert (bits(found) == kept ^ kept.dtype.type(1 << bit)).all()
        assert (bits(flip_bit(found, bit)) == kept).all()
    assert (bits(values) == kept).all()


def test_bits_with_known_values() -> None:
    one = torch.ones(1)
    assert flip_bit(one, 30).item() == np.inf  # 0x3f800000 to 0x7f800000
    assert flip_bit(one, 23).item() == 0.5  # the last bit of the exponent
    assert flip_bit(one, 22).item() == 1.5  # the first bit of the fraction
    assert flip_bit(one, 0).item() == 1 + 2**-23
    assert flip_bit(torch.tensor(0, dtype=torch.int8), 7).item() == -128
    assert flip_bit(torch.tensor(0, dtype=torch.uint8), 7).item() == 128
    assert flip_bit(torch.tensor(1.0, dtype=torch.float64), 62).item() == np.inf
    odd = torch.full((3,), torch.nan)
    assert (bits(flip_bit(flip_bit(odd, 3), 3)) == bits(odd)).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.data())
def test_a_bit_of_its_own_for_each_value(values: list[float], data: st.DataObject) -> None:
    given_ = np.array(values, dtype=np.float32)
    which = data.draw(st.lists(st.integers(0, 31), min_size=len(values), max_size=len(values)))
    found = flip_bit(torch.from_numpy(given_.copy()), torch.tensor(which))
    other = given_.view(np.uint32) ^ (np.uint32(1) << np.array(which, dtype=np.uint32))
    assert (bits(found) == other).all()


def test_bits_that_are_refused() -> None:
    for bit in (-1, 32, torch.tensor([0, 32])):
        with pytest.raises(ConfigError, match="0 to 31"):
            flip_bit(torch.ones(2), bit)
    with pytest.raises(DataError, match="integer type"):
        flip_bit(torch.ones(2, dtype=torch.bool), 0)
    with pytest.raises(DataError, match="integer type"):
        flip_bit(torch.ones(2, dtype=torch.complex64), 0)


# --- the eight ------------------------------------------------------------------------------------


@DTYPES
def test_designated_bits(dtype: torch.dtype) -> None:
    """Floats: top exponent bit; unsigned: top bit; signed: the one below the sign."""
    params = {"w": some(dtype)}
    found = inject(params, "bitflips_designated", count=40).params["w"]
    bit = {torch.uint8: 7}.get(dtype, WIDTHS[dtype] - 2)
    assert (bits(found) ^ bits(params["w"]) == 1 << bit).all()


@DTYPES
def test_random_flips_change_one_bit_each_and_any(dtype: torch.dtype) -> None:
    params = {"w": some(dtype, 4000)}
    difference = bits(inject(params, "bitflips_random", fraction=1.0).params["w"]) ^ bits(params["w"])
    assert (np.bitwise_count(difference) == 1).all()
    each = np.bincount(np.log2(difference.astype(np.float64)).astype(int), minlength=WIDTHS[dtype])
    assert stats.chisquare(each).pvalue > 1e-4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_faults_in_floats(dtype: torch.dtype) -> None:
    params = {"w": some(dtype, 500)}
    before = params["w"].double().numpy()

    def after(fault: str) -> np.ndarray:
        found = inject(params, fault, fraction=1.0).params["w"]
        assert found.dtype is dtype
        return found.double().numpy()

    assert (after("zeros") == 0).all()
    assert np.isnan(after("nan")).all()
    assert (after("inf") == np.inf).all()
    assert (after("anti_activation") == -before).all()
    rounded = torch.from_numpy(np.round(before, 1)).to(dtype).double().numpy()
    assert (after("precision_loss") == rounded).all()
    drawn = after("random")
    assert (np.abs(drawn) <= 1).all()
    coarse = 0.01 if dtype is torch.bfloat16 else 0.0
    assert stats.kstest(drawn, stats.uniform(-1, 2).cdf).statistic < 0.09 + coarse


def test_rounding_leaves_what_has_no_decimals() -> None:
    for dtype, value in ((torch.float16, 65504.0), (torch.float64, 1.7e308), (torch.float32, 3e38)):
        params = {"w": torch.tensor([value, -value, torch.inf, torch.nan], dtype=dtype)}
        found = inject(params, "precision_loss", count=4).params["w"]
        assert torch.equal(found[:3], params["w"][:3])
        assert bool(found[3].isnan())


def test_faults_of_integers() -> None:
    params = {"w": torch.tensor([-128, -127, -1, 0, 1, 127], dtype=torch.int8)}
    assert inject(params, "zeros", count=6).params["w"].tolist() == [0] * 6
    assert inject(params, "anti_activation", count=6).params["w"].tolist() == [127, 127, 1, 0, -1, -127]
    assert torch.equal(inject(params, "precision_loss", count=6).params["w"], params["w"])
    for fault in ("random", "nan", "inf"):
        with pytest.raises(ConfigError, match="floating point"):
            inject(params, fault, count=1)
    with pytest.raises(ConfigError, match="signed"):
        inject({"w": torch.zeros(3, dtype=torch.uint8)}, "anti_activation", count=1)


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("fault", ["bitflips_random", "bitflips_designated"])
def test_as_many_values_change_as_were_asked_for(fault: str, dtype: torch.dtype) -> None:
    params = weights(dtype)
    kept = copy.deepcopy(params)
    for count in (0, 1, 7, 100):
        found = inject(params, fault, count=count, rng=count)
        assert found.count == changed(kept, found) == count
        for name, places in found.positions.items():
            assert len(places.unique()) == len(places)
            hit = bits(found.params[name]).ravel() != bits(kept[name]).ravel()
            assert np.flatnonzero(hit).tolist() == places.tolist()
    for fraction, number in ((0.0, 0), (0.05, 5), (0.123, 12), (1.0, 100)):
        assert inject(params, fault, fraction=fraction).count == number
    for name, value in kept.items():
        assert (bits(params[name]) == bits(value)).all()


def test_one_layer() -> None:
    params = weights()
    found = inject(params, "nan", fraction=1.0, layer="first")
    assert set(found.positions) == {"first.weight", "first.bias"}  # and not "firstly"
    assert found.params["second.weight"] is params["second.weight"]
    assert inject(params, "nan", fraction=1.0, layer="first.bias").count == 6
    with pytest.raises(ConfigError, match=r"second\.weight"):
        inject(params, "nan", count=1, layer="sec")


def test_positions_are_even_and_those_of_the_seed() -> None:
    params = weights()
    first, again, other = (inject(params, "zeros", count=10, rng=seed) for seed in (1, 1, 2))
    flips = inject(params, "bitflips_random", count=10, rng=1)

    def places(of: Injection) -> dict[str, list[int]]:
        return {name: each.tolist() for name, each in of.positions.items()}

    assert places(first) == places(again) == places(flips) != places(other)
    small_ = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    times = np.zeros(10)
    for seed in range(600):
        for name, where in places(inject(small_, "zeros", count=3, rng=seed)).items():
            times[np.array(where) + {"a": 0, "b": 4}[name]] += 1
    assert times.sum() == 1800
    assert stats.chisquare(times).pvalue > 1e-4


def test_settings_that_are_refused() -> None:
    params = weights()
    for bad in ({}, {"count": 1, "fraction": 0.1}):
        with pytest.raises(ConfigError, match="exactly one"):
            inject(params, "zeros", **bad)  # type: ignore[arg-type]
    for bad in ({"count": -1}, {"count": 101}, {"fraction": -0.1}, {"fraction": 1.1}):
        with pytest.raises(ConfigError, match=r"count|fraction"):
            inject(params, "zeros", **bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is none"):
        inject(params, "zeros", fraction=0.001)
    with pytest.raises(ConfigError, match="bitflips_random"):
        inject(params, "stuck", count=1)


# --- a campaign -----------------------------------------------------------------------------------


def inputs(n: int = 60) -> tuple[Tensor, Tensor]:
    """Of the affine model; every fifth label is not what it says."""
    x = torch.rand(n, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = affine()(x).argmax(1)
    return x, torch.where(torch.arange(n) % 5 == 0, (y + 1) % 4, y)


def test_what_faults_in_all_values_do_to_an_affine_model() -> None:
    x, y = inputs()
    model = affine()
    z = model(x).detach()
    reports = {each.fault: each for each in campaign(model, x, y, fraction=1.0, repeats=2)}
    assert list(reports) == list(FAULTS)
    assert len(reports) == 8
    for fault, said in reports.items():
        assert said.accuracy_clean == pytest.approx(0.8)
        assert said.drop.mean == pytest.approx(0.8 - said.accuracy.mean)
        assert (said.fault, said.layer, said.count, said.n) == (fault, None, 44, 60)
    nan = reports["nan"]
    assert (nan.accuracy.mean, nan.changed.mean, nan.non_finite.mean) == (0, 1, 1)
    assert reports["inf"].non_finite.mean == 1
    zeros = reports["zeros"]  # all logits are 0, and the first class is said
    assert zeros.accuracy.mean == pytest.approx(float((y == 0).double().mean()))
    assert zeros.changed.mean == pytest.approx(float((z.argmax(1) != 0).double().mean()))
    assert zeros.non_finite.mean == 0
    opposite = reports["anti_activation"]
    assert opposite.changed.mean == 1
    assert opposite.accuracy.mean == pytest.approx(float((z.argmin(1) == y).double().mean()))
    weight, bias = model.linear.weight.detach(), model.linear.bias.detach()
    rounded = x.numpy() @ np.round(weight.numpy(), 1).T + np.round(bias.numpy(), 1)
    expected = float((rounded.argmax(1) != z.argmax(1).numpy()).mean())
    assert reports["precision_loss"].changed.mean == pytest.approx(expected)


def test_no_fault_changes_nothing() -> None:
    x, y = inputs()
    for said in campaign(affine(), x, y, count=0, repeats=3):
        assert (said.drop.mean, said.changed.mean, said.non_finite.mean) == (0, 0, 0)
        assert said.drop.ci95 == (0, 0)


def test_intervals_are_students() -> None:
    x, y = inputs()
    (said,) = campaign(affine(), x, y, faults=["bitflips_random"], count=2, repeats=8, rng=3)
    for each, least in ((said.accuracy, 0), (said.changed, 0), (said.drop, said.accuracy_clean - 1)):
        values = np.array(each.values)
        assert len(values) == 8
        assert each.mean == pytest.approx(values.mean())
        assert values.std() > 0
        interval = stats.t.interval(0.95, 7, values.mean(), values.std(ddof=1) / 8**0.5)
        assert each.ci95 == pytest.approx(np.clip(interval, least, least + 1))
    (one,) = campaign(affine(), x, y, faults=["zeros"], count=1, repeats=1)
    assert one.accuracy.ci95 is None


def test_faults_do_not_depend_on_the_others_nor_on_batches() -> None:
    x, y = inputs()
    whole = campaign(affine(), x, y, count=3, repeats=2, rng=1)
    alone = campaign(affine(), x, y, faults=["random"], count=3, repeats=2, rng=1, batch=7)
    assert alone[0] == {each.fault: each for each in whole}["random"]


def test_the_model_keeps_its_own() -> None:
    x = images(20, torch.float32)
    model = small(torch.float32).train()
    y = torch.zeros(20, dtype=torch.int64)
    state = copy.deepcopy(model.state_dict())
    campaign(model, x, y, fraction=0.5, repeats=2, layer="layers.5")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConfigError, match="one of"):
        campaign(model, x, y, faults=["stuck"], count=1)
    assert model.training


def test_a_program_is_hit_like_its_module() -> None:
    x, y = inputs()
    module = affine()
    program = capture(
        module, lambda z, t: functional.cross_entropy(z, t, reduction="none"), (x[:2], y[:2]), backend="eager"
    )
    mine = campaign(program, x, y, fraction=0.2, repeats=3, rng=5)
    assert mine == campaign(module, x, y, fraction=0.2, repeats=3, rng=5)


class Quantised(nn.Module):
    """z = (q / 100) x with int8 weights."""

    def __init__(self) -> None:
        super().__init__()
        q = (affine().linear.weight.detach() * 30).round().clamp(-127, 127).to(torch.int8)
        self.q = nn.Parameter(q, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.q.to(x.dtype) / 100).T


def test_int8_models() -> None:
    x, _ = inputs()
    y = Quantised()(x).argmax(1)
    flipped, opposite = campaign(
        Quantised(), x, y, faults=["bitflips_designated", "anti_activation"], fraction=1.0, repeats=1
    )
    q = Quantised().q.numpy().view(np.uint8) ^ np.uint8(64)
    expected = (x.numpy() @ q.view(np.int8).astype(float).T).argmax(1) != y.numpy()
    assert flipped.changed.mean == pytest.approx(expected.mean())
    assert opposite.changed.mean == 1


def test_inputs_that_are_refused() -> None:
    x, y = inputs()
    with pytest.raises(DataError, match="one label each"):
        campaign(affine(), x, y[:3], count=1)
    with pytest.raises(DataError, match="one label each"):
        campaign(affine(), x[:0], y[:0], count=1)
    with pytest.raises(ConfigError, match="at least 1"):
        campaign(affine(), x, y, count=1, repeats=0)
