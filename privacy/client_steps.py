"""Private steps on a client's own data: DP-SGD in place of the ordinary local steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalSteps, Taken
from mycelia.engine.program import Program
from mycelia.engine.step import Adjust
from mycelia.engine.types import Tensors
from mycelia.privacy.clip import ClipFunction, PerLayer
from mycelia.privacy.clipped_grad import ClippedGrad, clipped_grad
from mycelia.privacy.federated import own_source
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import PrivateUpdate
from mycelia.privacy.sampling import Batch, Poisson

__all__ = ["PrivateSteps"]


@dataclass(frozen=True)
class PrivateSteps:
    """Makes a client's steps private, for `LocalTrainer(steps_of=…)`; it travels to a spawned process.

    DP-SGD (Abadi et al., CCS 2016, algorithm 1) on Poisson draws from the client's examples. Rate, number of
    steps and denominator are public and the same for every client, so that they tell nothing about how many
    examples one has: with more of them it draws more, and moves further.

    Attributes:
        clip: the clip function of an example's gradient.
        noise_multiplier: z, the noise's standard deviation over the clip bound.
        sampler: draws the examples of a step.
        steps: in a round.
        expected_batch: the public number that a step's sum is divided by.
        mechanism: the noise.
        source: the secret of all clients, of which each has a part of its own.
        saved: folder of the Program as `Program.save` wrote it, which every process reads: on the way to
            another process graphs lose what taps need to know of shapes; None: it is taken as it comes.

    Raises:
        ConfigError: steps below 1.
    """

    clip: ClipFunction | PerLayer
    noise_multiplier: float
    sampler: Poisson
    steps: int
    expected_batch: float
    mechanism: Mechanism
    source: NoiseSource
    saved: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", rule="at least 1", who="private steps")

    def __call__(self, program: Program, adjust: Adjust | None) -> LocalSteps:
        """The steps of one process.

        Raises:
            CaptureError: the model mixes the examples of a batch.
        """
        whole = program if self.saved is None else Program.load(self.saved)
        return _Steps(self, clipped_grad(whole, self.clip), adjust)

    def update(self, client: int | str, size: int) -> PrivateUpdate:
        """How a client's sum of `size` entries becomes a private mean."""
        bound = self.clip.sensitivity().total
        std = self.noise_multiplier * (bound + self.mechanism.slack(bound, size))
        own = own_source(self.source, client)
        return PrivateUpdate(self.mechanism, std, self.expected_batch, own, bound)


@dataclass(frozen=True)
class _Steps:
    settings: PrivateSteps
    clipped: ClippedGrad
    adjust: Adjust | None

    def __call__(
        self, params: Tensors, buffers: Tensors, data: ClientData, round: int, extra: Tensors
    ) -> Taken:
        """Steps are numbered through the run: a round that is done again draws and noises as before."""
        size = sum(tensor.numel() for tensor in params.values())
        noise = self.settings.update(data.client, size)
        first = round * self.settings.steps
        loss_sum, examples = 0.0, 0
        draws = self.settings.sampler.draw(len(data), noise.source, first)
        for step, parts in islice(groupby(draws, lambda part: part.step), self.settings.steps):
            total: Tensors = {}
            for part in parts:
                found, losses = self._sum(params, buffers, data, part, noise.source)
                total = {name: total[name] + value if total else value for name, value in found.items()}
                loss_sum, examples = loss_sum + float(losses.sum()), examples + len(losses)
            grads = noise.mean(total, step)
            if self.adjust is not None:
                grads = self.adjust(grads, params, extra)
            for name, tensor in params.items():
                tensor.sub_((extra["lr"] * grads[name]).to(tensor.dtype))
        return Taken(self.settings.steps, examples, loss_sum)

    def _sum(
        self, params: Tensors, buffers: Tensors, data: ClientData, part: Batch, source: NoiseSource
    ) -> tuple[Tensors, Tensor]:
        """The clipped sum and the losses of one part."""
        rows = part.indices[part.mask]  # its padding is for compiled steps, and these are not
        seed = int.from_bytes(source.bytes("dropout", part.step, str(part.part), 8), "little") >> 1
        found = self.clipped(params, buffers, data.tensors(rows), seed=seed)
        return found.total, found.losses
