"""Examples from other models, and gradients tuned to transfer, as the common laws take them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mycelia.attacks import NI, PGD, PI, SINI, TI, VMI, VNI, Jitter, Transfer
from tests.attacks.worlds import Member, affine, small


class Source(nn.Module):
    """A model for the inputs of all laws, in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.rows = small(), affine()

    def forward(self, x: Tensor) -> Tensor:
        model = self.images if x[0].numel() == 36 else self.rows
        found: Tensor = model(x.to(torch.float64)).to(x.dtype)
        return found


MEMBERS: tuple[Member, ...] = (
    *(Member(Transfer([Source()], PGD(norm=p, steps=6))) for p in ("linf", "l2", "l1")),
    Member(Transfer([Source(), Source()])),
    *(Member(VMI(norm=p, steps=4, neighbours=3)) for p in ("linf", "l2", "l1")),
    *(Member(VNI(norm=p, steps=4, neighbours=2)) for p in ("linf", "l2", "l1")),
    *(Member(NI(norm=p, steps=5)) for p in ("linf", "l2", "l1")),
    *(Member(SINI(norm=p, steps=4, copies=3)) for p in ("linf", "l2", "l1")),
    *(Member(TI(norm=p, steps=5, layout="nchw", size=3, spread=1.0), images=True) for p in ("linf", "l2")),
    Member(PI(steps=5, layout="nchw"), images=True),
    *(Member(Jitter(norm=p, steps=5, restarts=2)) for p in ("linf", "l2", "l1")),
)
