"""Bounds of networks: exact where exact answers are known, sound everywhere, and the tighter ones tighter."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import PGD, Untargeted, with_normalisation
from mycelia.attacks.defences.verification import Method, verify
from mycelia.attacks.defences.verification.intervals import Rounding, bounds_after, bounds_through
from mycelia.attacks.defences.verification.layers import Linear, MaxPool
from mycelia.attacks.defences.verification.reading import read
from mycelia.attacks.defences.verification.zonotopes import zonotope_through
from mycelia.engine import models
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import cross_entropy

torch.set_num_threads(1)

METHODS: tuple[Method, ...] = ("interval", "zonotope")


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same module in float64, with normal weights scaled by their fan-in, in evaluation mode."""
    draw = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for each in module.parameters():
            fan = each[0].numel() if each.dim() > 1 else 4
            each.copy_(torch.randn(each.shape, generator=draw, dtype=torch.float64) / fan**0.5)
    return module


def mlp(features: int = 3, width: int = 6, classes: int = 3, depth: int = 2, seed: int = 0) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return drawn(nn.Sequential(*layers, nn.Linear(features, classes)), seed)


def pictures(seed: int = 0) -> nn.Module:
    """All kinds of layers once, and a max-pool with overlap and padding."""
    norm = nn.BatchNorm2d(3)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(torch.tensor([0.1, -0.2, 0.0]))
    norm.running_var.copy_(torch.tensor([0.5, 1.5, 1.0]))
    return drawn(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(3, 4, 2, stride=2), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(), nn.Flatten(),
            nn.Linear(4, 4),
        ),
        seed,
    )  # fmt: skip


# --- exact answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_affine_models_are_exact(method: Method) -> None:
    """Margin less Σ_k |w_y − w_j|_k · min(eps, room_k) where the box cuts the ball, for the worst j."""
    model, x = drawn(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 3), uniform(40, 3, 4)
    layer = model[1]  # type: ignore[index]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    flat = x.flatten(1)
    y = (flat @ weight.T + bias).argmax(1)
    for eps in (0.0, 0.02, 0.1, 0.6):
        rows = weight[y][:, None] - weight
        at_worst = torch.where(rows > 0, (flat - eps).clamp(0, 1)[:, None], (flat + eps).clamp(0, 1)[:, None])
        margins = (rows * at_worst).sum(2) + bias[y][:, None] - bias
        exact = margins.scatter(1, y[:, None], torch.inf).amin(1)
        found = verify(model, x, y, eps, method=method)
        assert bool((found.margin <= exact + 1e-15).all())
        torch.testing.assert_close(found.margin, exact, atol=1e-5 * max(eps, 1e-6) * 12, rtol=1e-9)
        far = exact.abs() > 1e-4
        assert torch.equal(found.certified[far], (exact > 0)[far])


def test_a_hand_made_relu_net() -> None:
    """z_0 = relu(x_0 + x_1) − relu(x_0 + x_1 + 0), z_1 = −0.5: intervals lose what moves together.

    With h = relu(a) and a in [1 − 2·eps, 1 + 2·eps] always positive, z_0 = h − h = 0 and the margin is 0.5;
    intervals give −4·eps + 0.5 where the two copies are kept apart by a layer.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[0].weight.fill_(1.0)  # type: ignore[operator]
        model[2].weight.copy_(torch.tensor([[1.0, -1.0]]))  # type: ignore[operator]
        model[4].weight.copy_(torch.tensor([[-1.0], [0.0]]))  # type: ignore[operator]
        model[4].bias.copy_(torch.tensor([0.5, 0.0]))  # type: ignore[operator]
    x, y = torch.full((1, 2), 0.5, dtype=torch.float64), torch.tensor([0])
    assert float(verify(model, x, y, 0.2, method="interval").margin) == pytest.approx(0.5 - 0.8, abs=1e-4)
    assert float(verify(model, x, y, 0.2, method="zonotope").margin) == pytest.approx(0.5, abs=1e-4)


def test_one_relu_has_the_smallest_area() -> None:
    """x in [−1, 3]: slope 3/4, so relu(x) in 0.75 x + [0, 0.75] (theorem 3.1)."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    chain, tensors = read(model)
    tensors = {name: torch.ones_like(each) for name, each in tensors.items()}
    ends = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    rounding = Rounding.of(torch.float64)
    known = bounds_through(chain, *ends, tensors, rounding)
    part = replace(chain, layers=chain.layers[:2])
    found = zonotope_through(part, *ends, known, tensors, rounding, 10)
    torch.testing.assert_close(found.centre, torch.full((1, 2), 0.75 * 1 + 0.375, dtype=torch.float64))
    assert found.terms.shape == (3, 2)
    expected = torch.tensor([[1.5, 1.5], [0.375, 0.0], [0.0, 0.375]], dtype=torch.float64)
    torch.testing.assert_close(found.terms, expected)
    assert float(found.slack.max()) < 1e-13


# --- sound ------------------------------------------------------------------------------------------


def exact_margin(model: nn.Module, x: Tensor, y: int, eps: float) -> float:
    """The smallest margin of a one-hidden-layer net with two inputs: at a vertex of its linear regions.

    A margin is linear in each region that the hidden units' lines cut from the box, so smallest at a vertex:
    a corner, a line crossing an edge, or two lines crossing.
    """
    first, last = model[0], model[2]  # type: ignore[index]
    low, high = (x - eps).clamp(0, 1), (x + eps).clamp(0, 1)
    lines = [(w, -float(b)) for w, b in zip(first.weight.detach(), first.bias.detach(), strict=True)]
    for axis in range(2):
        unit = torch.eye(2, dtype=torch.float64)[axis]
        lines += [(unit, float(low[axis])), (unit, float(high[axis]))]
    points = []
    for (a, c), (b, d) in itertools.combinations(lines, 2):
        matrix = torch.stack([a, b])
        if abs(float(torch.linalg.det(matrix))) > 1e-12:
            points.append(torch.linalg.solve(matrix, torch.tensor([c, d], dtype=torch.float64)))
    found = torch.stack(points)
    inside = ((found >= low - 1e-9) & (found <= high + 1e-9)).all(1)
    z = last(torch.relu(first(found[inside]))).detach()
    others = z.clone()
    others[:, y] = -torch.inf
    return float((z[:, y] - others.amax(1)).min())


@pytest.mark.parametrize("seed", range(4))
def test_never_above_the_exact_answer_of_tiny_nets(seed: int) -> None:
    """Against all vertices of all linear regions; with no unit of open sign, equal to it."""
    model, x = mlp(2, 5, 3, depth=1, seed=seed), uniform(12, 2, seed=seed)
    y = model(x).argmax(1)
    gaps = []
    for eps in (0.0, 0.05, 0.2):
        exact = torch.tensor([exact_margin(model, x[i], int(y[i]), eps) for i in range(12)], dtype=x.dtype)
        interval, zonotope = (verify(model, x, y, eps, method=method).margin for method in METHODS)
        assert bool((zonotope <= exact + 1e-9).all())
        assert bool((interval <= zonotope).all())
        gaps.append(((exact - interval).mean(), (exact - zonotope).mean()))
        first = model[0]  # type: ignore[index]
        swing = eps * first.weight.abs().sum(1)
        settled = ((first(x).abs() > swing).all(1)) & ((x > eps) & (x < 1 - eps)).all(1)
        torch.testing.assert_close(zonotope[settled], exact[settled], atol=1e-5, rtol=1e-6)
    assert gaps[2][1] < gaps[2][0]


@pytest.mark.parametrize("make", [mlp, pictures], ids=["dense", "pictures"])
def test_bounds_hold_for_drawn_inputs(make: object) -> None:
    """All layers' outputs lie in their bounds, corners of the box among the inputs."""
    model = make(seed=1)  # type: ignore[operator]
    shape = (3,) if make is mlp else (2, 8, 8)
    x, eps = uniform(3, *shape), 0.1
    chain, tensors = read(model)
    rounding = Rounding.of(torch.float64)
    low, high = (x - eps).clamp(0, 1), (x + eps).clamp(0, 1)
    known = bounds_through(chain, low, high, tensors, rounding)
    draws = uniform(400, 3, *shape, seed=5)
    draws[:200] = draws[:200].round()
    points = low + draws * (high - low)
    for row in range(3):
        now = points[:, row]
        for depth, layer in enumerate(chain.layers):
            now = layer(now, tensors)
            below, above = (each[row] for each in known[depth + 1])
            assert bool(((now >= below) & (now <= above)).all()), layer
            part = replace(chain, layers=chain.layers[: depth + 1])
            own = [(a[row : row + 1], b[row : row + 1]) for a, b in known]
            for most in (0, 3, 2000):
                found = zonotope_through(
                    part, low[row : row + 1], high[row : row + 1], own, tensors, rounding, most
                ).bounds()
                assert bool(((now >= found[0]) & (now <= found[1])).all()), (layer, most)
        torch.testing.assert_close(now, model(points[:, row]).detach())


def test_equal_lower_bounds_in_a_max_pool() -> None:
    """One number is fixed at what the other is at least: the largest is the other, not the fixed one."""
    model = nn.Sequential(nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[-1.0], [0.0]]))  # type: ignore[operator]
        model[2].bias.copy_(torch.tensor([0.8, 0.0]))  # type: ignore[operator]
    low, high = (torch.tensor([[[[0.5, end]]]], dtype=torch.float64) for end in (0.5, 0.9))
    chain, tensors = read(model)
    rounding = Rounding.of(torch.float64)
    for flip in (False, True):
        ends = (low.flip(3), high.flip(3)) if flip else (low, high)
        known = bounds_through(chain, *ends, tensors, rounding)
        found = zonotope_through(chain, *ends, known, tensors, rounding, 10).bounds()
        assert float(found[0][0, 0]) <= -0.1 + 1e-6
        assert float(found[1][0, 0]) >= 0.3 - 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_pgd_never_breaks_a_certified_row(seed: int) -> None:
    """In float32, as the model computes; and the attack does break rows that are not certified."""
    for model, shape in ((mlp(5, 16, 3, seed=seed).float(), (5,)), (pictures(seed).float(), (2, 8, 8))):
        x = uniform(60, *shape, seed=seed).float()
        y = model(x).argmax(1)
        for eps in (0.01, 0.05):
            held = [verify(model, x, y, eps, method=method).certified for method in METHODS]
            assert bool((held[1] | ~held[0]).all())
            attacked = PGD(steps=20).run(model, x, Untargeted(y), eps=eps, rng=seed)
            broken = model(attacked.x_adv).argmax(1) != y
            assert not bool((broken & held[1]).any())
        assert bool(held[1].any()) or bool(broken.any())


def test_float32_bounds_hold_as_the_model_computes() -> None:
    """Large weights that cancel: float32 logits are off by more than the margin of exact arithmetic.

    z_0 = (2²⁴ + 1) − 2²⁴ = 1 exactly, and 0 or 1 in float32, by the order of the sum; z_1 = 0.5.
    """
    weight = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [0.0, 0.0, 0.0]])
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(weight)  # type: ignore[operator]
        model[0].bias.copy_(torch.tensor([0.0, 0.5]))  # type: ignore[operator]
    x, y = torch.ones(1, 3), torch.tensor([0])
    assert not bool(verify(model, x, y, 0.0).certified)
    assert bool(verify(model.double(), x.double(), y, 0.0).certified)


def test_nothing_is_certified_where_the_model_overflows() -> None:
    """Both logits are infinite in float32, so class 0 is first; in exact arithmetic it is class 1."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e30)  # type: ignore[operator]
        model[2].weight.copy_(torch.tensor([[1e30], [2e30]]))  # type: ignore[operator]
    x, y = torch.ones(1, 1), torch.tensor([1])
    assert int(model(x).argmax()) == 0
    for method in METHODS:
        assert not bool(verify(model, x, y, 0.0, method=method).certified)


# --- tighter ----------------------------------------------------------------------------------------


def test_zonotopes_are_never_looser_and_more_terms_help() -> None:
    for seed in range(3):
        model, x = mlp(6, 20, 4, depth=3, seed=seed), uniform(10, 6, seed=seed)
        y = model(x).argmax(1)
        for eps in (0.005, 0.05, 0.3):
            interval = verify(model, x, y, eps, method="interval").margin
            few, many = (verify(model, x, y, eps, terms=terms).margin for terms in (0, 2000))
            assert bool((few >= interval).all())
            assert bool((many >= interval).all())
        assert float(verify(model, x, y, 0.005).margin.mean()) > float(
            verify(model, x, y, 0.005, method="interval").margin.mean()
        )


def test_margins_fall_with_eps_and_rows_stand_alone() -> None:
    model, x = pictures(2), uniform(5, 2, 8, 8)
    y = model(x).argmax(1)
    for method in METHODS:
        margins = torch.stack([verify(model, x, y, eps, method=method).margin for eps in (0.0, 0.01, 0.03)])
        assert bool((margins[1:] <= margins[:-1]).all())
        radii = torch.tensor([0.0, 0.01, 0.03, 0.01, 0.0])
        mixed = verify(model, x, y, radii, method=method)
        assert torch.equal(mixed.eps, radii.double())
        for row, which in enumerate((0, 1, 2, 1, 0)):
            assert float(mixed.margin[row]) == pytest.approx(float(margins[which, row]), rel=1e-5, abs=1e-7)
    clean = model(x).detach()
    own = clean.gather(1, y[:, None])
    exact = (own - clean).scatter(1, y[:, None], torch.inf).amin(1)
    torch.testing.assert_close(margins[0], exact, atol=1e-9, rtol=1e-9)


def test_what_is_wrong_already_is_never_certified() -> None:
    model, x = mlp(), uniform(20, 3)
    wrong = (model(x).argmax(1) + 1) % 3
    for method in METHODS:
        found = verify(model, x, wrong, 0.0, method=method)
        assert not bool(found.certified.any())
        assert found.accuracy == 0
    x[3, 1] = torch.nan
    found = verify(model, x, model(x).argmax(1), 0.0)
    assert not bool(found.certified[3])
    assert bool(found.margin[3].isnan())
    assert int(found.certified.sum()) == 19
    assert verify(model, x[:0], wrong[:0], 0.1).accuracy is None


# --- reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["export", "eager"])
def test_a_program_is_read_as_its_module(backend: str) -> None:
    model = pictures(3)
    example = torch.zeros(2, 2, 8, 8).double(), torch.zeros(2, dtype=torch.int64)
    program = capture(model, cross_entropy, example, backend=backend)
    x = uniform(3, 2, 8, 8)
    y = model(x).argmax(1)
    chain, tensors = read(program)
    torch.testing.assert_close(chain(x, tensors), model(x).detach())
    found, expected = verify(program, x, y, 0.01), verify(model, x, y, 0.01)
    torch.testing.assert_close(found.margin, expected.margin)
    params, buffers = program.init()
    flipped = params | {"9.weight": -params["9.weight"], "9.bias": -params["9.bias"]}
    other = verify(program, x, y, 0.01, params=flipped, buffers=buffers)
    assert not bool(other.certified.any())


@pytest.mark.parametrize(("name", "shape"), [("mlp", (1, 12, 12)), ("lenet", (1, 28, 28))])
def test_models_of_the_library_are_read(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, input_shape=shape, classes=10, seed=0).eval()
    x = uniform(2, *shape).float()
    chain, tensors = read(model)
    torch.testing.assert_close(chain(x, tensors), model(x).detach())


def test_normalisation_is_part_of_the_model() -> None:
    """eps in raw units: that of the inner model, divided by the deviation."""
    inner = drawn(nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), 1)
    model = nn.Sequential(OrderedDict(all=with_normalisation(inner, [0.4, 0.2], [0.5, 0.5]))).double()
    x = uniform(6, 2, 2, 2) * 0.5 + 0.25
    y = model(x).argmax(1)
    mean = torch.tensor([0.4, 0.2]).double().view(1, 2, 1, 1)
    found = verify(model, x, y, 0.05)
    expected = verify(inner, (x - mean) / 0.5, y, 0.1, bounds=(-4.0, 4.0))
    torch.testing.assert_close(found.margin, expected.margin, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "1, a Tanh"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding="same")), "padding"),
        (nn.Sequential(nn.Flatten(2)), "flatten"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), "ceil_mode"),
        (nn.Sequential(nn.AvgPool2d(2, padding=1)), "padding"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(2)), "size 2"),
        (nn.LayerNorm(4), "LayerNorm"),
    ],
)
def test_layers_without_bounds_are_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(module)


def test_branches_are_refused() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x + self.linear(x)
            return found

    program = capture(Residual(), cross_entropy, (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="no bounds for add"):
        read(program)


def test_arguments_are_checked() -> None:
    model, x, y = mlp(), uniform(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="eps"):
        verify(model, x, y, -0.1)
    with pytest.raises(ConfigError, match="method"):
        verify(model, x, y, 0.1, method="exact")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="labels"):
        verify(model, x, y[:3], 0.1)
    with pytest.raises(DataError, match="label without"):
        verify(model, x, y + 3, 0.1)
    with pytest.raises(DataError, match="bounds"):
        verify(model, x + 1, y, 0.1)
    with pytest.raises(ConfigError, match="float16"):
        verify(mlp().half(), x, y, 0.1)
    with pytest.raises(DataError, match="two at least"):
        verify(nn.Sequential(nn.Linear(3, 1)).double(), x, y, 0.1)


def test_layers_alone() -> None:
    """A dense layer by hand: W = (1, −2), b = 3 on [0, 1] × [1, 2] gives [0, 2]; pools are monotone."""
    tensors = {"w": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([3.0])}
    low, high = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    found = bounds_after(Linear("w", "b"), low, high, tensors)
    assert [float(each) for each in found] == [-1.0, 2.0]
    pool = MaxPool((1, 2), (1, 2))
    found = bounds_after(pool, low.view(1, 1, 1, 2), high.view(1, 1, 1, 2), {})
    assert [float(each) for each in found] == [1.0, 2.0]
