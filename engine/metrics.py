"""Metrics that add: what two chunks, workers or clients counted becomes what both saw.

Counts are integers and loss sums are kept exactly, so a result does not depend on how the examples were
cut into batches or in which order the parts were added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["ExactSum", "Metrics"]

_MAX_CONFUSION = 256  # half a megabyte; a simulation holds one for each client of a round


@dataclass(frozen=True)
class ExactSum:
    """The exact sum of floats, as few floats that do not overlap (Shewchuk, 1997).

    >>> float(ExactSum().add([1e16, 1.0]) + ExactSum().add([-1e16]))
    1.0
    """

    parts: tuple[float, ...] = ()

    def add(self, values: Iterable[float]) -> ExactSum:
        """With more values. NaN and infinity stay visible: the sum is then not finite."""
        rest = [*self.parts, *values]
        parts: list[float] = []
        # Each turn takes the rounded value of what is left; what remains is 2**53 times smaller.
        while total := _rounded(rest):
            parts.append(total)
            if not math.isfinite(total):
                return ExactSum((total,))
            rest.append(-total)
        return ExactSum(tuple(parts))

    def __add__(self, other: ExactSum) -> ExactSum:
        return self.add(other.parts)

    def __float__(self) -> float:
        return _rounded(self.parts)


def _rounded(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except ValueError:  # inf - inf
        return math.nan
    except OverflowError:  # finite values whose sum is not
        return math.inf


@dataclass(frozen=True, eq=False)
class Metrics:
    """Sums of what a model did; `update` and `+` return new ones.

    Args:
        classes: number of classes; None: regression, only the loss is kept.
        top_k: adds `top_K_accuracy` for each K.
        keep_scores: keep each example's scores, for `auroc` (memory grows by `[N, classes]`).
        count: examples seen.
        predictions: labels predicted: one an example, or one a token.
        correct: labels predicted rightly.
        loss: exact sum of the examples' losses.
        confusion: int64 `[classes, classes]`, rows are targets, columns predictions; None above 256
            classes, and then there is no `macro_f1`.
        top_k_correct: for each K, how often the target was among the K largest outputs.
        scores: the chunks of scores and targets that `auroc` is made from.

    >>> m = Metrics(classes=2).update(torch.tensor([[2.0, 0.0]]), torch.tensor([0.5]), torch.tensor([1]))
    >>> (m + m).result()
    {'loss': 0.5, 'accuracy': 0.0, 'macro_f1': 0.0}
    """

    classes: int | None = None
    top_k: tuple[int, ...] = ()
    keep_scores: bool = False
    count: int = 0
    predictions: int = 0
    correct: int = 0
    loss: ExactSum = ExactSum()
    confusion: Tensor | None = None
    top_k_correct: tuple[int, ...] = ()
    scores: tuple[tuple[Tensor, Tensor], ...] = ()

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 1:
            raise ConfigError(f"classes is {self.classes}", rule="at least 1, or None", who="metrics")
        if self.classes is None and (self.top_k or self.keep_scores):
            raise ConfigError("top-k and AUROC were asked for", rule="they need classes", who="metrics")
        if any(not 1 <= k <= (self.classes or 0) for k in self.top_k):
            raise ConfigError(
                f"top_k is {self.top_k}", rule=f"each K in 1..{self.classes} (the classes)", who="metrics"
            )
        if len(self.top_k_correct) != len(self.top_k):
            object.__setattr__(self, "top_k_correct", (0,) * len(self.top_k))

    def update(self, outputs: Tensor, losses: Tensor, targets: Tensor) -> Metrics:
        """With one batch more.

        Args:
            outputs: logits `[B, C]`, tokens `[B, T, C]`, maps `[B, C, H, W]`; with two classes also one
                logit `[B]` or `[B, 1]`; any shape for regression.
            losses: `[B]`, one loss per example.
            targets: integers `[B]`, `[B, T]` or `[B, H, W]`; any shape for regression.

        Raises:
            DataError: losses not `[B]`, or a target outside the classes.
            ConfigError: outputs of another number of classes.
        """
        if losses.ndim != 1 or len(losses) != len(targets):
            raise DataError(
                f"losses {list(losses.shape)} for targets {list(targets.shape)}",
                rule="one loss per example: [B]",
                who="metrics",
            )
        changed = replace(
            self, count=self.count + len(losses), loss=self.loss.add(losses.detach().double().tolist())
        )
        if self.classes is None:
            return changed
        logits, labels = _flat(outputs.detach(), targets, self.classes)
        ranked = logits.topk(max(self.top_k), dim=1).indices if self.top_k else None
        single = self.classes == 2 and logits.shape[1] == 1
        predicted = (logits[:, 0] > 0).long() if single else logits.argmax(1)
        confusion = _confusion(labels, predicted, self.classes) if self.classes <= _MAX_CONFUSION else None
        return replace(
            changed,
            predictions=self.predictions + len(labels),
            correct=self.correct + int((predicted == labels).sum()),
            confusion=_plus(self.confusion, confusion),
            top_k_correct=tuple(
                correct + int((ranked[:, :k] == labels[:, None]).sum())
                for k, correct in zip(self.top_k, self.top_k_correct, strict=True)
                if ranked is not None
            ),
            scores=(*self.scores, (logits.cpu(), labels.cpu())) if self.keep_scores else (),
        )

    def __add__(self, other: Metrics) -> Metrics:
        """What both saw together.

        Raises:
            ConfigError: they were set up differently.
        """
        mine, theirs = (
            {"classes": m.classes, "top_k": m.top_k, "keep_scores": m.keep_scores} for m in (self, other)
        )
        if mine != theirs:
            raise ConfigError(f"cannot add {theirs} to {mine}", rule="one setting", who="metrics")
        return replace(
            self,
            count=self.count + other.count,
            predictions=self.predictions + other.predictions,
            correct=self.correct + other.correct,
            loss=self.loss + other.loss,
            confusion=_plus(self.confusion, other.confusion),
            top_k_correct=tuple(a + b for a, b in zip(self.top_k_correct, other.top_k_correct, strict=True)),
            scores=self.scores + other.scores,
        )

    def result(self) -> dict[str, float]:
        """The metrics by name; empty when nothing was seen.

        `loss` is the mean over examples. `accuracy`, `top_K_accuracy` and `macro_f1` are over predictions;
        `macro_f1` is the mean over the classes that occur as target or prediction, as in scikit-learn.
        `auroc` is one class against the rest, the mean over classes; NaN when a class has no positive or no
        negative example.
        """
        if self.count == 0:
            return {}
        result = {"loss": float(self.loss) / self.count}
        if self.classes is None:
            return result
        result["accuracy"] = self.correct / self.predictions
        for k, correct in zip(self.top_k, self.top_k_correct, strict=True):
            result[f"top_{k}_accuracy"] = correct / self.predictions
        if self.confusion is not None:
            occurring = self.confusion.sum(0) + self.confusion.sum(1)
            f1 = 2 * self.confusion.diagonal().double() / occurring.clamp(min=1)
            result["macro_f1"] = float(f1.sum()) / int((occurring > 0).sum())
        if self.keep_scores:
            result["auroc"] = self._auroc()
        return result

    def _auroc(self) -> float:
        from scipy.special import logsumexp
        from sklearn.metrics import roc_auc_score

        logits = torch.cat([chunk for chunk, _ in self.scores]).double().numpy()
        labels = torch.cat([chunk for _, chunk in self.scores]).numpy()
        if not np.isfinite(logits).all():
            return math.nan
        areas = []
        for label in (1,) if self.classes == 2 else range(self.classes or 0):
            positive = labels == label
            if positive.all() or not positive.any():
                return math.nan
            # Log-odds rank as the probability does, and do not saturate.
            odds = logits[:, 0]
            if logits.shape[1] > 1:
                odds = logits[:, label] - logsumexp(np.delete(logits, label, axis=1), axis=1)
            areas.append(float(roc_auc_score(positive, odds)))
        return math.fsum(areas) / len(areas)


def _flat(outputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Logits `[P, C]` (or `[P, 1]` for one logit) and labels `[P]` of all predictions."""
    if outputs.ndim == targets.ndim:
        outputs = outputs.unsqueeze(-1)
    elif outputs.ndim > 3:
        outputs = outputs.movedim(1, -1)
    width = outputs.shape[-1]
    if outputs.shape[:-1] != targets.shape or not (width == classes or (width == 1 and classes == 2)):
        raise ConfigError(
            f"outputs {list(outputs.shape)} and targets {list(targets.shape)} with {classes} classes",
            rule="outputs hold one number per class for each target",
            fix="build the model with the data's number of classes",
            who="metrics",
        )
    return outputs.reshape(-1, width), targets.reshape(-1).long()


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    try:
        # A target out of range is a cell out of range: negative is an error of bincount, too large widens it.
        cells = torch.bincount(labels * classes + predicted, minlength=classes * classes)
        return cells.view(classes, classes).cpu()
    except RuntimeError:
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong) == 0:
            raise
        raise DataError(
            f"a target is {int(wrong[0])}", rule=f"targets are in 0..{classes - 1}", who="metrics"
        ) from None
