"""What a report says of a detector: what it finds of attacks that do not know it, and of one that does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from mycelia.attacks.detectors.base import Detector
from mycelia.attacks.detectors.roc import Roc, roc
from mycelia.attacks.facts import share
from mycelia.attacks.intervals import wilson
from mycelia.attacks.result import AttackResult

__all__ = ["NOT_ADAPTIVE", "DetectorReport", "detector_report"]

NOT_ADAPTIVE: Final = "not evaluated against an adaptive attacker"


@dataclass(frozen=True)
class DetectorReport:
    """A detector on benign rows, on attacked rows, and under an attack on model and detector together.

    Attributes:
        name: of the detector.
        fpr: rate of false alarms that its threshold was set for.
        threshold: of its scores; None where it is infinite.
        benign: so many benign rows.
        false_alarms: so many of them flagged.
        attacked: so many attacked rows, of attacks that did not know the detector.
        found: so many of them flagged.
        roc: of these two.
        adaptive_attacked: rows that an attack on model and detector went at; None: there was none.
        adaptive_broken: so many of them misclassified and not flagged.
        adaptive_eps: radius of that attack.
        adaptive_attack: its name.
    """

    name: str
    fpr: float | None
    threshold: float | None
    benign: int
    false_alarms: int
    attacked: int
    found: int
    roc: Roc
    adaptive_attacked: int | None = None
    adaptive_broken: int | None = None
    adaptive_eps: float | None = None
    adaptive_attack: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the list of detectors in a report has it."""
        found: dict[str, Any] = {
            "name": self.name,
            "fpr": self.fpr,
            "threshold": self.threshold,
            **share("false_alarm_rate", self.false_alarms, self.benign, "no rows"),
            **share("detection_rate", self.found, self.attacked, "no rows"),
            "roc": self.roc.to_json(),
            "adaptive": None,
        }
        if self.threshold is None:
            found["threshold_reason"] = "it is infinite"
        if self.adaptive_attacked is None or self.adaptive_broken is None:
            return found | {"adaptive_reason": NOT_ADAPTIVE}
        found["adaptive"] = {
            "attack": self.adaptive_attack, "eps": self.adaptive_eps,
            "attacked": self.adaptive_attacked, "broken": self.adaptive_broken,
            **share("success_rate", self.adaptive_broken, self.adaptive_attacked, "no rows"),
        }  # fmt: skip
        if self.adaptive_eps is None:
            found["adaptive"]["eps_reason"] = "a smallest change without limit"
        return found

    def text(self) -> str:
        """In two lines; the second one is about the attacker who knows."""
        area, (low, high) = self.roc.auc, self.roc.auc_interval
        first = (
            f"{self.name}: false alarms {_part(self.false_alarms, self.benign)}, found "
            f"{_part(self.found, self.attacked)} of an attack that does not know it, "
            f"area under the curve {area:.3f} (95 %: {low:.3f} to {high:.3f})"
        )
        if self.adaptive_attacked is None or self.adaptive_broken is None:
            return f"{first}\n{NOT_ADAPTIVE}"
        size = "without a limit" if self.adaptive_eps is None else f"at eps {self.adaptive_eps:g}"
        return (
            f"{first}\n{self.adaptive_attack} on model and detector together {size}: "
            f"{_part(self.adaptive_broken, self.adaptive_attacked)} wrong and not flagged"
        )


def detector_report(
    detector: Detector, benign: Any, attacked: Any, adaptive: AttackResult | None = None
) -> DetectorReport:
    """Measure a detector.

    Args:
        detector: fitted.
        benign: inputs [n, …] that it was not fitted on, n at least 1.
        attacked: inputs [m, …] that succeed against the model, of an attack that does not know the detector,
            m at least 1.
        adaptive: of `attack_guarded`; without it the report says that there was none.

    Raises:
        ConfigError: a detector without a threshold.
        DataError: no rows of either kind.
    """
    limit = detector.limit
    scores = [detector.score(rows) for rows in (benign, attacked)]
    flagged = [int((each > limit).sum()) for each in scores]
    found = DetectorReport(
        name=type(detector).__name__,
        fpr=detector.fpr,
        threshold=limit if abs(limit) != float("inf") else None,
        benign=len(scores[0]),
        false_alarms=flagged[0],
        attacked=len(scores[1]),
        found=flagged[1],
        roc=roc(scores[0], scores[1]),
    )
    if adaptive is None:
        return found
    counts = adaptive.counts
    return replace(
        found,
        adaptive_attacked=counts.broken + counts.held + counts.failed,
        adaptive_broken=counts.broken,
        adaptive_eps=adaptive.eps,
        adaptive_attack=type(adaptive.attack).__name__,
    )


def _part(k: int, n: int) -> str:
    if not n:
        return "0 of 0"
    low, high = wilson(k, n)
    return f"{k} of {n} (95 %: {low:.3f} to {high:.3f})"
