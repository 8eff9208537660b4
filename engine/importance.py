"""Which settings explain a metric most, over many runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mycelia.engine.errors import ConfigError
from mycelia.engine.lineage import RunSummary, differing

__all__ = ["LEAST_RUNS", "Importance", "explain"]

LEAST_RUNS = 5


@dataclass(frozen=True)
class Importance:
    """What one setting explains of the metric.

    Args:
        setting: its name.
        values: how many different values it has over the runs.
        rank_correlation: Spearman's ρ with the metric; None for text with more than two values.
        p_value: the chance of a ρ this far from 0 if the two had nothing to do with each other.
        importance: how much the R² of a random forest falls when the setting is shuffled among the runs.
        importance_std: the standard deviation of that over the shuffles.
    """

    setting: str
    values: int
    rank_correlation: float | None
    p_value: float | None
    importance: float
    importance_std: float


def explain(runs: Sequence[RunSummary], metric: str) -> list[Importance]:
    """The settings that differ between the runs, the one that explains the metric most first.

    Rank correlation is Spearman's (1904); permutation importance is Breiman's ("Random forests", 2001), on
    the runs the forest was grown on, so it ranks settings and does not predict. Raises `ConfigError` when
    fewer than five runs have the metric or no setting differs.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    measured = [run for run in runs if _finite(run.get(metric))]
    if len(measured) < LEAST_RUNS:
        raise ConfigError(
            f"{len(measured)} of {len(runs)} runs have '{metric}'",
            rule=f"at least {LEAST_RUNS} runs are needed to say what explains a metric",
            fix="name another metric, or more runs",
            who=metric,
        )
    settings = differing(measured)
    if not settings:
        raise ConfigError("no setting differs between the runs", fix="compare runs with different settings")
    target = [float(run.get(metric)) for run in measured]
    columns = {name: _codes([run.get(name) for run in measured]) for name in settings}
    table = [list(row) for row in zip(*(codes for codes, _ in columns.values()), strict=True)]
    forest = RandomForestRegressor(n_estimators=200, random_state=0).fit(table, target)
    shuffled = permutation_importance(forest, table, target, n_repeats=20, random_state=0)
    found = []
    for index, (name, (codes, ordered)) in enumerate(columns.items()):
        rho, p = _spearman(codes, target) if ordered else (None, None)
        mean, std = float(shuffled.importances_mean[index]), float(shuffled.importances_std[index])
        found.append(Importance(name, len(set(codes)), rho, p, mean, std))
    return sorted(found, key=lambda item: -item.importance)


def _codes(values: Sequence[object]) -> tuple[list[float], bool]:
    """Numbers for the values of a setting, and whether their order means something.

    What is missing becomes −1 beside text and the smallest number − 1 beside numbers.
    """
    if all(value is None or isinstance(value, int | float) for value in values):
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        least = min(numbers, default=0.0) - 1
        return [float(value) if isinstance(value, int | float) else least for value in values], True
    names = sorted({str(value) for value in values if value is not None})
    codes = [-1.0 if value is None else float(names.index(str(value))) for value in values]
    return codes, len(set(codes)) == 2


def _spearman(codes: Sequence[float], target: Sequence[float]) -> tuple[float | None, float | None]:
    from scipy.stats import spearmanr

    if len(set(target)) == 1:
        return None, None  # a metric that never changes has no rank
    result = spearmanr(codes, target)
    return float(result.statistic), float(result.pvalue)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
