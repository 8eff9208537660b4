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
    """Clips a client's update, all terms together; its factor takes the place of the weight.

    Attributes:
        clip: the clip function.
    """

    place: ClassVar[str] = "clip"

    clip: ClipFunction

    def device(self, update: Update, sent: Sent) -> Update:
        """The clipped update.

        Raises:
            ConfigError: a weight other than 1, with which a client could count for more than one.
            DataError: the update is not finite.
        """
        del sent
        return Update(_clipped(update, self.clip, _norm(update)), update.metrics)


@dataclass(frozen=True)
class AdaptiveClip(Stage):
    """Clips as `ClipUpdate` does, to a bound that follows a quantile of the clients' norms.

    The bound in force comes with the model. Whether the update was within it travels in the same sum, as one
    more term; `ServerNoise` noises that too, takes it out, and moves the bound.

    Attributes:
        clip: target, rate and noise of the count.
    """

    place: ClassVar[str] = "clip"

    clip: QuantileClip

    def terms(self) -> Mapping[str, TermSpec]:
        """Σ (b - ½) over the clients."""
        return {_VOTES: TermSpec(1, 0.5)}

    def begin(self) -> Tensors:
        """The bound of the first round."""
        return {CLIP_BOUND: torch.tensor(self.clip.bound, dtype=torch.float64)}

    def device(self, update: Update, sent: Sent) -> Update:
        """The clipped update and the client's vote.

        Raises:
            ConfigError: a weight other than 1, with which a client could count for more than one.
            DataError: the update is not finite.
        """
        state = ClipState(float(sent.public[CLIP_BOUND]))
        norm = _norm(update)
        vote = self.clip.signal(state, torch.tensor([norm], dtype=torch.float64))
        votes = {_VOTES: Term(torch.tensor([vote], dtype=torch.float64), 1.0)}
        return Update(_clipped(update, self.clip.clip(state), norm) | votes, update.metrics)


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
        sensitivity: how far one client can move the sum, rounding included.
        expected: the public number the sum is divided by: the sampling rate times the number of clients.
        adaptive: what moves the bound, where the stage at "clip" is an `AdaptiveClip`.
    """

    place: ClassVar[str] = "noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    mechanism: Mechanism
    source: NoiseSource
    noise_multiplier: float
    sensitivity: Sensitivity
    expected: float
    adaptive: QuantileClip | None = None

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The noised sum with public weights; a sum of nobody is noised like any other."""
        sums, changed = dict(total.sums), {}
        sensitivity, z = self.sensitivity, self.noise_multiplier
        if self.adaptive is not None:
            state = ClipState(float(public[CLIP_BOUND]))
            sensitivity = replace(sensitivity, bound=state.bound)
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
        return _public(noised, self.expected), changed


@dataclass(frozen=True)
class FactorisedNoise(Stage):
    """As `ServerNoise`, with noise that is correlated over the rounds and cancels in the model (DP-FTRL).

    Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", ICML 2021, for any
    factorisation. The noise of a round is a function of its number and the secret: a round that failed leaves
    its row out, and after a stop the rows are made again from their names.

    Attributes:
        noise: the rows; its `std` is the noise multiplier times the sensitivity, rounding included.
        source: where they come from.
        expected: the public number the sum is divided by.
    """

    place: ClassVar[str] = "noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    noise: CorrelatedNoise
    source: NoiseSource
    expected: float
    _memory: dict[str, NoiseState] = field(default_factory=dict, init=False, repr=False, compare=False)

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The noised sum with public weights; a sum of nobody is noised like any other.

        Raises:
            BudgetExceeded: the planned rounds are over.
        """
        del public
        state = self._memory.get("rows")
        if state is None or state.step > round:
            state = self._memory["rows"] = self.noise.init(total.sums)
        while state.step < round:
            self.noise.next(state, self.source)
        rows = self.noise.next(state, self.source)
        return _public({n: tensor + rows[n].double() for n, tensor in total.sums.items()}, self.expected), {}


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


def _norm(update: Update) -> float:
    """L2 norm of all terms together, in float64.

    Raises:
        ConfigError: a weight other than 1.
        DataError: the update is not finite.
    """
    for name, term in update.terms.items():
        if term.weight != 1:
            raise ConfigError(
                f"the term {name} has weight {term.weight}",
                rule="with a clip bound per client every client has weight 1",
                fix='set weighting = "uniform" in the algorithm',
                who="clip",
            )
    parts = [torch.linalg.vector_norm(_difference(t), dtype=torch.float64) for t in update.terms.values()]
    norm = math.hypot(*map(float, parts))
    if not math.isfinite(norm):
        raise DataError("the update holds NaN or infinity", fix="lower local.lr", who="clip")
    return norm


def _clipped(update: Update, clip: ClipFunction, norm: float) -> dict[str, Term]:
    """The terms times the clip factor, which is their weight wherever a weight can be that."""
    factor = float(clip(torch.tensor([norm], dtype=torch.float64)))
    if 0 < factor <= 1:
        return {name: replace(term, weight=factor) for name, term in update.terms.items()}
    # 0: left out by the clip function, the client counts and moves nothing; above 1: a short update grows
    return {name: Term(_difference(term).double() * factor, 1.0) for name, term in update.terms.items()}


def _public(sums: Mapping[str, Tensor], expected: float) -> Total:
    """The total as the merge sees it: nothing in it tells how many came."""
    return Total(dict(sums), dict.fromkeys(sums, expected), max(1, round(expected)))


def _digest(update: Update) -> str:
    """Hash of the numbers that are sent."""
    digest = blake2b(digest_size=16)
    for name, term in sorted(update.terms.items()):
        digest.update(f"{name} {term.weight!r}".encode())
        for tensor in (term.values, term.minus):
            if tensor is not None:
                digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
