"""Numbers about an attack, a defence, and a defence against queries.

Those of an attack and of a defence are from Ling et al.: "DEEPSEC: a uniform platform for security analysis
of deep learning models", IEEE S&P 2019. Without rows to take it from a number is None, beside a count of 0.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.divergence import jensen_shannon
from mycelia.attacks.filters import blurred, jpeg
from mycelia.attacks.goals import Goal, Untargeted
from mycelia.attacks.intervals import wilson
from mycelia.attacks.model import as_model
from mycelia.attacks.norms import norm
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.sensitivity import neuron_sensitivity
from mycelia.attacks.ssim import ssim
from mycelia.attacks.windows import Layout, around, as_nchw
from mycelia.engine.errors import ConfigError, DataError

__all__ = [
    "AttackMetrics", "DefenceMetrics", "Interval", "Quartiles", "QueryMetrics", "attack_metrics",
    "defence_metrics", "neuron_sensitivity", "perturbation_sensitivity", "query_metrics",
]  # fmt: skip

Interval = tuple[float, float]
_BLUR: Final = 0.5  # pixels


class Quartiles(NamedTuple):
    """Of the distances of successes.

    Attributes:
        norm: that the attack makes small or keeps small.
        q25: a quarter of the distances is no larger.
        median: half of them.
        q75: three quarters.
        max: all.
    """

    norm: str
    q25: float
    median: float
    q75: float
    max: float


class AttackMetrics(NamedTuple):
    """Of one attack. Means are over successes; shares come with Wilson's 95 % interval.

    Shares of success and of resistance mean nothing without a radius and are None where eps is None.

    Attributes:
        n: rows.
        attacked: rows that are broken or held.
        clean_correct: rows that could have been broken: these, and those that failed.
        broken: successes.
        mr: misclassification rate, broken of attacked.
        mr_ci95: its interval.
        success_rate: broken of clean correct.
        success_rate_ci95: its interval.
        robust_accuracy: held of n.
        robust_accuracy_ci95: its interval.
        acac: mean confidence of the adversarial class.
        actc: mean confidence of the true class.
        ald_l0: mean share of coordinates changed.
        ald_l2: mean l2 change, in units of the inputs.
        ald_linf: mean linf change, in units of the inputs.
        ald_l0_rel: mean number of coordinates changed over those of the clean row that are not 0.
        ald_l2_rel: mean l2 change over the clean row's l2 norm.
        ald_linf_rel: the same of linf. Rows whose clean norm is 0 have no relative change and are left out.
        ass: mean structural similarity; None without a layout.
        psd: mean perturbation sensitivity distance; None without a layout.
        nte: mean gap between the two largest probabilities.
        rgb: share of successes that stay so after Gaussian blur and rounding to 8 bits; None without a model
            and a layout.
        rgb_ci95: its interval.
        ric: share of successes that stay so after JPEG; None without a model, a layout and a quality.
        ric_ci95: its interval.
        distance: quartiles over successes.
        seconds: per row of x.
        queries: mean forward passes per row of x.
        gradients: mean backward passes per row of x.
    """

    n: int
    attacked: int
    clean_correct: int
    broken: int
    mr: float | None
    mr_ci95: Interval | None
    success_rate: float | None
    success_rate_ci95: Interval | None
    robust_accuracy: float | None
    robust_accuracy_ci95: Interval | None
    acac: float | None
    actc: float | None
    ald_l0: float | None
    ald_l2: float | None
    ald_linf: float | None
    ald_l0_rel: float | None
    ald_l2_rel: float | None
    ald_linf_rel: float | None
    ass: float | None
    psd: float | None
    nte: float | None
    rgb: float | None
    rgb_ci95: Interval | None
    ric: float | None
    ric_ci95: Interval | None
    distance: Quartiles | None
    seconds: float | None
    queries: float | None
    gradients: float | None


class DefenceMetrics(NamedTuple):
    """Of a defended model beside the raw one, on the same clean rows.

    Attributes:
        n: rows.
        accuracy_raw: share of them that the raw model has right.
        accuracy_raw_ci95: its interval.
        accuracy_defended: the same of the defended model.
        accuracy_defended_ci95: its interval.
        cav: classification accuracy variance, defended minus raw.
        crr: classification rectify ratio, share of rows that only the defended model has right.
        crr_ci95: its interval.
        csr: classification sacrifice ratio, share of rows that only the raw model has right.
        csr_ci95: its interval.
        both: rows that both have right.
        ccv: mean change of the top confidence over these.
        cos: mean Jensen–Shannon divergence over these, natural logarithm.
    """

    n: int
    accuracy_raw: float | None
    accuracy_raw_ci95: Interval | None
    accuracy_defended: float | None
    accuracy_defended_ci95: Interval | None
    cav: float | None
    crr: float | None
    crr_ci95: Interval | None
    csr: float | None
    csr_ci95: Interval | None
    both: int
    ccv: float | None
    cos: float | None


class QueryMetrics(NamedTuple):
    """Of a defence against attacks by queries.

    Attributes:
        queries_raw: mean queries that an attacked row took on the raw model.
        queries_defended: the same on the defended one.
        qcv: query count variance, min(defended − raw, most) / most.
        success_raw: share of attacked rows broken on the raw model.
        success_raw_ci95: its interval.
        success_defended: the same on the defended one.
        success_defended_ci95: its interval.
        asv: attack success variance, raw − defended.
        benign: benign queries.
        fpr: share of them flagged.
        fpr_ci95: its interval.
        qrv: query response variance, the relative rise of a benign query's response time.
    """

    queries_raw: float | None
    queries_defended: float | None
    qcv: float | None
    success_raw: float | None
    success_raw_ci95: Interval | None
    success_defended: float | None
    success_defended_ci95: Interval | None
    asv: float | None
    benign: int
    fpr: float | None
    fpr_ci95: Interval | None
    qrv: float | None


def attack_metrics(
    x: Tensor,
    result: AttackResult,
    p_clean: Tensor,
    p_adv: Tensor,
    y: Tensor,
    *,
    goal: Goal | None = None,
    bounds: Bounds = (0.0, 1.0),
    layout: Layout | None = None,
    model: object = None,
    jpeg_quality: int | None = None,
    batch: int = 256,
) -> AttackMetrics:
    """All numbers of an attack.

    Args:
        x: clean inputs [n, …].
        result: of the attack on them.
        p_clean: softmax probabilities of x, [n, classes].
        p_adv: softmax probabilities of `result.x_adv`, [n, classes].
        y: true classes, integers [n].
        goal: of the attack; None: `Untargeted(y)`.
        bounds: of inputs; finite for numbers about images.
        layout: "nchw" or "nhwc", where inputs are images.
        model: that was attacked, for what stays a success; see `as_model`.
        jpeg_quality: 1 to 95, for `ric`; needs the extra "image".
        batch: rows at a time.

    Raises:
        ConfigError: a setting out of range, or infinite bounds with a layout.
        DataError: arguments that do not have one row each, or probabilities that are none.
    """
    n = len(x)
    wanted = Untargeted(y) if goal is None else goal
    if not n == len(result) == len(y) == len(wanted) or result.x_adv.shape != x.shape:
        raise DataError(
            f"{n} inputs, {len(result)} results, {len(y)} labels, a goal of {len(wanted)} rows",
            rule="one for each input",
            who="attack_metrics",
        )
    for name, values in (("p_clean", p_clean), ("p_adv", p_adv)):
        _check_probabilities(values, n, name)
    counts, broken = result.counts, result.is_(Status.BROKEN)
    rows = broken.nonzero()[:, 0]
    attacked, correct = counts.broken + counts.held, counts.broken + counts.held + counts.failed
    radius = result.eps is not None
    known = p_adv[rows].double()
    top = known.topk(2, 1).values
    clean, moved = x[rows], result.x_adv[rows]
    delta = moved.double() - clean.double()
    size = math.prod(x.shape[1:])
    similar = sensitive = None
    rgb: tuple[float | None, Interval | None] = (None, None)
    ric: tuple[float | None, Interval | None] = (None, None)
    if layout is not None:
        low, high = _range(bounds)
        similar = ssim(clean, moved, high - low, layout)
        sensitive = perturbation_sensitivity(clean, moved, layout, data_range=high - low)
        if model is not None:
            goals = wanted.of(rows.to(wanted.labels.device))
            smooth = _eight_bits(blurred(moved, _BLUR, layout), low, high)
            rgb = _share(_stays(model, smooth, goals, batch), len(rows))
            if jpeg_quality is not None:
                packed = jpeg(moved, jpeg_quality, layout, bounds=(low, high))
                ric = _share(_stays(model, packed, goals, batch), len(rows))
    return AttackMetrics(
        n,
        attacked,
        correct,
        counts.broken,
        *_share(counts.broken, attacked if radius else 0),
        *_share(counts.broken, correct if radius else 0),
        *_share(counts.held, n if radius else 0),
        acac=_mean(top[:, 0]),
        actc=_mean(known.gather(1, y.to(known.device)[rows, None])[:, 0]),
        ald_l0=_mean(norm(delta, "l0") / max(1, size)),
        ald_l2=_mean(norm(delta, "l2")),
        ald_linf=_mean(norm(delta, "linf")),
        ald_l0_rel=_relative(delta, clean, "l0"),
        ald_l2_rel=_relative(delta, clean, "l2"),
        ald_linf_rel=_relative(delta, clean, "linf"),
        ass=None if similar is None else _mean(similar),
        psd=None if sensitive is None else _mean(sensitive),
        nte=_mean(top[:, 0] - top[:, 1]),
        rgb=rgb[0],
        rgb_ci95=rgb[1],
        ric=ric[0],
        ric_ci95=ric[1],
        distance=_quartiles(result.distance[result.norm][rows], result.norm) if len(rows) else None,
        seconds=result.seconds / n if n else None,
        queries=_mean(result.queries.double()),
        gradients=_mean(result.gradients.double()),
    )


def defence_metrics(p_raw: Tensor, p_defended: Tensor, y: Tensor) -> DefenceMetrics:
    """What a defence costs and mends on clean rows.

    Args:
        p_raw: softmax probabilities of the raw model, [n, classes].
        p_defended: the same of the defended one.
        y: true classes, integers [n].

    Raises:
        DataError: arguments that do not have one row each, or probabilities that are none.
    """
    n = len(y)
    for name, values in (("p_raw", p_raw), ("p_defended", p_defended)):
        _check_probabilities(values, n, name)
    if p_raw.shape != p_defended.shape:
        raise DataError(
            f"{p_raw.shape[1]} and {p_defended.shape[1]} classes", rule="as many", who="defence_metrics"
        )
    raw, defended = p_raw.double(), p_defended.double()
    truth = y.to(raw.device)
    before, after = raw.argmax(1) == truth, defended.argmax(1) == truth
    both = before & after
    first, second = int(before.sum()), int(after.sum())
    return DefenceMetrics(
        n,
        *_share(first, n),
        *_share(second, n),
        (second - first) / n if n else None,
        *_share(int((after & ~before).sum()), n),
        *_share(int((before & ~after).sum()), n),
        int(both.sum()),
        ccv=_mean((raw[both].amax(1) - defended[both].amax(1)).abs()),
        cos=_mean(jensen_shannon(raw[both].log(), defended[both].log())),
    )


def query_metrics(
    raw: AttackResult,
    defended: AttackResult,
    flagged: Tensor,
    *,
    most: int,
    seconds_raw: float | None = None,
    seconds_defended: float | None = None,
) -> QueryMetrics:
    """What a defence costs an attacker who asks, and those who ask without harm.

    Args:
        raw: an attack on the raw model.
        defended: the same attack on the defended one.
        flagged: which benign queries the defence flagged, bool [benign].
        most: queries that a row may take, at least 1.
        seconds_raw: mean response time of the raw model to a benign query, above 0; None: not measured.
        seconds_defended: the same of the defended one.

    Raises:
        ConfigError: no query is allowed, or a time that is not above 0.
        DataError: verdicts that are not bool [benign].
    """
    times = [each for each in (seconds_raw, seconds_defended) if each is not None]
    if most < 1 or not all(0 < each < math.inf for each in times):
        raise ConfigError(
            f"most {most}, seconds {seconds_raw} and {seconds_defended}",
            rule="at least 1; above 0",
            who="query_metrics",
        )
    if flagged.dim() != 1 or flagged.dtype is not torch.bool:
        raise DataError(f"{flagged.dtype} {list(flagged.shape)}", rule="bool [benign]", who="flagged")
    before, success_raw, raw_ci95 = _spent(raw)
    after, success_defended, defended_ci95 = _spent(defended)
    return QueryMetrics(
        before,
        after,
        None if before is None or after is None else min(after - before, most) / most,
        success_raw,
        raw_ci95,
        success_defended,
        defended_ci95,
        None if success_raw is None or success_defended is None else success_raw - success_defended,
        len(flagged),
        *_share(int(flagged.sum()), len(flagged)),
        qrv=None
        if seconds_raw is None or seconds_defended is None
        else (seconds_defended - seconds_raw) / seconds_raw,
    )


def perturbation_sensitivity(x: Tensor, x_adv: Tensor, layout: Layout, *, data_range: float = 1.0) -> Tensor:
    """How visible changes are: Σ |δ| · (1 − s), s the deviation of the clean 3 × 3 pixels around each place.

    A change shows less where an image is busy (Luo, Liu, Wei, Xu: "Towards imperceptible and robust
    adversarial example attacks", AAAI 2018). Borders are mirrored, without the outermost pixel.

    Args:
        x: images.
        x_adv: the same, changed.
        layout: "nchw" or "nhwc".
        data_range: of pixels, above 0; s is in units of it, δ is not.

    Returns:
        float64 [n], summed over pixels and channels.
    """
    clean, moved = (as_nchw(each, layout, "x").double() for each in (x, x_adv))
    pixels = around(clean, 3, twice=False)
    busy = (pixels - pixels.mean(-1, keepdim=True)).square().mean(-1).sqrt() / data_range
    return ((moved - clean).abs() * (1 - busy)).flatten(1).sum(1)


def _eight_bits(x: Tensor, low: float, high: float) -> Tensor:
    steps = ((x.double() - low) / (high - low) * 255).round().clamp(0, 255)
    return (steps / 255 * (high - low) + low).to(x.dtype)


def _stays(model: object, points: Tensor, goal: Goal, batch: int) -> int:
    known = as_model(model)
    found = 0
    with known.quiet():
        for some in torch.arange(len(points)).split(batch) if len(points) else ():
            found += int(goal.of(some.to(goal.labels.device)).reached(known(points[some])).sum())
    return found


def _range(bounds: Bounds) -> tuple[float, float]:
    """Of all inputs."""
    low, high = torch.as_tensor(bounds[0]).min(), torch.as_tensor(bounds[1]).max()
    found = float(low), float(high)
    if not all(map(math.isfinite, found)) or found[0] >= found[1]:
        raise ConfigError(f"bounds {bounds}", rule="numbers about images need finite bounds", who="bounds")
    return found


def _check_probabilities(p: Tensor, n: int, name: str) -> None:
    if p.dim() != 2 or len(p) != n or p.shape[1] < 2 or not p.is_floating_point():
        raise DataError(f"{p.dtype} {list(p.shape)}", rule=f"probabilities [{n}, classes]", who=name)
    if n and bool(((p < 0).any(1) | ((p.double().sum(1) - 1).abs() > 1e-3)).any()):
        raise DataError(
            f"rows that sum to {float(p.sum(1).min()):g} … {float(p.sum(1).max()):g}",
            rule="probabilities sum to 1",
            fix="logits.softmax(1)",
            who=name,
        )


def _spent(result: AttackResult) -> tuple[float | None, float | None, Interval | None]:
    """Mean queries of the rows that were attacked, and the share of them that broke."""
    counts = result.counts
    mine = ~(result.is_(Status.CLEAN_WRONG) | result.is_(Status.ALREADY_TARGET))
    success, interval = _share(counts.broken, counts.broken + counts.held + counts.failed)
    return _mean(result.queries[mine].double()), success, interval


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _share(k: int, n: int) -> tuple[float | None, Interval | None]:
    return (k / n, wilson(k, n)) if n else (None, None)


def _relative(delta: Tensor, clean: Tensor, p: Any) -> float | None:
    before = norm(clean.double(), p)
    return _mean((norm(delta, p) / before)[before > 0])


def _quartiles(values: Tensor, p: str) -> Quartiles:
    ranks = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64, device=values.device)
    return Quartiles(p, *torch.quantile(values.double(), ranks).tolist())
