"""Privacy of a federation's clients: what is done to an update on the device, and to the sum on the server.

With noise of the server (DP-FedAvg; McMahan et al., ICLR 2018, algorithm 1), for every linear algorithm: what
one client sends, all its terms together, has a norm of at most C; the server adds noise of z C to the sum,
independent in every round (`ServerNoise`) or correlated over the rounds (`FactorisedNoise`, DP-FTRL); and
what the sum is divided by is public, so that neither drop-outs nor the size of the draw change noise or
denominator. With noise of their own (`LocalNoise`) clients need not trust the server; each of them then has
an ε of its own, which is about everything that it sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import SumFormat, Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors
from mycelia.privacy.client_ledgers import ClientLedgers
from mycelia.privacy.clip import ClipFunction, ClipState, QuantileClip, Sensitivity
from mycelia.privacy.events import Event
from mycelia.privacy.factorisation import CorrelatedNoise, NoiseState
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import PREFIX, Sent, Stage

__all__ = [
    "CLIP_BOUND",
    "AdaptiveClip",
    "ClipUpdate",
    "FactorisedNoise",
    "LocalNoise",
    "RecordRelease",
    "ServerNoise",
    "own_source",
    "rounding_slack",
]

CLIP_BOUND = f"{PREFIX}clip_bound"
"""The public tensor with the adaptive bound in force, float64, 0-d."""

_VOTES = f"{PREFIX}clip_votes"


@dataclass(frozen=True)
class ClipUpdate(Stage):
    """Clips a client's update, all terms together; the weight is multiplied by its factor.

    Attributes:
        clip: the clip function.
        weight_max: where weights are public, the most that one counts, above 0 (McMahan et al., ICLR 2018,
            section 2.1): an update then moves the sum by at most that times the clip bound. None: all
            weights are 1.
    """

    place: ClassVar[str] = "clip"

    clip: ClipFunction
    weight_max: float | None = None

    def device(self, update: Update, sent: Sent) -> Update:
        """The clipped update.

        Raises:
            ConfigError: a weight other than 1 where none is public, with which a client could count for more
                than one; or terms of different weights.
            DataError: the update is not finite.
        """
        del sent
        weight = _weight(update, self.weight_max)
        return Update(_clipped(update, self.clip, _norm(update), weight), update.metrics)


@dataclass(frozen=True)
class AdaptiveClip(Stage):
    """Clips as `ClipUpdate` does, to a bound that follows a quantile of the clients' norms.

    The bound in force comes with the model. Whether the update was within it travels in the same sum, as one
    more term; `ServerNoise` noises that too, takes it out, and moves the bound.

    Attributes:
        clip: target, rate and noise of the count.
        weight_max: see `ClipUpdate`; in the count every client has one vote.
    """

    place: ClassVar[str] = "clip"

    clip: QuantileClip
    weight_max: float | None = None

    def terms(self) -> Mapping[str, TermSpec]:
        """Σ (b - ½) over the clients."""
        return {_VOTES: TermSpec(1, 0.5)}

    def begin(self) -> Tensors:
        """The bound of the first round."""
        return {CLIP_BOUND: torch.tensor(self.clip.bound, dtype=torch.float64)}

    def device(self, update: Update, sent: Sent) -> Update:
        """The clipped update and the client's vote.

        Raises:
            ConfigError: see `ClipUpdate.device`.
            DataError: the update is not finite.
        """
        state = ClipState(float(sent.public[CLIP_BOUND]))
        weight, norm = _weight(update, self.weight_max), _norm(update)
        vote = self.clip.signal(state, torch.tensor([norm], dtype=torch.float64))
        votes = {_VOTES: Term(torch.tensor([vote], dtype=torch.float64), 1.0)}
        return Update(_clipped(update, self.clip.clip(state), norm, weight) | votes, update.metrics)


@dataclass(frozen=True)
class LocalNoise(Stage):
    """Noises a clipped update on the device, so that nobody needs to be trusted with it.

    Attributes:
        mechanism: the noise.
        source: the secret of all devices, of which each has a part of its own; see `own_source`.
        noise_multiplier: z, the noise's standard deviation over the clip bound.
        sensitivity: of a clipped update.
    """

    place: ClassVar[str] = "device-noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    mechanism: Mechanism
    source: NoiseSource
    noise_multiplier: float
    sensitivity: Sensitivity

    def device(self, update: Update, sent: Sent) -> Update:
        """The noised update, every term in float64 with weight 1."""
        own, bound = own_source(self.source, sent.client), self.sensitivity.total
        size = sum(term.values.numel() for term in update.terms.values())
        std = self.noise_multiplier * (bound + self.mechanism.slack(bound, size))
        terms = {}
        for name, term in update.terms.items():
            exact = _difference(term).double() * term.weight
            noised = self.mechanism.add(exact, std, own, "local noise", sent.round, name, bound=bound)
            terms[name] = Term(noised, 1.0)
        return Update(terms, update.metrics)


@dataclass(frozen=True)
class RecordRelease(Stage):
    """Writes an update down in its client's own ledger before it leaves the device.

    A round that is done again after a stop sends the same numbers, and counts once.

    Attributes:
        ledgers: the clients' ledgers.
        event: what a round releases.
        uses: most rounds that the client's budget pays for.
    """

    place: ClassVar[str] = "record"

    ledgers: ClientLedgers
    event: Event
    uses: int

    def device(self, update: Update, sent: Sent) -> Update:
        """The update, which is in the ledger now.

        Raises:
            BudgetExceeded: the client's budget cannot pay for it.
            DataError: the round was released before with other numbers.
        """
        event = replace(self.event, step=sent.round * self.event.count)
        self.ledgers.record(sent.client, event, _digest(update), self.uses)
        return update


@dataclass(frozen=True)
class ServerNoise(Stage):
    """Noises the sum of the clipped updates, and fixes what it is divided by.

    Attributes:
        mechanism: the noise.
        source: where it comes from.
        noise_multiplier: z, the noise's standard deviation over the sensitivity. With an adaptive bound it is
            that of both releases together.
        sensitivity: how far one client can move the sum, weight and rounding included.
        expected: the public expected number of clients: the sampling rate times how many there are.
        adaptive: what moves the bound, where the stage at "clip" is an `AdaptiveClip`.
        mean_weight: the public mean of all clients' weights; the sum is divided by `expected` times that.
    """

    place: ClassVar[str] = "noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    mechanism: Mechanism
    source: NoiseSource
    noise_multiplier: float
    sensitivity: Sensitivity
    expected: float
    adaptive: QuantileClip | None = None
    mean_weight: float = 1.0

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The noised sum with public weights; a sum of nobody is noised like any other."""
        sums, changed = dict(total.sums), {}
        sensitivity, z = self.sensitivity, self.noise_multiplier
        if self.adaptive is not None:
            state = ClipState(float(public[CLIP_BOUND]))
            sensitivity = replace(sensitivity, bound=sensitivity.bound / self.adaptive.bound * state.bound)
            z = self.adaptive.gradient_multiplier(z, self.expected)
            after = self.adaptive.update(
                state, float(sums.pop(_VOTES)), self.expected, self.mechanism, self.source, round
            )
            changed = {CLIP_BOUND: torch.tensor(after.bound, dtype=torch.float64)}
        bound = sensitivity.total
        std = z * (bound + self.mechanism.slack(bound, sum(tensor.numel() for tensor in sums.values())))
        noised = {
            name: self.mechanism.add(tensor, std, self.source, "noise", round, name, bound=bound)
            for name, tensor in sums.items()
        }
        return _public(noised, self.expected, self.mean_weight), changed


@dataclass(frozen=True)
class FactorisedNoise(Stage):
    """As `ServerNoise`, with noise that is correlated over the rounds and cancels in the model (DP-FTRL).

    Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", ICML 2021, for any
    factorisation. The noise of a round is a function of its number and the secret: a round that failed leaves
    its row out, and after a stop the rows are made again from their names.

    Attributes:
        noise: the rows; its `std` is the noise multiplier times the sensitivity, all rounding included.
        source: where they come from.
        expected: the public expected number of clients.
        mean_weight: see `ServerNoise`.
    """

    place: ClassVar[str] = "noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    noise: CorrelatedNoise
    source: NoiseSource
    expected: float
    mean_weight: float = 1.0
    _memory: dict[str, NoiseState] = field(default_factory=dict, init=False, repr=False, compare=False)

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The noised sum with public weights; a sum of nobody is noised like any other.

        Raises:
            BudgetExceeded: the planned rounds are over.
            DataError: the sum does not fit the grid of the noise.
        """
        del public
        state = self._memory.get("rows")
        if state is None or state.step > round:
            state = self._memory["rows"] = self.noise.init(total.sums)
        while state.step < round:
            self.noise.next(state, self.source)
        return _public(self.noise.add(total.sums, state, self.source), self.expected, self.mean_weight), {}


def rounding_slack(sensitivity: Sensitivity, form: SumFormat) -> Sensitivity:
    """The sensitivity with what the exact sum's rounding adds: half a step an entry.

    The votes of an adaptive clip bound are multiples of the step and are not rounded.

    Args:
        sensitivity: of the clipped updates.
        form: the sum's format.
    """
    square = sum(
        spec.size * (2.0 ** -(form.formats[name].exponent + 1)) ** 2
        for name, spec in form.specs.items()
        if name != _VOTES
    )
    return replace(sensitivity, slack=sensitivity.slack + math.sqrt(square))


def own_source(source: NoiseSource, client: int | str) -> NoiseSource:
    """The part of a secret that belongs to one client: a key of its own, from which no other follows."""
    return NoiseSource(source.kind, source.bytes("client key", 0, str(client), len(source.key)))


def _difference(term: Term) -> Tensor:
    """A term's vector, without its weight."""
    return term.values if term.minus is None else term.values - term.minus


def _weight(update: Update, weight_max: float | None) -> float:
    """What the update counts: 1, or where weights are public the one of all its terms, up to the most.

    Raises:
        ConfigError: another weight.
    """
    for name, term in update.terms.items():
        if weight_max is None and term.weight != 1:
            raise ConfigError(
                f"the term {name} has weight {term.weight}",
                rule="with a clip bound per client every client has weight 1",
                fix='set weighting = "uniform" in the algorithm',
                who="clip",
            )
    weights = {term.weight for term in update.terms.values()}
    if len(weights) > 1:
        raise ConfigError(
            f"terms of weights {sorted(weights)}",
            rule="one public weight is that of the whole update, which is clipped as a whole",
            fix="leave weight_max out, or use an algorithm such as fedavg",
            who="clip",
        )
    weight = weights.pop() if weights else 1.0
    return weight if weight_max is None else min(weight, weight_max)


def _norm(update: Update) -> float:
    """L2 norm of all terms together, without their weights, in float64.

    Raises:
        DataError: the update is not finite.
    """
    parts = [torch.linalg.vector_norm(_difference(t), dtype=torch.float64) for t in update.terms.values()]
    norm = math.hypot(*map(float, parts))
    if not math.isfinite(norm):
        raise DataError("the update holds NaN or infinity", fix="lower local.lr", who="clip")
    return norm


def _clipped(update: Update, clip: ClipFunction, norm: float, weight: float) -> dict[str, Term]:
    """The terms times the clip factor, which joins their weight wherever a weight can be that."""
    factor = float(clip(torch.tensor([norm], dtype=torch.float64)))
    if 0 < factor <= 1:
        return {name: replace(term, weight=factor * weight) for name, term in update.terms.items()}
    # 0: left out by the clip function, the client counts and moves nothing; above 1: a short update grows
    return {name: Term(_difference(term).double() * factor, weight) for name, term in update.terms.items()}


def _public(sums: Mapping[str, Tensor], expected: float, mean_weight: float) -> Total:
    """The total as the merge sees it: nothing in it tells how many came."""
    weights = dict.fromkeys(sums, expected * mean_weight)
    return Total(dict(sums), weights, max(1, round(expected)))


def _digest(update: Update) -> str:
    """Hash of the numbers that are sent."""
    digest = blake2b(digest_size=16)
    for name, term in sorted(update.terms.items()):
        digest.update(f"{name} {term.weight!r}".encode())
        for tensor in (term.values, term.minus):
            if tensor is not None:
                digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
