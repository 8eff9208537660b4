"""Random numbers by name: the laws they follow, and that nothing but the name counts."""

import numpy as np
import torch
from scipy import stats

from mycelia.attacks.draws import Draws, row_keys


def draws(n: int = 50, seed: int = 7, attack: str = "PGD") -> Draws:
    return Draws(seed, attack, row_keys(torch.arange(n, dtype=torch.float32)[:, None]))


def test_what_a_row_gets_does_not_depend_on_the_others() -> None:
    whole = draws()
    rows = torch.tensor([3, 40, 7])
    for kind in ("uniform", "normal", "signs", "exponential"):
        together = getattr(whole, kind)("use", (4, 5), step=2, restart=1)
        assert torch.equal(together[rows], getattr(whole.of(rows), kind)("use", (4, 5), step=2, restart=1))


def test_every_part_of_a_name_counts() -> None:
    first = draws().uniform("use", (8,))
    others = [
        draws(seed=8).uniform("use", (8,)), draws(attack="BIM").uniform("use", (8,)),
        draws().uniform("other", (8,)), draws().uniform("use", (8,), step=1),
        draws().uniform("use", (8,), restart=1),
    ]  # fmt: skip
    for other in others:
        assert not bool((other == first).any())
    assert torch.equal(first, draws().uniform("use", (8,)))
    assert len(first.unique()) == first.numel()


def test_rows_are_known_by_bytes_and_goal() -> None:
    x = torch.rand(30, 3, 4)
    y = torch.arange(30)
    keys = row_keys(x, y)
    assert len(keys.unique()) == 30
    assert torch.equal(row_keys(x[[4, 4, 2]], y[[4, 4, 2]]), keys[[4, 4, 2]])
    assert bool((row_keys(x, y + 1) != keys).all())
    changed = x.clone()
    changed[5, 1, 1] = torch.nextafter(changed[5, 1, 1], torch.tensor(2.0))
    assert (row_keys(changed, y) != keys).nonzero().tolist() == [[5]]
    swapped = x.clone()
    swapped[6, 0, 0], swapped[6, 0, 1] = x[6, 0, 1], x[6, 0, 0]
    assert (row_keys(swapped, y) != keys).nonzero().tolist() == [[6]]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert len(row_keys(x.to(dtype), y).unique()) == 30


def test_the_laws() -> None:
    many = draws(200)
    uniform = many.uniform("u", (500,)).flatten().numpy()
    assert (uniform.min() > 0, uniform.max() < 1) == (True, True)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert stats.kstest(many.normal("n", (500,)).flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(many.exponential("e", (500,)).flatten().numpy(), "expon").pvalue > 1e-3
    counts = np.bincount(many.integers("i", 7, (500,)).flatten().numpy(), minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-3
    signs = many.signs("s", (500,))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 4 / signs.numel() ** 0.5
    lagged = np.corrcoef(uniform[:-1], uniform[1:])[0, 1]
    across = np.corrcoef(uniform[:-500], uniform[500:])[0, 1]
    assert max(abs(lagged), abs(across)) < 4 / len(uniform) ** 0.5


def test_balls_are_filled_evenly() -> None:
    """In d dimensions the share of a ball within radius r is r^d, and coordinates have mean 0."""
    many, d = draws(20_000), 5
    like = torch.zeros(20_000, d, dtype=torch.float64)
    for p, length in (
        ("l2", lambda v: v.square().sum(1).sqrt()),
        ("l1", lambda v: v.abs().sum(1)),
        ("linf", lambda v: v.abs().amax(1)),
    ):
        points = many.in_ball("b", p, like)
        assert stats.kstest((length(points) ** d).numpy(), "uniform").pvalue > 1e-3
        assert float(points.mean(0).abs().max()) < 4 / 20_000**0.5
        directions = np.sign(points.numpy()) @ (2 ** np.arange(d))
        assert stats.chisquare(np.unique(directions, return_counts=True)[1]).pvalue > 1e-3
