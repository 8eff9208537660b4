"""The options that `mycelia attack` and `mycelia evaluate` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "EPS",
    "NORM",
    "BatchOption",
    "BoundsOption",
    "DataOption",
    "EpsOption",
    "GoalOption",
    "LimitOption",
    "ModelOption",
    "Norm",
    "NormOption",
    "QueriesOption",
    "SaveOption",
    "Split",
    "SplitOption",
    "StepsOption",
    "WeightsOption",
    "target_settings",
]


class Norm(StrEnum):
    """How the size of a change is measured."""

    linf = "linf"
    l2 = "l2"
    l1 = "l1"
    l0 = "l0"


class Split(StrEnum):
    """Which part of the data."""

    test = "test"
    train = "train"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="RUN|FILE.onnx|NAME",
        help="A run folder; an ONNX file; or a model's name or package.module:function with --weights.",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="A safetensors file, for a model that is given by name.")
]
DataOption = Annotated[
    str, typer.Option("--data", metavar="NAME", help="As in training; a run's own unless named.")
]
SplitOption = Annotated[Split, typer.Option("--split", help="Which part of the data.")]
LimitOption = Annotated[int, typer.Option("--limit", help="The first so many examples; 0: all.")]
NORM = typer.Option("--norm", help="How the size of a change is measured.", show_default=False)
NormOption = Annotated[Norm, NORM]
EPS = typer.Option(
    "--eps",
    metavar="NUMBER",
    help="Largest size of a change, in units of the inputs; 8/255 is read as a fraction.",
    show_default=False,
)
EpsOption = Annotated[list[str], EPS]
GoalOption = Annotated[
    str,
    typer.Option(
        "--goal",
        metavar="untargeted|least-likely|target:K",
        help="What an attack is for; target:K leaves out examples of K.",
    ),
]
StepsOption = Annotated[
    int, typer.Option("--steps", help="Of the attack, or a suite's gradient attacks; 0: their own number.")
]
QueriesOption = Annotated[
    int,
    typer.Option("--queries", help="Forward passes that an example may take; 0: each attack's own limit."),
]
BatchOption = Annotated[int, typer.Option("--batch", help="Examples at a time.")]
BoundsOption = Annotated[
    str, typer.Option("--bounds", metavar="LOW,HIGH", help="Smallest and largest value of an input.")
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Write the changed inputs, as safetensors.")
]


def target_settings(
    model: str,
    weights: Path | None,
    data: str,
    split: Split,
    limit: int,
    norm: Norm,
    eps: list[str],
    goal: str,
    queries: int,
    batch: int,
    bounds: str,
    seed: int | None,
) -> dict[str, Any]:
    """The settings as `TargetConfig` has them.

    Raises:
        ConfigError: a number that is none.
    """
    from mycelia.attacks.config import number
    from mycelia.engine.errors import ConfigError

    low, comma, high = bounds.partition(",")
    if not comma:
        raise ConfigError(f"bounds {bounds!r}", rule="two numbers, like 0,1", who="--bounds")
    return {
        "model": model, "weights": "" if weights is None else str(weights), "data": data,
        "split": split.value, "limit": limit, "norm": norm.value,
        "eps": [number(each, "--eps") for each in eps], "goal": goal, "queries": queries, "batch": batch,
        "bounds": [number(low, "--bounds"), number(high, "--bounds")], "seed": seed or 0,
    }  # fmt: skip
