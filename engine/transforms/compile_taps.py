"""The tapped pass in the form of a plan; see `compile` for what the plans are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine import _torch
from mycelia.engine.errors import ConfigError
from mycelia.engine.transforms.compile import package_graph, tidy
from mycelia.engine.transforms.taps import CompiledPass, TappedProgram
from mycelia.engine.types import Tensors

__all__ = ["compile_taps"]


def compile_taps(
    tapped: TappedProgram,
    plan: str,
    example: tuple[Tensors, Tensors, Tensor, Tensor],
    *,
    cache: Path | None = None,
) -> TappedProgram:
    """The same pass; batches of the example's shape run as the plan says, others as `eager`.

    Args:
        tapped: made by `taps`.
        plan: `eager`, `interpreter` or `inductor`.
        example: (params, buffers, inputs, targets) of a full batch; their values do not matter.
        cache: folder of compiled packages; the default is `~/.cache/mycelia/plans`.

    Raises:
        ConfigError: an unresolved or unknown plan.
    """
    if plan not in ("eager", "interpreter", "inductor"):
        raise ConfigError(f"plan {plan!r} is not resolved", rule="eager, interpreter or inductor", who="plan")
    if plan == "eager":
        return replace(tapped, compiled=None)
    arguments = tapped.arguments(*example, 0, 0)
    graph = _trace(tapped, arguments)
    run: Callable[[list[Tensor]], list[Tensor]]
    if plan == "inductor":
        run, _ = _torch.load_package(package_graph(graph, arguments, cache))
    else:
        run = lambda arguments: list(graph(*arguments))  # noqa: E731
    return replace(tapped, compiled=CompiledPass(tuple(example[2].shape), run))


def _trace(tapped: TappedProgram, arguments: list[Tensor]) -> fx.GraphModule:
    """Forward and backward as one graph without autograd."""

    def flat(*parts: Tensor) -> list[Tensor]:
        return tapped.flat(parts)

    with _torch.without_onednn(), torch.enable_grad():
        graph: fx.GraphModule = make_fx(flat, tracing_mode="fake")(*(part.clone() for part in arguments))
    tidy(graph)
    return graph
