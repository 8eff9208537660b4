"""Clipped gradients of an ordinary module as it is at the moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.privacy.clip import ClipFunction, PerLayer
from mycelia.privacy.clipped_grad import Clipped, ClippedGrad, clipped_grad
from mycelia.privacy.settings import Settings

__all__ = ["ModuleGrad"]


class ModuleGrad:
    """Captures the module when it is first asked, and again when what is trained has changed.

    Args:
        model: the module; read at every call, never changed.
        settings: the loss, and how gradients are found.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._shapes: tuple[object, ...] | None = None
        self._found: ClippedGrad | None = None

    def __call__(
        self,
        params: Mapping[str, nn.Parameter],
        batch: tuple[Tensor, Tensor],
        mask: Tensor,
        clip: ClipFunction | PerLayer,
        seed: int,
    ) -> Clipped:
        """The clipped gradients of a batch; see `ClippedGrad`.

        Args:
            params: the trainable parameters as they are.
            batch: inputs [B, ...] and targets [B, ...].
            mask: bool [B].
            clip: the clip function in force.
            seed: of what is random in the model.

        Raises:
            CaptureError: the model mixes examples, or cannot be exported.
        """
        settings = self._settings
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in params.items())
        if self._found is None or shapes != self._shapes:
            program = self._captured((batch[0][:2], batch[1][:2]))
            self._found = clipped_grad(program, clip, backend=settings.backend, strict=settings.strict)
            self._shapes = shapes
        found = replace(self._found, clip=clip)
        buffers = dict(self._model.named_buffers())
        return found(
            {name: tensor.detach() for name, tensor in params.items()},
            {e.name: buffers[e.name] for e in found.program.schema.of(Role.BUFFER, Role.COUNTER)},
            batch,
            mask,
            seed=seed,
        )

    def _captured(self, example: tuple[Tensor, Tensor]) -> Program:
        """With a graph, unless the backend needs the module or "auto" may do without one."""
        model, loss_fn, backend = self._model, self._settings.loss_fn, self._settings.backend
        if (group := self._settings.group) is not None:
            model, loss_fn = group.model(model), group.loss(loss_fn)
        if backend == "opacus":
            return capture(model, loss_fn, example, backend="eager")
        try:
            return capture(model, loss_fn, example)
        except CaptureError:
            if backend != "auto" or self._settings.strict:
                raise
            return capture(model, loss_fn, example, backend="eager")
