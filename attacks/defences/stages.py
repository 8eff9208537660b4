"""Changes of an input before the model sees it, as stages of the model: an attack goes through them.

A stage without a useful gradient has a surrogate, of which the backward pass takes the gradient while the
forward pass stays as it is (BPDA); over a random one gradients are averaged (EOT). Both are from Athalye,
Carlini, Wagner: "Obfuscated gradients give a false sense of security", ICML 2018, sections 4.1 and 4.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.attacks.draws import Draws, row_keys
from mycelia.engine.errors import ConfigError

__all__ = ["Defended", "Stage", "through"]


@dataclass(frozen=True)
class Stage(ABC):
    """A change of the input: settings and nothing else.

    Attributes:
        surrogate: a function of which the backward pass takes the gradient, where the stage has none of its
            own; it gives the shape that the stage gives. None: the identity, or what the stage says.
    """

    _: KW_ONLY
    surrogate: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027 - some have nothing to refuse
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming the setting.
        """

    @property
    def differentiable(self) -> bool:
        """Whether its own gradient says how outputs move with inputs."""
        return True

    @property
    def random(self) -> bool:
        """Whether two passes differ."""
        return False

    @abstractmethod
    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """The changed inputs.

        Args:
            x: inputs [n, …].
            draws: of these rows in this pass; deterministic stages leave them.
        """

    def smooth(self, x: Tensor) -> Tensor:
        """The surrogate, if none was given."""
        return x


class Defended(nn.Module):
    """A model behind stages, as one module: what it is attacked as is what it predicts as.

    Random stages draw from streams named by the seed and a count of passes, which is a buffer: an attack puts
    it back like any other one, so it gives the same bits each time.

    >>> from mycelia.attacks.defences.inputs import BitDepth
    >>> defended = Defended(nn.Linear(2, 3), BitDepth(4))
    >>> defended.differentiable, defended.random, defended.note
    (False, False, 'BPDA through BitDepth')

    Args:
        model: what comes after the stages.
        stages: in the order in which an input goes through them.
        seed: of random stages.
        bpda: False leaves stages without a surrogate; an attack then sees no gradient, which is no defence.
    """

    def __init__(self, model: nn.Module, *stages: Stage, seed: int = 0, bpda: bool = True) -> None:
        super().__init__()
        for stage in stages:
            if not isinstance(stage, Stage):
                raise ConfigError(f"{stage!r} is no stage", rule="values of Stage", who="Defended")
        self.model, self.stages, self.seed, self.bpda = model, stages, seed, bpda
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def differentiable(self) -> bool:
        """Whether all stages are."""
        return all(stage.differentiable for stage in self.stages)

    @property
    def random(self) -> bool:
        """Whether any stage is."""
        return any(stage.random for stage in self.stages)

    @property
    def note(self) -> str:
        """What an attack on it has to do, for reports."""
        blind = [type(stage).__name__ for stage in self.stages if not stage.differentiable]
        random = [type(stage).__name__ for stage in self.stages if stage.random]
        said = []
        if blind:
            said.append(f"{'BPDA' if self.bpda else 'no gradient'} through {', '.join(blind)}")
        if random:
            said.append(f"EOT over {', '.join(random)}")
        return "; ".join(said)

    def forward(self, x: Tensor) -> Tensor:
        """What the model says of the changed inputs.

        Args:
            x: inputs [n, …].
        """
        call = 0
        if self.random:
            count = self.get_buffer("calls")
            call = int(count)
            with torch.no_grad():
                count.add_(1)
        keys = row_keys(torch.arange(len(x), device=x.device)[:, None])  # by place: equal rows differ
        for number, stage in enumerate(self.stages):
            x = self._after(stage, x, Draws(self.seed, f"defence/{number}/{call}", keys))
        found: Tensor = self.model(x)
        return found

    def _after(self, stage: Stage, x: Tensor, draws: Draws) -> Tensor:
        if stage.differentiable:
            return stage(x, draws)
        if not self.bpda:
            with torch.no_grad():
                return stage(x, draws)
        return through(lambda given: stage(given, draws), x, stage.surrogate or stage.smooth)


def through(
    function: Callable[[Tensor], Tensor], x: Tensor, surrogate: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """function(x) to the last bit, with the gradient of surrogate(x).

    Args:
        function: of x.
        x: inputs [n, …].
        surrogate: a function that can be differentiated and gives the same shape; by default the identity.

    Raises:
        ConfigError: the shapes differ.
    """
    with torch.no_grad():
        value = function(x.detach())
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    smooth = surrogate(x)
    if smooth.shape != value.shape:
        raise ConfigError(
            f"the surrogate gives {list(smooth.shape)}, the stage {list(value.shape)}",
            rule="both give the same shape",
            fix="surrogate=",
            who="BPDA",
        )
    found: Tensor = _Through.apply(smooth, value)  # type: ignore[no-untyped-call]
    return found


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, smooth: Tensor, value: Tensor) -> Tensor:
        del ctx, smooth
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        del ctx
        return grads[0], None
