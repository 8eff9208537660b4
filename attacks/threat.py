"""What an attacker may do and knows: without it no number of an evaluation means anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.goals import Goal, Targeted, Untargeted
from mycelia.attacks.norms import NORMS, Norm
from mycelia.engine.errors import ConfigError

__all__ = ["Knowledge", "Threat"]

Knowledge = Literal["white", "score", "label", "transfer"]


@dataclass(frozen=True)
class Threat:
    """A threat model.

    Attributes:
        norm: of the ball that a change stays in.
        eps: its radius, at least 0 and finite, in units of the inputs.
        goal: "untargeted", "least-likely" (the class that the clean input makes least likely), or "target:K".
        knowledge: "white": everything; "score" or "label": what the model answers; "transfer": other models.
        bounds: smallest and largest value of an input; numbers, or tensors that broadcast to the inputs.
        data_range: of the data, in words.
        queries: forward passes that an attacker without gradients may spend on a row; None: no such limit.
        defence_known: whether the attacker knows of a defence.

    Raises:
        ConfigError: a setting out of range.
    """

    norm: Norm
    eps: float
    goal: str = "untargeted"
    knowledge: Knowledge = "white"
    bounds: Bounds = (0.0, 1.0)
    data_range: str = "0..1"
    queries: int | None = None
    defence_known: bool = True

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ConfigError(f"norm {self.norm!r}", rule=f"one of {', '.join(NORMS)}", who="Threat.norm")
        if not 0 <= self.eps < float("inf"):
            raise ConfigError(
                f"eps is {self.eps}", rule="at least 0 and finite, in units of the inputs", who="Threat.eps"
            )
        if self.knowledge not in get_args(Knowledge):
            raise ConfigError(
                f"knowledge {self.knowledge!r}", rule=f"one of {', '.join(get_args(Knowledge))}",
                who="Threat.knowledge",
            )  # fmt: skip
        if self.goal not in ("untargeted", "least-likely") and self._target is None:
            raise ConfigError(
                f"goal {self.goal!r}", rule='"untargeted", "least-likely" or "target:K"', who="Threat.goal"
            )
        if self.queries is not None and self.queries < 1:
            raise ConfigError(f"queries {self.queries}", rule="at least 1, or None", who="Threat.queries")

    @property
    def _target(self) -> int | None:
        name, _, number = self.goal.partition(":")
        return int(number) if name == "target" and number.isdecimal() else None

    def goal_for(self, y: Tensor, outputs: Tensor) -> Goal:
        """The goal of rows with these labels.

        Args:
            y: true classes, integers [n].
            outputs: of the model at the clean inputs, logits [n, classes] or labels [n].

        Raises:
            ConfigError: the least likely class of a model that gives labels only.
            DataError: a target that is the true class; the message names the rows.
        """
        if self.goal == "untargeted":
            return Untargeted(y)
        if self._target is not None:
            return Targeted(torch.full_like(y, self._target), y)
        if outputs.dim() == 1:
            raise ConfigError(
                "a model that gives labels only",
                rule="the least likely class is read from scores",
                fix='goal="untargeted"',
                who="Threat.goal",
            )
        return Targeted(outputs.argmin(1), y)

    def to_json(self) -> dict[str, Any]:
        """As the report has it."""
        bounds = [
            bound.tolist() if isinstance(bound, Tensor) else _finite(float(bound)) for bound in self.bounds
        ]
        return {
            "norm": self.norm, "eps": self.eps,
            "eps_unit": "coordinates" if self.norm == "l0" else "input units",
            "data_range": self.data_range, "goal": self.goal, "knowledge": self.knowledge, "bounds": bounds,
            "queries": self.queries, "defence_known": self.defence_known,
        } | ({} if self.queries else {"queries_reason": "no limit but each attack's own"})  # fmt: skip

    def text(self) -> str:
        """In a line or two."""
        low, high = (
            f"[{float(bound.min()):g} … {float(bound.max()):g}]"
            if isinstance(bound, Tensor)
            else f"{bound:g}"
            for bound in self.bounds
        )
        unit = "coordinates" if self.norm == "l0" else "input units"
        budget = "each attack's own limits" if self.queries is None else f"{self.queries} queries a row"
        known = "knows of any defence" if self.defence_known else "does not know of a defence"
        size = f"{self.goal} changes of {self.norm} norm at most {self.eps:g} {unit}"
        inputs = f"inputs within {low} to {high} (data {self.data_range})"
        return f"{size}, {inputs};\nthe attacker has {self.knowledge} knowledge, {known}, {budget}"


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if abs(value) != float("inf") else ("inf" if value > 0 else "-inf")
