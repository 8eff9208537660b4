"""Scores of a model: one number for how far a change has to go, from attacks, gradients, or margins.

They order models of one task; none of them is a certificate. Without rows to take it from a number is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.base import Curve
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Goal, Untargeted, predicted
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import Norm, norm, wide
from mycelia.attacks.result import AttackResult, Status
from mycelia.engine.errors import ConfigError, DataError

__all__ = [
    "Ball", "Clever", "CurveArea", "EmpiricalRobustness", "GreatScore", "LossSensitivity", "clever",
    "empirical_robustness", "great_score", "loss_sensitivity", "security_curve_area",
]  # fmt: skip

Ball = Literal["l1", "l2", "linf"]
_DUAL: Final[Mapping[Ball, Norm]] = {"l1": "linf", "l2": "l2", "linf": "l1"}
_FEWEST: Final = 10  # maxima that a fit of three parameters needs
_SAME: Final = 1e-6  # relative: maxima that differ by no more are one number
_DIGITS: Final = 6  # of the spread of the maxima: rounding errors are not to steer the fit
_SHAPES: Final = (1.0, 3.0, 10.0, 30.0)  # where a fit starts
_REACH: Final = 1.0  # spreads of the maxima that an endpoint may lie above the largest
_SLOPE: Final = math.sqrt(math.pi / 2)


class EmpiricalRobustness(NamedTuple):
    """Of a model, by one attack.

    Attributes:
        norm: that changes and inputs are measured in.
        mean: of change over input; None without rows.
        rows: that it is the mean of.
        zero: broken rows whose input has norm 0: they have no relative change and are left out.
        held: rows that the attack found no change for, which are left out, too: the mean is too small then.
    """

    norm: Norm
    mean: float | None
    rows: int
    zero: int
    held: int


class LossSensitivity(NamedTuple):
    """Of a model.

    Attributes:
        norm: of the gradients.
        each: float64 [n].
        mean: over rows whose gradient is finite; None without any.
        rows: how many these are.
    """

    norm: Ball
    each: Tensor
    mean: float | None
    rows: int


class Clever(NamedTuple):
    """CLEVER scores, [n] each.

    Attributes:
        norm: of the ball.
        eps: its radius.
        score: smallest change that is to be expected, in units of the inputs, float64; 0 where the goal is
            reached already, NaN where inputs or outputs are not finite, eps where it is no smaller.
        nearest: the class that the score is from, int64; −1 where no gradient was looked at.
        slope: estimated largest dual norm of the gradient of the margin to it in the ball, float64; else NaN.
        p_value: Kolmogorov–Smirnov test of the fit behind the slope, float64; NaN where nothing was fitted.
        located: whether the fit has an endpoint near the maxima that were seen, bool; elsewhere the slope is
            the largest maximum and their spread once more.
        mean: of the scores of rows that were looked at; None without any.
        rows: how many these are.
    """

    norm: Ball
    eps: float
    score: Tensor
    nearest: Tensor
    slope: Tensor
    p_value: Tensor
    located: Tensor
    mean: float | None
    rows: int


class GreatScore(NamedTuple):
    """Of a model on samples of a generative model.

    Attributes:
        each: float64 [n], from 0 to √(π/2).
        mean: the score; None without samples.
        ci95: 95 % interval of the mean over the generator's distribution (Hoeffding, JASA 1963).
    """

    each: Tensor
    mean: float | None
    ci95: tuple[float, float] | None


class CurveArea(NamedTuple):
    """Under robust accuracy against eps, over the width of the radii: from 0 to 1.

    Attributes:
        low: smallest radius.
        high: largest.
        raw: area under robust accuracy as it came; None without rows.
        nested: where what broke at a smaller radius counts as broken.
    """

    low: float
    high: float
    raw: float | None
    nested: float | None


def empirical_robustness(x: Tensor, result: AttackResult, p: Norm | None = None) -> EmpiricalRobustness:
    """Mean over broken rows of the smallest change that an attack found, relative to the input.

    Moosavi-Dezfooli, Fawzi, Frossard: "DeepFool", CVPR 2016, section 4.1 (ρ_adv): Σ ‖r(x)‖ / ‖x‖ over n.

    Args:
        x: clean inputs [n, …].
        result: of a minimum-norm attack on them, best without eps.
        p: norm; None: that of the attack.

    Raises:
        ConfigError: the attack does not look for small changes.
        DataError: other rows than those of the result.
    """
    if x.shape != result.x_adv.shape:
        raise DataError(
            f"x {list(x.shape)}, x_adv {list(result.x_adv.shape)}",
            rule="the inputs that were attacked",
            who="empirical_robustness",
        )
    if getattr(result.attack, "kind", "minimum") != "minimum":
        raise ConfigError(
            f"{type(result.attack).__name__} stays in a ball",
            rule='an attack of kind "minimum"',
            fix="DeepFool(), CarliniWagner(), DDN(), FMN() or FAB()",
            who="empirical_robustness",
        )
    measure: Any = result.norm if p is None else p
    broken = result.is_(Status.BROKEN).nonzero()[:, 0].to(x.device)
    clean = x[broken].double()
    before = norm(clean, measure)
    change = norm(result.x_adv.to(x.device)[broken].double() - clean, measure)
    some = before > 0
    counts = result.counts
    return EmpiricalRobustness(
        measure, _mean(change[some] / before[some]), int(some.sum()), int((~some).sum()), counts.held
    )


def loss_sensitivity(
    model: object, x: Any, y: Tensor, *, p: Ball = "l1", loss: Loss = "ce", batch: int = 256
) -> LossSensitivity:
    """Norm of the gradient of each row's loss with respect to the row.

    Arpit et al.: "A closer look at memorization in deep networks", ICML 2017, section 3.2: ‖∂L/∂x‖₁. There it
    is averaged over the steps of a training, too; this is one model.

    Args:
        model: see `as_model`; offers gradients.
        x: inputs [n, …], floating point.
        y: true classes, integers [n].
        p: which norm.
        loss: see `LOSSES`.
        batch: rows at a time.

    Raises:
        ConfigError: a model without gradients, or a setting out of range.
        DataError: inputs that are not floating point, or not as many as labels.
    """
    target, inputs, goal = _asked(model, x, Untargeted(y), p, batch, "loss_sensitivity")
    each = torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)
    with target.quiet():
        for rows in _batches(inputs, batch):
            some = goal.of(rows)
            gradient, _, _ = target.gradient(inputs[rows], lambda z, some=some: some.loss(z, loss))  # type: ignore[misc]
            each[rows] = norm(gradient.double(), p)
    finite = each.isfinite()
    return LossSensitivity(p, each, _mean(each[finite]), int(finite.sum()))


def clever(
    model: object,
    x: Any,
    goal: Goal,
    *,
    eps: float,
    p: Ball = "l2",
    batches: int = 500,
    samples: int = 1024,
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
    batch: int = 256,
) -> Clever:
    """The change that a row is expected to need: margin over the largest gradient in a ball around it.

    Weng, Zhang, Chen, Yi, Su, Gao, Hsieh, Daniel: "Evaluating the robustness of neural networks: an extreme
    value theory approach", ICLR 2018, algorithms 1 (targeted) and 2 (untargeted). For each other class,
    min(margin / a, eps), a the location of a reverse Weibull distribution fitted by maximum likelihood to the
    largest dual norms of the gradient of the margin, of so many batches of samples. Samples are uniform in
    the ball and then moved into the box, which a change may not leave either. An estimate, no bound: a model
    that hides its gradients scores too high (Goodfellow: arXiv 1804.07870).

    The cost of a row is batches · samples passes, each with a backward pass for every other class; the paper
    finds 50 batches to be close to 500.

    Args:
        model: see `as_model`; offers gradients.
        x: inputs [n, …], floating point.
        goal: `Untargeted` compares the true class with all others, `Targeted` the predicted class with one.
        eps: radius of the ball, above 0, in units of the inputs; no score is larger.
        p: norm of the ball.
        batches: maxima that are fitted, at least 10.
        samples: points that each of them is the largest of, at least 1.
        rng: seed; draws are a row's own, whatever else is in x.
        bounds: smallest and largest value of an input; numbers, or tensors that broadcast to x.
        batch: points at a time.

    Raises:
        ConfigError: a model without gradients, or a setting out of range.
        DataError: inputs that are not floating point, beyond their bounds, or not as many as goals; a class
            that the model does not have.
    """
    if not 0 < eps < math.inf or batches < _FEWEST or samples < 1:
        raise ConfigError(
            f"eps {eps}, batches {batches}, samples {samples}",
            rule=f"above 0 and finite, at least {_FEWEST}, at least 1",
            who="clever",
        )
    target, inputs, goal = _asked(model, x, goal, p, batch, "clever")
    n, device = len(inputs), inputs.device
    low, high = bounds_of(bounds, inputs)
    inputs, sound = clipped(inputs, low, high)
    score, slope, p_value = torch.full((3, n), torch.nan, dtype=torch.float64, device=device)
    nearest = torch.full((n,), -1, dtype=torch.int64, device=device)
    located = torch.zeros(n, dtype=torch.bool, device=device)
    if n:
        keys = row_keys(inputs, goal.labels)
        with target.quiet():
            given = torch.where(wide(sound, inputs), inputs, torch.zeros_like(inputs))
            logits = torch.cat([target(given[rows]) for rows in _batches(inputs, batch)])
            own, others = _classes(goal, logits)
            precise = logits.double()
            gap = torch.where(others, precise.gather(1, own[:, None]) - precise, torch.inf)
            sound = sound & logits.isfinite().all(1)
            score[sound & (gap.amin(1) <= 0)] = 0.0
            rows = (sound & (gap.amin(1) > 0)).nonzero()[:, 0]
            box = low.expand_as(inputs)[rows], high.expand_as(inputs)[rows]
            maxima = _maxima(
                target, inputs[rows], own[rows], others[rows], box, Draws(rng, "clever", keys[rows]),
                eps, p, (batches, samples), batch,
            )  # fmt: skip
        if len(rows):
            fits = _fitted(maxima, others[rows])
            reach = torch.where(others[rows], gap[rows] / fits[0], torch.inf)  # a slope of 0: no limit
            score[rows] = reach.amin(1).clamp(max=eps)
            nearest[rows] = first = reach.argmin(1)
            slope[rows], p_value[rows], sure = fits.gather(2, first.expand(3, -1)[..., None])[..., 0]
            located[rows] = sure > 0
    looked = nearest >= 0
    return Clever(p, eps, score, nearest, slope, p_value, located, _mean(score[looked]), int(looked.sum()))


def great_score(scores: Tensor, y: Tensor) -> GreatScore:
    """√(π/2) · max(f_y − max_{j≠y} f_j, 0), averaged over samples of a generative model.

    Li, Chen, Ho: "GREAT score: global robustness evaluation of adversarial perturbation using generative
    models", NeurIPS 2024. The samples are the caller's: y is the class that the generator was asked for. On
    rows of a data set it is a mean over these, and the interval one over what they were drawn from. The
    factor is from a bound on the slope of a classifier smoothed with Gaussian noise of deviation 1.

    Args:
        scores: of the samples, [n, classes], from 0 to 1: softmax or sigmoid of the logits.
        y: their classes, integers [n].

    Raises:
        DataError: scores outside [0, 1], or not one class for each row.
    """
    labels = Untargeted(y).y.to(scores.device)
    good = scores.dim() == 2 and scores.is_floating_point() and scores.shape[1] > 1
    if not good or len(labels) != len(scores) or bool(((scores < 0) | (scores > 1) | scores.isnan()).any()):
        raise DataError(
            f"{scores.dtype} {list(scores.shape)} for {len(labels)} labels",
            rule="[n, classes] from 0 to 1, one label each",
            fix="logits.softmax(1)",
            who="great_score",
        )
    precise = scores.double()
    own, others = _classes(Untargeted(labels), precise)
    margin = precise.gather(1, own[:, None])[:, 0] - precise.masked_fill(~others, -torch.inf).amax(1)
    each = _SLOPE * margin.clamp(min=0)
    mean = _mean(each)
    if mean is None:
        return GreatScore(each, None, None)
    half = _SLOPE * math.sqrt(math.log(2 / 0.05) / (2 * len(each)))
    return GreatScore(each, mean, (max(0.0, mean - half), min(_SLOPE, mean + half)))


def security_curve_area(curve: Curve) -> CurveArea:
    """Area under the security evaluation curve (Biggio, Roli: "Wild patterns", Pattern Recognition 2018).

    By trapezoids between the radii, over their width: 1 is a model that no radius breaks. Only areas over the
    same radii compare.

    Args:
        curve: of one attack; a radius of 0 puts clean accuracy at its start.

    Raises:
        ConfigError: fewer than two radii.
    """
    if len(curve.eps) < 2:
        raise ConfigError(
            f"{len(curve.eps)} radii", rule="at least 2", fix="eps=[0, 0.01, 0.02]", who="security_curve_area"
        )
    raw = [result.robust_accuracy for result in curve.results]
    nested = [_mean((status == int(Status.HELD)).double()) for status in curve.nested]
    return CurveArea(curve.eps[0], curve.eps[-1], _area(curve.eps, raw), _area(curve.eps, nested))


# --- inside -----------------------------------------------------------------------------------------


def _asked(model: object, x: Any, goal: Goal, p: Ball, batch: int, who: str) -> tuple[Model, Tensor, Goal]:
    """Arguments, checked: the model, the inputs, and the goal on their device."""
    target = as_model(model, numpy=isinstance(x, np.ndarray))
    if "gradient" not in target.offers:
        raise ConfigError(
            f"{target.name} offers {', '.join(sorted(target.offers))}", rule="it needs gradients", who=who
        )
    if p not in get_args(Ball) or batch < 1:
        raise ConfigError(
            f"norm {p!r}, batch {batch}", rule=f"one of {', '.join(get_args(Ball))}; at least 1", who=who
        )
    inputs = inputs_of(x)
    if len(goal) != len(inputs):
        raise DataError(f"{len(inputs)} inputs, a goal of {len(goal)} rows", rule="one for each", who=who)
    return target, inputs, goal.of(torch.arange(len(inputs), device=goal.labels.device))


def _batches(x: Tensor, batch: int) -> tuple[Tensor, ...]:
    return torch.arange(len(x), device=x.device).split(batch) if len(x) else ()


def _classes(goal: Goal, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The class that is to be left, [n], and those that it is compared with, bool [n, classes]."""
    labels = goal.labels.to(logits.device)
    count = logits.shape[1]
    if len(labels) and int(labels.max()) >= count:
        raise DataError(f"class {int(labels.max())}", rule=f"the model has {count}", who="goal")
    chosen = labels[:, None] == torch.arange(count, device=logits.device)
    if goal.targeted:
        return predicted(logits).clamp(min=0), chosen
    return labels, ~chosen


def _maxima(
    model: Model, x: Tensor, own: Tensor, others: Tensor, box: tuple[Tensor, Tensor], draws: Draws,
    eps: float, p: Ball, counts: tuple[int, int], batch: int,
) -> Tensor:  # fmt: skip
    """Largest dual norm of the gradient of each margin, of each batch of samples: [n, batches, classes]."""
    batches, samples = counts
    n, classes = others.shape
    found = torch.zeros(n * batches, classes, dtype=torch.float64, device=x.device)
    total = n * batches * samples
    for start in range(0, total, batch):
        places = torch.arange(start, min(start + batch, total), device=x.device)
        rows, slots = places // (batches * samples), places // samples
        keys = row_keys(draws.keys[rows][:, None], places % (batches * samples))
        change = Draws(draws.seed, draws.attack, keys).in_ball("samples", p, x[rows])
        points = torch.minimum(torch.maximum(x[rows] + eps * change, box[0][rows]), box[1][rows])
        slopes = _slopes(model, points, own[rows], others[rows], _DUAL[p])
        found.scatter_reduce_(0, slots[:, None].expand(-1, classes), slopes, "amax")
    return found.view(n, batches, classes)


def _slopes(model: Model, points: Tensor, own: Tensor, others: Tensor, dual: Norm) -> Tensor:
    """Dual norm of the gradient of z_own − z_j at each point, float64 [n, classes]; 0 where not asked for."""
    found = torch.zeros(others.shape, dtype=torch.float64, device=points.device)
    with torch.enable_grad():
        leaf = points.detach().requires_grad_()
        logits = model.traced(leaf)
        mine = logits.gather(1, own[:, None])[:, 0]
        for j in others.any(0).nonzero()[:, 0].tolist():
            margin = (mine - logits[:, j])[others[:, j]].sum()
            (gradient,) = torch.autograd.grad(margin, leaf, retain_graph=True)
            found[:, j] = norm(gradient.double(), dual)
    return torch.where(found.isnan(), torch.inf, found)  # a gradient that is none bounds nothing


def _fitted(maxima: Tensor, others: Tensor) -> Tensor:
    """[3, n, classes]: endpoint, p value and whether it was located (1 or 0), where it is asked for."""
    values = maxima.cpu().numpy()
    found = np.full((3, *others.shape), np.nan)
    for row, j in others.nonzero().tolist():
        found[:, row, j] = _endpoint(values[row, :, j])
    return torch.from_numpy(found).to(maxima.device)


def _endpoint(maxima: NDArray[np.float64]) -> tuple[float, float, float]:
    """The location of a reverse Weibull distribution by maximum likelihood; p value; 1 where it was located.

    With a shape below 1 the likelihood has no bound and is highest at the largest value. Where it grows with
    the shape for ever, values have no endpoint (their limit is Gumbel's) and the location would run away. A
    density has no largest value twice: such a one (of a network that is linear in pieces) is the endpoint.
    """
    top, spread = float(maxima.max()), float(np.ptp(maxima)) if np.isfinite(maxima).all() else math.nan
    if not spread > _SAME * top:
        return top, math.nan, 1.0
    scaled = ((maxima - top) / spread).round(_DIGITS)
    if np.count_nonzero(maxima >= top * (1 - _SAME)) > 1:
        return top, math.nan, 1.0
    best: tuple[bool, float] = (False, -math.inf)
    shape, place, scale = 1.0, 0.0, 1.0
    for start in _SHAPES:
        try:
            with np.errstate(all="ignore"):
                fit = stats.weibull_max.fit(scaled, start, loc=0.1 * start, scale=0.5 + 0.1 * start)
                likely = float(stats.weibull_max.logpdf(scaled, *fit).sum())
        except stats.FitError:
            continue
        if likely > -math.inf and fit[1] >= 0 and (fit[0] >= 1, likely) > best:
            best, (shape, place, scale) = (bool(fit[0] >= 1), likely), map(float, fit)
    if best[1] == -math.inf:
        return top + _REACH * spread, math.nan, 0.0
    p_value = float(stats.kstest(scaled, stats.weibull_max(shape, place, scale).cdf).pvalue)
    return top + min(place, _REACH) * spread, p_value, float(place <= _REACH)


def _area(eps: tuple[float, ...], heights: list[float | None]) -> float | None:
    known = [each for each in heights if each is not None]
    if len(known) < len(eps):
        return None
    return float(np.trapezoid(known, eps)) / (eps[-1] - eps[0])


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None
