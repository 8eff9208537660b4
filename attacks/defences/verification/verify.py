"""Which rows keep their class everywhere in a ball: proofs, not attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.defences.verification.intervals import Rounding, bounds_through, margins_below
from mycelia.attacks.defences.verification.layers import Chain
from mycelia.attacks.defences.verification.reading import read
from mycelia.attacks.defences.verification.zonotopes import margins_of, zonotope_through
from mycelia.attacks.norms import wide
from mycelia.attacks.search import SLACK
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["Method", "Verified", "verify"]

Method = Literal["interval", "zonotope"]

_METHODS: Final = ("interval", "zonotope")
_TOGETHER: Final = 64  # rows whose intervals are computed at once


@dataclass(frozen=True, eq=False)
class Verified:
    """What was proved of each row.

    Attributes:
        certified: bool [n]: every input within eps and bounds is classified as y. False says nothing.
        margin: float64 [n]: what the smallest z_y − z_j is at least there; NaN for a row that is not finite.
        eps: radius of each row in linf, float64 [n].
        method: "interval" or "zonotope".
    """

    certified: Tensor
    margin: Tensor
    eps: Tensor
    method: Method

    @property
    def accuracy(self) -> float | None:
        """Certified share of all rows; None without rows."""
        return float(self.certified.double().mean()) if len(self.certified) else None


def verify(
    model: nn.Module | Program,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    bounds: Bounds = (0.0, 1.0),
    method: Method = "zonotope",
    params: Tensors | None = None,
    buffers: Tensors | None = None,
    terms: int = 2000,
) -> Verified:
    """Prove, where these bounds can, that no input within eps of x in linf is classified as another class.

    Bounds are computed in float64 and hold for the model in exact arithmetic and as it computes in its own
    dtype, float32 or float64, in evaluation mode: sums in any order, fused or not. They do not hold for
    arithmetic of less precision (TF32, mixed precision) or for convolutions by transforms (Winograd, FFT).
    The ball is that which attacks here may use: norm up to eps · (1 + 1e-6).

    A zonotope takes memory and time of (inputs + terms · layers) rows for each row; it certifies every row
    that intervals do.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> _ = model[0].weight.data.copy_(torch.eye(2))
    >>> x, y = torch.tensor([[0.7, 0.4]] * 2), torch.tensor([0, 0])
    >>> verify(model, x, y, torch.tensor([0.1, 0.2])).certified
    tensor([ True, False])

    Args:
        model: see `reading.read` for what it may consist of.
        x: inputs [n, …].
        y: labels [n].
        eps: radius in units of x, at least 0; a number or [n].
        bounds: smallest and largest value of an input.
        method: "interval", or "zonotope".
        params: of a Program; None: as captured.
        buffers: of a Program; None: as captured.
        terms: new terms of a zonotope at one layer, at most; fewer are faster and looser.

    Raises:
        ConfigError: a layer that there are no bounds for, a dtype of less than 32 bits, or a setting out of
            range.
        DataError: labels that do not fit, or x beyond its bounds.
    """
    if method not in _METHODS or terms < 0:
        raise ConfigError(
            f"method {method!r}, terms {terms}", rule=f"{' or '.join(_METHODS)}, at least 0", who="verify"
        )
    chain, given = read(model, params, buffers)
    rounding, tensors = _arithmetic(given)
    x = inputs_of(x)
    low, high = bounds_of(bounds, x)
    x, sound = clipped(x, low, high)
    radius = torch.as_tensor(eps, dtype=torch.float64, device=x.device).expand(len(x))
    if bool((radius < 0).any()) or not bool(torch.isfinite(radius).all()):
        raise ConfigError(f"eps {eps}", rule="at least 0 and finite, in units of x", who="verify")
    if y.shape != (len(x),) or y.is_floating_point():
        raise DataError(f"labels {y.dtype}{list(y.shape)}", rule=f"whole numbers [{len(x)}]", who="verify")
    safe = torch.where(wide(sound, x), x, torch.zeros_like(x)).double()
    ends = _box(safe, radius, low.double(), high.double())
    most = terms if method == "zonotope" else None
    parts = []
    for i in range(0, len(x), _TOGETHER):
        below, above, labels = (each[i : i + _TOGETHER] for each in (*ends, y.long()))
        parts.append(_margins(chain, below, above, labels, tensors, rounding, most))
    margin = torch.cat(parts) if parts else radius.new_zeros(0)
    margin = torch.where(sound, margin, torch.full_like(margin, torch.nan))
    return Verified(margin > 0, margin, radius.clone(), method)


def _arithmetic(given: Tensors) -> tuple[Rounding, Tensors]:
    """The rounding of a model, and its tensors in float64."""
    kinds = {each.dtype for each in given.values() if each.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64}:
        raise ConfigError(
            f"tensors of {', '.join(sorted(map(str, kinds)))}",
            rule="float32 or float64: the sums of smaller ones are not told by their dtype",
            who="verify",
        )
    dtype = torch.float32 if torch.float32 in kinds or not kinds else torch.float64
    return Rounding.of(dtype), {name: each.double() for name, each in given.items()}


def _box(x: Tensor, radius: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest inputs within the radius and the bounds, rounded outwards."""
    reach = wide(radius, x) * (1 + SLACK + 1e-12)
    ends = torch.full_like(x, -torch.inf), torch.full_like(x, torch.inf)
    below, above = torch.nextafter(x - reach, ends[0]), torch.nextafter(x + reach, ends[1])
    return torch.maximum(below, low), torch.minimum(above, high)


def _margins(
    chain: Chain,
    low: Tensor,
    high: Tensor,
    y: Tensor,
    tensors: Tensors,
    rounding: Rounding,
    terms: int | None,
) -> Tensor:
    """What the smallest margin of each row is at least, [n]."""
    known = bounds_through(chain, low, high, tensors, rounding)
    outputs = known[-1][0]
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise DataError(
            f"outputs of shape {list(outputs.shape)}", rule="logits [n, classes], two at least", who="verify"
        )
    if bool(((y < 0) | (y >= outputs.shape[1])).any()):
        raise DataError("a label without a logit", rule=f"0 to {outputs.shape[1] - 1}", who="verify")
    margins = margins_below(chain, known, y, tensors, rounding)
    if terms is not None:
        own = [
            margins_of(
                zonotope_through(
                    chain, low[i : i + 1], high[i : i + 1], [(a[i : i + 1], b[i : i + 1]) for a, b in known],
                    tensors, rounding, terms,
                ),
                int(y[i]),
            )
            for i in range(len(low))
        ]  # fmt: skip
        margins = torch.maximum(margins, torch.cat(own))
    return margins.scatter(1, y[:, None], torch.inf).amin(1)
