"""What wrong numbers in a model's memory do to its predictions: eight faults, in one layer or in all.

Positions are drawn without replacement from a named stream, and changed on a copy; the model keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from mycelia.attacks.goals import predicted
from mycelia.attacks.model import ModuleModel, _scores
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.program import Program
from mycelia.engine.rng import derive, generator
from mycelia.engine.types import Tensors

__all__ = ["FAULTS", "Fault", "FaultReport", "Injection", "Measured", "campaign", "flip_bit", "inject"]

Fault = Callable[[Tensor, np.random.Generator], Tensor]
"""Of the values at the positions hit, [k], and a source of random numbers: what they become, [k]."""

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES: Final = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64,
})  # fmt: skip
_WHOLE: Final = 2.0**52  # from here on a float64 has no fraction


def flip_bit(values: Tensor, bit: int | Tensor) -> Tensor:
    """The values with one bit of their representation the other way round.

    >>> flip_bit(torch.tensor([1.0, -2.0]), 31)  # the sign
    tensor([-1.,  2.])

    Args:
        values: any shape; float16, bfloat16, float32, float64 or an integer type.
        bit: 0 is the least significant one, width − 1 the most significant (the sign of floats and of signed
            integers); a number, or an integer of each value that broadcasts to them.

    Returns:
        of the same shape and dtype; flipping twice gives the same bits.

    Raises:
        DataError: a dtype without such bits.
        ConfigError: a bit beyond the width.
    """
    width = _width(values)
    chosen = torch.as_tensor(bit, device=values.device)
    if chosen.is_floating_point() or (
        chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < width
    ):
        raise ConfigError(
            f"bit {bit if isinstance(bit, int) else chosen.flatten()[:10].tolist()}",
            rule=f"an integer from 0 to {width - 1}: {values.dtype} has {width} bits",
            who="flip_bit",
        )
    word = _WORDS[values.element_size()]
    top = 1 << (width - 1)
    masks = [1 << each for each in range(width - 1)] + [top if word is torch.uint8 else -top]
    mask = torch.tensor(masks, dtype=word, device=values.device)[chosen.to(torch.int64)]
    return (values.detach().contiguous().view(word) ^ mask).view(values.dtype)


def _width(values: Tensor) -> int:
    if values.dtype not in _DTYPES:
        raise DataError(
            f"values of {values.dtype}",
            rule="float16, bfloat16, float32, float64 or an integer type",
            who="flip_bit",
        )
    return 8 * values.element_size()


# --- the eight --------------------------------------------------------------------------------------


def _bitflips_random(values: Tensor, draw: np.random.Generator) -> Tensor:
    bits = draw.integers(0, _width(values), values.shape)
    return flip_bit(values, torch.from_numpy(bits).to(values.device))


def _bitflips_designated(values: Tensor, draw: np.random.Generator) -> Tensor:
    unsigned = values.dtype is torch.uint8
    return flip_bit(values, _width(values) - (1 if unsigned else 2))


def _random(values: Tensor, draw: np.random.Generator) -> Tensor:
    if not values.is_floating_point():
        return _refused("random", values, "floating point")
    return torch.from_numpy(draw.uniform(-1.0, 1.0, values.shape)).to(values)


def _negated(values: Tensor, draw: np.random.Generator) -> Tensor:
    if values.is_floating_point():
        return -values
    limits = torch.iinfo(values.dtype)  # the smallest signed integer has no opposite
    return -values.clamp(min=-limits.max) if limits.min < 0 else _refused("anti_activation", values, "signed")


def _one_decimal(values: Tensor, draw: np.random.Generator) -> Tensor:
    if not values.is_floating_point():
        return values.clone()
    exact = values.double()
    return torch.where(exact.abs() < _WHOLE, exact.round(decimals=1), exact).to(values.dtype)


def _filled(name: str, value: float) -> Fault:
    def fault(values: Tensor, draw: np.random.Generator) -> Tensor:
        if not (values.is_floating_point() or value == 0):
            return _refused(name, values, "floating point")
        return torch.full_like(values, value)

    return fault


def _refused(name: str, values: Tensor, wanted: str) -> Tensor:
    raise ConfigError(
        f"{name} in values of {values.dtype}",
        rule=f"{wanted} values",
        fix="a fault that these values can have, such as bitflips_random; or another layer",
        who="fault",
    )


FAULTS: Final[Mapping[str, Fault]] = {
    "bitflips_random": _bitflips_random,
    "bitflips_designated": _bitflips_designated,
    "random": _random,
    "zeros": _filled("zeros", 0.0),
    "nan": _filled("nan", math.nan),
    "inf": _filled("inf", math.inf),
    "anti_activation": _negated,
    "precision_loss": _one_decimal,
}
"""Faults by name.

bitflips_random: any bit, each as likely. bitflips_designated: the top exponent bit of floats, the top bit of
unsigned integers, the bit below the sign of signed ones. random: uniform in [−1, 1]. zeros, nan, inf: that
value. anti_activation: the opposite. precision_loss: rounded to one decimal. random, nan and inf are those of
floating point values, anti_activation of signed ones.
"""


# --- where ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Injection:
    """Parameters with faults in them.

    Attributes:
        params: all of them by name; those that were hit are copies.
        positions: of the faults, flat places by parameter, int64; parameters without a fault are left out.
    """

    params: Tensors
    positions: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        """Number of faults."""
        return sum(len(places) for places in self.positions.values())


def inject(
    params: Mapping[str, Tensor],
    fault: str,
    *,
    count: int | None = None,
    fraction: float | None = None,
    layer: str | None = None,
    rng: int = 0,
) -> Injection:
    """Put a fault into parameters.

    Every value of the layer, or of all layers, is as likely to be hit, and none is hit twice. Positions
    depend on seed, layer and number only, so that faults of different kinds can be compared place by place.

    Args:
        params: by name; they stay as they are.
        fault: a name of `FAULTS`.
        count: how many values; or
        fraction: the share of them, in [0, 1], to the nearest number.
        layer: a parameter, or what the names of several begin with, up to a dot; None: all.
        rng: seed.

    Raises:
        ConfigError: both or neither of count and fraction, one that is out of range or comes to nothing, an
            unknown fault or layer, or a fault that values of such a dtype cannot have.
    """
    if fault not in FAULTS:
        raise ConfigError(f"fault {fault!r}", rule=f"one of {', '.join(FAULTS)}", who="fault")
    names = _in_layer(params, layer)
    sizes = [params[name].numel() for name in names]
    number = _number(sum(sizes), count, fraction)
    places = np.sort(
        generator(rng, "attacks/faults/positions").choice(sum(sizes), number, replace=False, shuffle=False)
    )
    changed: Tensors = dict(params)
    positions: dict[str, Tensor] = {}
    ends = np.cumsum(sizes)
    for name, end, size in zip(names, ends, sizes, strict=True):
        mine = places[(places >= end - size) & (places < end)] - (end - size)
        if not len(mine):
            continue
        where = torch.from_numpy(mine).to(params[name].device)
        copy = params[name].detach().clone(memory_format=torch.contiguous_format)
        flat = copy.view(-1)
        flat[where] = FAULTS[fault](flat[where], generator(rng, f"attacks/faults/{fault}", client=name))
        changed[name], positions[name] = copy, where
    return Injection(changed, positions)


def _in_layer(params: Mapping[str, Tensor], layer: str | None) -> list[str]:
    if layer is None:
        return list(params)
    names = [name for name in params if name == layer or name.startswith(f"{layer}.")]
    if not names:
        raise ConfigError(
            f"layer {layer!r}", rule=f"one of {', '.join(params)}, or what they begin with", who="layer"
        )
    return names


def _number(total: int, count: int | None, fraction: float | None) -> int:
    if (count is None) == (fraction is None):
        raise ConfigError(
            f"count {count}, fraction {fraction}", rule="exactly one of the two", fix="count=1", who="fault"
        )
    if count is not None:
        if not 0 <= count <= total:
            raise ConfigError(f"count {count}", rule=f"from 0 to {total}, the number of values", who="count")
        return count
    share = 0.0 if fraction is None else fraction
    if not 0 <= share <= 1:
        raise ConfigError(f"fraction {share}", rule="a share in [0, 1]", who="fraction")
    number = round(share * total)
    if share and not number:
        raise ConfigError(
            f"fraction {share} of {total} values is none", rule="at least one", fix="count=1", who="fraction"
        )
    return number


# --- a campaign -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A number over repeats.

    Attributes:
        mean: of the repeats.
        ci95: Student's interval for the mean, cut at what it can be; of no width where all repeats agree, as
            a few of them may do by chance; None with fewer than two.
        values: of each repeat.
    """

    mean: float
    ci95: tuple[float, float] | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class FaultReport:
    """What one kind of fault did.

    Attributes:
        fault: its name.
        layer: where; None: anywhere.
        count: faults in each repeat.
        n: inputs.
        accuracy_clean: share of inputs that the model has right without a fault.
        accuracy: the same with faults; an output that is no number is wrong.
        drop: accuracy_clean − accuracy.
        changed: share of inputs of which the prediction is another one, or none.
        non_finite: share of inputs with an output that is not finite.
    """

    fault: str
    layer: str | None
    count: int
    n: int
    accuracy_clean: float
    accuracy: Measured
    drop: Measured
    changed: Measured
    non_finite: Measured


def campaign(
    model: nn.Module | Program,
    x: Tensor,
    y: Tensor,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    count: int | None = None,
    fraction: float | None = None,
    layer: str | None = None,
    repeats: int = 10,
    rng: int = 0,
    batch: int = 256,
    params: Tensors | None = None,
    buffers: Tensors | None = None,
) -> tuple[FaultReport, ...]:
    """Put each of some faults into a model, again and again, and count what it does to predictions.

    Repeat r hits the same positions with every fault.

    Args:
        model: of scores [n, classes]; it stays as it is.
        x: inputs [n, …], n at least 1.
        y: true classes, integers [n].
        faults: names of `FAULTS`.
        count: see `inject`.
        fraction: see `inject`.
        layer: see `inject`.
        repeats: at least 1.
        rng: seed.
        batch: rows at a time.
        params: of a Program; its initial ones by default.
        buffers: of a Program.

    Returns:
        one report for each fault, in their order.

    Raises:
        ConfigError: see `inject`.
        DataError: no inputs, or not as many labels.
    """
    if not len(x) or y.shape != (len(x),):
        raise DataError(f"{len(x)} inputs, labels {list(y.shape)}", rule="one label each", who="campaign")
    if repeats < 1 or batch < 1:
        raise ConfigError(f"repeats {repeats}, batch {batch}", rule="at least 1", who="campaign")
    if isinstance(model, Program):
        own, own_buffers = model.init()
        values = own if params is None else params
        state = own_buffers if buffers is None else buffers
        return _reports(
            lambda given, rows: model.predict(given, state, rows), values, x, y,
            faults, count, fraction, layer, repeats, rng, batch,
        )  # fmt: skip
    with ModuleModel(model).quiet():
        return _reports(
            lambda given, rows: torch.func.functional_call(model, given, (rows,)),
            dict(model.named_parameters()), x, y, faults, count, fraction, layer, repeats, rng, batch,
        )  # fmt: skip


def _reports(
    predict: Callable[[Tensors, Tensor], Any], params: Tensors, x: Tensor, y: Tensor, faults: Sequence[str],
    count: int | None, fraction: float | None, layer: str | None, repeats: int, rng: int, batch: int,
) -> tuple[FaultReport, ...]:  # fmt: skip
    def outputs(given: Tensors) -> Tensor:
        with torch.no_grad():
            return torch.cat([
                _scores(predict(given, rows), len(rows), "logits", binary_logit=False, who="campaign")
                for rows in x.split(batch)
            ])  # fmt: skip

    before = predicted(outputs(params))
    clean = float((before == y).double().mean())
    reports = []
    for fault in faults:
        seen: list[tuple[float, float, float]] = []
        number = 0
        for repeat in range(repeats):
            seed = derive(rng, "attacks/faults/campaign", round=repeat)
            hit = inject(params, fault, count=count, fraction=fraction, layer=layer, rng=seed)
            found = outputs(hit.params)
            after = predicted(found)
            finite = torch.isfinite(found).all(1)
            seen.append((
                float((after == y).double().mean()), float((after != before).double().mean()),
                float((~finite).double().mean()),
            ))  # fmt: skip
            number = hit.count
        right, changed, broken = zip(*seen, strict=True)
        reports.append(FaultReport(
            fault, layer, number, len(x), clean, _measured(right, 0.0),
            _measured([clean - each for each in right], clean - 1), _measured(changed, 0.0),
            _measured(broken, 0.0),
        ))  # fmt: skip
    return tuple(reports)


def _measured(values: Sequence[float], least: float) -> Measured:
    """With an interval inside [least, least + 1]."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Measured(mean, None, tuple(values))
    half = float(special.stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Measured(mean, (max(least, mean - half), min(least + 1, mean + half)), tuple(values))
