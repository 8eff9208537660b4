"""What fuzzing found: defects first, then coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.intervals import wilson

__all__ = ["CAVEAT", "Defect", "FuzzResult"]

CAVEAT: Final = (
    "more coverage does not mean more defects, and full coverage does not mean that there are none: "
    "judge a run by the defects that it found"
)


@dataclass(frozen=True)
class Defect:
    """A mutant that the model has wrong.

    Attributes:
        true: class of its seed.
        predicted: class that the model gives it; −1: the output is not a number.
        seed: number of its seed among those given.
        trail: the mutators on the way from the seed, with their settings.
    """

    true: int
    predicted: int
    seed: int
    trail: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FuzzResult:
    """A run of a fuzzer.

    Attributes:
        defects: by true class, then by the predicted one, then by seed.
        inputs: the mutants that these are, in the same order, [defects, …].
        seeds: how many there were.
        clean_wrong: seeds that the model had wrong already: no mutants were made of them.
        tried: mutants made.
        mutants: of these, the valid ones, which the model was asked about.
        entered: of these, the ones that entered the queue.
        measure: name of what guided the search.
        before: its value at the seeds.
        after: its value in the end.
        stopped: "mutants" or "seconds", the limit that ended the run; or that there was nothing to mutate.
        rng: seed.
        seconds: it took.
    """

    defects: tuple[Defect, ...]
    inputs: Tensor
    seeds: int
    clean_wrong: int
    tried: int
    mutants: int
    entered: int
    measure: str
    before: float
    after: float
    stopped: str
    rng: int
    seconds: float

    @property
    def per_class(self) -> Mapping[int, Mapping[int, int]]:
        """How many defects: true class → predicted class → number."""
        found: dict[int, Counter[int]] = {}
        for defect in self.defects:
            found.setdefault(defect.true, Counter())[defect.predicted] += 1
        return {true: dict(sorted(found[true].items())) for true in sorted(found)}

    @property
    def success_share(self) -> float | None:
        """Defects among valid mutants, in [0, 1]; None if there was no valid mutant."""
        return len(self.defects) / self.mutants if self.mutants else None

    @property
    def gain(self) -> float:
        """After − before."""
        return self.after - self.before

    def training_set(self, per_class: int | None = None) -> tuple[Tensor, Tensor]:
        """Defects with the classes that they should have had, to train on.

        Args:
            per_class: at most so many of each true class, the first ones; None: all.

        Returns:
            inputs [k, …], labels int64 [k].
        """
        count: Counter[int] = Counter()
        rows = []
        for row, defect in enumerate(self.defects):
            count[defect.true] += 1
            if per_class is None or count[defect.true] <= per_class:
                rows.append(row)
        labels = torch.tensor([self.defects[row].true for row in rows], dtype=torch.int64)
        return self.inputs[rows], labels.to(self.inputs.device)

    def export(self, path: str | Path) -> None:
        """Write the defects to a file of NumPy (.npz): x, y (true), predicted, seed.

        Args:
            path: of the file; one that is there is replaced.
        """
        with Path(path).open("wb") as file:
            np.savez(
                file,
                x=self.inputs.cpu().numpy(),
                y=np.asarray([each.true for each in self.defects], dtype=np.int64),
                predicted=np.asarray([each.predicted for each in self.defects], dtype=np.int64),
                seed=np.asarray([each.seed for each in self.defects], dtype=np.int64),
            )

    def to_json(self) -> dict[str, Any]:
        """Defects first."""
        share = self.success_share
        reason = {} if share is not None else {"success_share_reason": "no mutant was valid"}
        interval = (
            {"success_share_ci95": list(wilson(len(self.defects), self.mutants))}
            if self.mutants
            else {"success_share_ci95": None, "success_share_ci95_reason": "no mutant was valid"}
        )
        return {
            "defects": {
                str(true): {str(label): count for label, count in found.items()}
                for true, found in self.per_class.items()
            },
            "defects_total": len(self.defects),
            "each": [
                {"true": d.true, "predicted": d.predicted, "seed": d.seed, "trail": list(d.trail)}
                for d in self.defects
            ],
            "success_share": share, **reason, **interval,
            "seeds": self.seeds, "clean_wrong": self.clean_wrong, "tried": self.tried,
            "mutants": self.mutants, "entered": self.entered,
            "coverage": {
                "measure": self.measure, "before": self.before, "after": self.after, "gain": self.gain,
                "caveat": CAVEAT,
            },
            "stopped": self.stopped, "rng": self.rng, "seconds": self.seconds,
        }  # fmt: skip

    def text(self) -> str:
        """A few lines: defects by class, their share, then coverage with its caveat."""
        lines = [f"{len(self.defects)} defects from {len({each.seed for each in self.defects})} seeds"]
        for true, found in self.per_class.items():
            each = ", ".join(f"{label}: {count}" for label, count in found.items())
            lines.append(f"  class {true} taken for {each}")
        share = "no valid mutant" if self.success_share is None else f"{self.success_share:.3f} of"
        wrong = f"{self.clean_wrong} of {self.seeds} seeds were wrong already"
        lines.append(f"{share} {self.mutants} valid mutants, {self.tried} tried; {wrong}")
        lines.append(f"{self.measure} {self.before:.4f} before, {self.after:.4f} after, gain {self.gain:.4f}")
        return "\n".join([*lines, f"({CAVEAT})"]) + "\n"
