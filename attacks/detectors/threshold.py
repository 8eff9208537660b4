"""Where a score begins to be suspicious: a rate of false alarms on benign data decides it."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["allowed", "check_rate", "smallest_threshold", "threshold_at"]


def check_rate(fpr: float) -> None:
    """Refuse rates outside (0, 1).

    Raises:
        ConfigError: there.
    """
    if not 0 < fpr < 1:
        raise ConfigError(f"fpr is {fpr}", rule="a share of benign data, above 0 and below 1", who="fpr")


def allowed(n: int, fpr: float) -> int:
    """⌊fpr·n⌋, as if fpr were the decimal number that it was written as: 0.29 of 100 are 29.

    Args:
        n: benign rows.
        fpr: in (0, 1).
    """
    found = math.floor(fpr * n)
    return found + 1 if (found + 1) / n <= fpr else found


def smallest_threshold(scores: Tensor, count: int) -> float:
    """The smallest value that at most so many scores exceed.

    Args:
        scores: [n]
        count: from 0 to n − 1.
    """
    return float(scores.sort(descending=True).values[count])


def threshold_at(scores: Tensor, fpr: float) -> float:
    """The smallest value that at most ⌊fpr·n⌋ of these scores exceed.

    With a rate below 1/n that is the largest of them: a warning says which rate can be resolved.

    >>> import torch
    >>> threshold_at(torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0, 3.5, 8.0]), 0.2)
    6.0

    Args:
        scores: of benign data, finite, [n], n at least 1; the bigger, the more suspicious.
        fpr: rate of false alarms, in (0, 1).

    Raises:
        ConfigError: a rate outside (0, 1).
        DataError: no scores, or some that are not finite.
    """
    check_rate(fpr)
    if scores.dim() != 1 or not len(scores):
        raise DataError(f"scores of shape {list(scores.shape)}", rule="[n], at least one", who="benign")
    bad = (~scores.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise DataError(
            f"scores of benign data that are not finite, in {len(bad)} rows (first: {bad[0]})",
            rule="a threshold is set on finite scores",
            fix="leave out rows that are not finite",
            who="benign",
        )
    count = allowed(len(scores), fpr)
    if not count:
        warnings.warn(
            f"fpr {fpr:g} cannot be told from 0 with {len(scores)} benign rows: none of them is flagged; "
            f"the smallest rate that they resolve is {1 / len(scores):g}",
            RuntimeWarning,
            stacklevel=2,
        )
    return smallest_threshold(scores, count)
