"""Clip functions: how much of an example's gradient is taken, and what that bounds.

A clip function is a frozen value: called on gradient norms [B] it gives factors [B]; `sensitivity()` says how
far one example can then move the sum. Noise and accounting read that object, never a bound typed elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, chosen
from mycelia.privacy.events import RELATIONS, choose
from mycelia.privacy.groups import Group, Unit
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource

__all__ = [
    "CLIPS",
    "PSAC",
    "Abadi",
    "AutoS",
    "ClipFunction",
    "ClipState",
    "Indicator",
    "PerLayer",
    "QuantileClip",
    "Sensitivity",
    "build",
]


@dataclass(frozen=True)
class Sensitivity:
    """How far one example can move a total.

    Attributes:
        bound: for adding or removing it, in model units, above 0.
        norm: "l1" or "l2".
        slack: what rounding adds, at least 0; see `on_grid` and `summed`.

    Raises:
        ConfigError: a value out of range.
    """

    bound: float
    norm: Literal["l1", "l2"] = "l2"
    slack: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("sensitivity", "bound", self.bound)
        choose("norm", self.norm, ("l1", "l2"))
        if not 0 <= self.slack < math.inf:
            raise ConfigError(
                f"slack is {self.slack}", rule="slack is finite and at least 0", who="sensitivity"
            )

    @property
    def total(self) -> float:
        """The bound with its slack: what σ is divided by to give the noise multiplier z of an event."""
        return self.bound + self.slack

    def under(self, relation: str, unit: Unit = "example") -> float:
        """The bound, slack included, under a relation of neighbours.

        Args:
            relation: "add-remove" or "zero-out" for `total`, "replace-one" for twice that.
            unit: what is clipped; a `Group` for twice `total` whatever the relation, as one example can turn
                the clipped mean of its group into any other.

        Raises:
            ConfigError: another relation.
        """
        choose("relation", relation, RELATIONS)
        return 2 * self.total if relation == "replace-one" or isinstance(unit, Group) else self.total

    def on_grid(self, step: float, size: int) -> Sensitivity:
        """With the slack of rounding a total of `size` entries to multiples of `step`.

        Two totals that lie apart by v lie apart by v and at most `step` an entry once both are rounded: in
        all sqrt(size) * step in L2, size * step in L1.
        """
        entries = size if self.norm == "l1" else math.sqrt(size)
        return replace(self, slack=self.slack + entries * step)

    def summed(
        self, examples: int, depth: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Sensitivity:
        """With the slack of summing in floating point, where one example changes how the others are rounded.

        A sum of m vectors of length at most `bound`, in which no term goes through more than `depth`
        additions, is off by at most g * m * bound with g = depth u / (1 - depth u) and u half the dtype's
        epsilon (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2); two neighbouring
        sums by twice that.

        Args:
            examples: m, the most in one total.
            depth: m - 1 by default, which holds for any order; ceil(log2(m)) holds for a balanced tree.
            dtype: of the sum.

        Raises:
            ConfigError: the sum is so long that there is no bound.
        """
        depth = max(examples - 1, 0) if depth is None else depth
        lost = depth * torch.finfo(dtype).eps / 2
        if lost >= 1:
            raise ConfigError(
                f"{depth} additions in {dtype}",
                rule="their rounding errors add up to less than one",
                fix="sum in float64",
                who="sensitivity",
            )
        return replace(self, slack=self.slack + 2 * lost / (1 - lost) * examples * self.bound)

    def weighted(self, weight_max: float) -> Sensitivity:
        """When clipped contributions are multiplied by public weights of at most `weight_max`, above 0.

        Raises:
            ConfigError: the weight is out of range.
        """
        _check_positive("sensitivity", "weight_max", weight_max)
        return replace(self, bound=weight_max * self.bound)

    def in_l1(self, size: int) -> Sensitivity:
        """The L1 sensitivity that an L2 one of `size` entries implies: sqrt(size) times it."""
        if self.norm == "l1":
            return self
        root = math.sqrt(size)
        return Sensitivity(root * self.bound, "l1", root * self.slack)


@dataclass(frozen=True)
class ClipFunction:
    """The common half of the clip functions with one bound.

    Attributes:
        bound: C, the most an example's clipped gradient can measure in L2, in model units; above 0.

    Raises:
        ConfigError: the bound is not a positive number.
    """

    bound: float
    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        _check_positive(self.name, "bound", self.bound)

    def __call__(self, norms: Tensor) -> Tensor:
        """Factors for gradient norms of at least 0, floating point [B]; 0 for a norm that is not finite."""
        return torch.where(norms.isfinite(), self._factors(norms), torch.zeros_like(norms))

    def _factors(self, norms: Tensor) -> Tensor:
        raise NotImplementedError

    def sensitivity(self) -> Sensitivity:
        """`bound` in L2."""
        return Sensitivity(self.bound)


@dataclass(frozen=True)
class Abadi(ClipFunction):
    """min(1, C / n): longer gradients are shortened to C (Abadi et al., CCS 2016, algorithm 1)."""

    name: ClassVar[str] = "abadi"

    def _factors(self, norms: Tensor) -> Tensor:
        return (self.bound / norms).clamp(max=1.0)


@dataclass(frozen=True)
class AutoS(ClipFunction):
    """C / (n + gamma): every gradient is normalised, so that C needs no tuning (Bu et al., NeurIPS 2023).

    Attributes:
        gamma: keeps small gradients small, above 0, in the units of the norms.
    """

    gamma: float = 0.01
    name: ClassVar[str] = "auto-s"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self.name, "gamma", self.gamma)

    def _factors(self, norms: Tensor) -> Tensor:
        return self.bound / (norms + self.gamma)


@dataclass(frozen=True)
class PSAC(ClipFunction):
    """C / (n + r / (n + r)): normalised, with less weight on small gradients (Xia et al., AAAI 2023).

    Attributes:
        r: above 0.
    """

    r: float = 0.1
    name: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self.name, "r", self.r)

    def _factors(self, norms: Tensor) -> Tensor:
        return self.bound / (norms + self.r / (norms + self.r))


@dataclass(frozen=True)
class Indicator(ClipFunction):
    """1 where n <= C, else 0: longer gradients are left out."""

    name: ClassVar[str] = "indicator"

    def _factors(self, norms: Tensor) -> Tensor:
        return (norms <= self.bound).to(norms.dtype)


@dataclass(frozen=True)
class PerLayer:
    """Groups of parameters, each clipped for itself as by `Abadi` (McMahan et al., ICLR 2018, section 2).

    Attributes:
        bound: C for all, of which each of L groups gets C / sqrt(L); or one bound for each group, together
            sqrt(Σ bound²).
        groups: names of the parameters of each group.

    Raises:
        ConfigError: a bound is not a positive number, their number is not that of the groups, a group is
            empty or a name is in two of them.
    """

    bound: float | tuple[float, ...]
    groups: tuple[tuple[str, ...], ...]
    name: ClassVar[str] = "per-layer"

    def __post_init__(self) -> None:
        # lists come from configuration files
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))
        if isinstance(self.bound, Sequence):
            object.__setattr__(self, "bound", tuple(self.bound))
        names = [name for group in self.groups for name in group]
        if not self.groups or not all(self.groups) or len(set(names)) < len(names):
            raise ConfigError(
                f"the groups are {self.groups}",
                rule="every group has a parameter, and every parameter one group",
                who=self.name,
            )
        for bound in self.bounds:
            _check_positive(self.name, "bound", bound)
        if len(self.bounds) != len(self.groups):
            raise ConfigError(
                f"{len(self.bounds)} bounds for {len(self.groups)} groups",
                rule="one bound for all, or one for each group",
                who=self.name,
            )

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bound of each group."""
        if isinstance(self.bound, tuple):
            return self.bound
        return (self.bound / math.sqrt(len(self.groups)),) * len(self.groups)

    def columns(self, names: Sequence[str]) -> tuple[int, ...]:
        """The group of each parameter, in the order given.

        Raises:
            ConfigError: a parameter is in no group, or a group names one that is not given.
        """
        group = {name: index for index, names in enumerate(self.groups) for name in names}
        if group.keys() != set(names):
            missing, unknown = sorted(set(names) - group.keys()), sorted(group.keys() - set(names))
            raise ConfigError(
                f"in no group: {missing}; not in the model: {unknown}",
                rule="the groups hold every trained parameter, and no other",
                who=self.name,
            )
        return tuple(group[name] for name in names)

    def __call__(self, norms: Tensor) -> Tensor:
        """Factors [B, L] for the norms of each group, [B, L]; all 0 for an example with one not finite.

        Raises:
            ConfigError: the last axis is not that of the groups.
        """
        if norms.shape[-1:] != (len(self.groups),):
            raise ConfigError(
                f"norms have shape {list(norms.shape)}",
                rule=f"one column for each of {len(self.groups)} groups",
                who=self.name,
            )
        bounds = torch.tensor(self.bounds, dtype=norms.dtype, device=norms.device)
        good = norms.isfinite().all(-1, keepdim=True)
        return torch.where(good, (bounds / norms).clamp(max=1.0), torch.zeros_like(norms))

    def sensitivity(self) -> Sensitivity:
        """sqrt(Σ bound²) in L2: C itself when it was given for all."""
        return Sensitivity(math.hypot(*self.bound) if isinstance(self.bound, tuple) else self.bound)


@dataclass(frozen=True)
class ClipState:
    """Where an adaptive clip bound stands; part of every checkpoint.

    Attributes:
        bound: C in force.
    """

    bound: float


@dataclass(frozen=True)
class QuantileClip:
    """A clip bound that follows a quantile of the gradient norms (Andrew et al., NeurIPS 2021).

    Each update releases two things: the gradient, and how many norms were within C. The user asks for one
    **total** multiplier z; `gradient_multiplier` says what the gradient then needs, and the ledger records z.
    All methods are pure; the bound in force is a `ClipState`.

    >>> adaptive = QuantileClip(sigma_b=10.0)
    >>> adaptive.clip(adaptive.init()).bound
    1.0
    >>> round(adaptive.gradient_multiplier(1.0, expected_batch=200), 6)
    1.001252

    Attributes:
        target: share of the examples that is to be left unclipped, in [0, 1].
        rate: of the geometric steps of C, above 0.
        sigma_b: standard deviation of the noise of the count, above 0; by default a twentieth of the expected
            batch, which is public. It does not depend on the batch that was drawn.
        bound: C at the start.

    Raises:
        ConfigError: a value out of range.
    """

    target: float = 0.5
    rate: float = 0.2
    sigma_b: float | None = None
    bound: float = 1.0
    name: ClassVar[str] = "quantile"

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise ConfigError(f"target is {self.target}", rule="target is in [0, 1]", who=self.name)
        _check_positive(self.name, "rate", self.rate)
        _check_positive(self.name, "bound", self.bound)
        if self.sigma_b is not None:
            _check_positive(self.name, "sigma_b", self.sigma_b)

    def init(self) -> ClipState:
        """The state before the first update."""
        return ClipState(self.bound)

    def clip(self, state: ClipState) -> Abadi:
        """The clip function in force; its sensitivity is that of the gradient release."""
        return Abadi(state.bound)

    def signal(self, state: ClipState, norms: Tensor, mask: Tensor | None = None) -> float:
        """Σ (b - ½) over the examples, b = 1 where the norm is within C: private until it is noised.

        Parts of a logical batch add. A norm that is not finite is not within C; an empty batch gives 0.

        Args:
            state: the bound in force.
            norms: floating point [B].
            mask: bool [B], false for padding.
        """
        votes = (norms.double() <= state.bound).double() - 0.5
        return float((votes if mask is None else votes[mask]).sum())

    def count_noise(self, expected_batch: float) -> float:
        """σ_b: the standard deviation of the noise of the count.

        Args:
            expected_batch: the public expected batch, above 0.
        """
        _check_positive(self.name, "expected_batch", expected_batch)
        return expected_batch / 20 if self.sigma_b is None else self.sigma_b

    def gradient_multiplier(self, total: float, expected_batch: float) -> float:
        """z_Δ = (z⁻² - (2 σ_b)⁻²)^(-½): the gradient's multiplier when both are to cost as z (theorem 1).

        Args:
            total: z, of both releases together, at least 0.
            expected_batch: the public expected batch, above 0.

        Raises:
            ConfigError: z is not below 2 σ_b, so that the count alone costs more.
        """
        limit = 2 * self.count_noise(expected_batch)
        if not 0 <= total < limit:
            raise ConfigError(
                f"the total noise multiplier is {total}, sigma_b is {limit / 2}",
                rule="0 <= z < 2 sigma_b",
                fix="take a larger sigma_b or a smaller z",
                who=self.name,
            )
        return total / math.sqrt((1 - total / limit) * (1 + total / limit))

    def update(
        self,
        state: ClipState,
        signal: float,
        expected_batch: float,
        mechanism: Mechanism,
        source: NoiseSource,
        step: int,
    ) -> ClipState:
        """The bound for the next update: C exp(-rate (b̂ - target)), b̂ = (signal + noise) / B̄ + ½.

        Args:
            state: the bound in force.
            signal: Σ (b - ½) of the whole logical batch.
            expected_batch: B̄, public; never the number of examples drawn.
            mechanism: draws the noise of the count: the one that also noises the gradient.
            source: the secret.
            step: the update; names the stream, with the purpose "clip count".

        Raises:
            ConfigError: the bound has left the range of numbers.
        """
        noised = mechanism.add(
            torch.tensor([signal], dtype=torch.float64),
            self.count_noise(expected_batch),
            source,
            "clip count",
            step,
            bound=0.5,
        )
        share = float(noised) / expected_batch + 0.5
        bound = state.bound * math.exp(-self.rate * (share - self.target))
        _check_positive(self.name, "the next bound", bound)
        return ClipState(bound)


CLIPS: Mapping[str, Callable[..., ClipFunction | PerLayer | QuantileClip]] = MappingProxyType(
    {clip.name: clip for clip in (Abadi, AutoS, PSAC, Indicator, PerLayer, QuantileClip)}
)


def build(name: str, **options: Any) -> ClipFunction | PerLayer | QuantileClip:
    """The clip function called `name`, as in a configuration file.

    Args:
        name: a key of `CLIPS`.
        options: its arguments.

    Raises:
        ConfigError: unknown name or option, or a value out of range.

    >>> build("abadi", bound=1.0)
    Abadi(bound=1.0)
    """
    make = chosen(CLIPS, name, kind="clip function", who="clip")
    check_options(make, options, who=f"clip {name!r}")
    return make(**options)


def _check_positive(who: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}", rule=f"{name} is a number above 0", who=who)
