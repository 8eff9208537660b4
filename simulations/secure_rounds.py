"""Rounds whose updates are summed by the machines of the secure sum: what a `[secure_sum]` block comes to."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mycelia.aggregator.attempts import MAX_ATTEMPTS, Suspects
from mycelia.aggregator.config import SecureSumBlock
from mycelia.aggregator.rounds import asked_for, quorum_for
from mycelia.client.secagg import Task
from mycelia.engine import events
from mycelia.engine.algorithms import Algorithm, Message
from mycelia.engine.errors import ConfigError, MyceliaError, RoundAborted
from mycelia.engine.local import LocalWork
from mycelia.engine.program import Program
from mycelia.engine.rng import derive
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import TermSpec, Total
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import ORDER, Pipeline
from mycelia.privacy.secagg.canonical import PHASES
from mycelia.privacy.secagg.config import DeadlinesConfig, NoiseConfig, SecureSumConfig
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.events import Release
from mycelia.privacy.secagg.quantise import LARGEST
from mycelia.privacy.secagg.round_config import Mechanism, RoundConfig, Threat
from mycelia.privacy.secure_updates import Mask, NoiseShares, Quantise
from mycelia.simulations.backends.base import PackedShape
from mycelia.simulations.scenario import Scenario
from mycelia.simulations.secure_sum_journals import MemoryJournals
from mycelia.simulations.secure_sum_results import Fault, SecureSumAborted, SecureSumResult
from mycelia.simulations.secure_sum_setup import LATE, PARTIAL, Context, Inputs, Setup
from mycelia.simulations.secure_sums import run_attempts

__all__ = [
    "AFTERWARDS",
    "Packed",
    "SecurePlan",
    "SecureRounds",
    "SumFailed",
    "phase_of",
    "plan_secure_sum",
]

AFTERWARDS: Final[Mapping[int, str]] = {6: "agree", 7: "unmask"}
"""Stages of `Fates` behind the upload, as the protocol calls them."""

_BEFORE: Final[Mapping[int, str]] = {1: "advertise", 4: "advertise", 5: "share", 2: "masked", 3: PARTIAL}

_LEAST: Final = 3
"""The fewest updates of a secure sum."""

_BUDGET_S: Final = 600.0  # that the default deadlines are made for
_LONGEST_S: Final = 4e6  # of a phase
_NONE: Final = bytes(32)


def phase_of(stage: int, stays: bool, failed: bool) -> str:
    """Where the protocol sees a client vanish; "" for one that stays to the end.

    Args:
        stage: of `Fates`, or 4 for one whose answer comes too late.
        stays: whether its update was accepted.
        failed: whether it has no update to send.
    """
    if stays:
        return AFTERWARDS.get(stage, "")
    return _BEFORE.get(stage, "masked" if failed else LATE)


class Packed(NamedTuple):
    """What one client hands in: its packed vector [size], and its weight and slots as int64 [1 + slots]."""

    vector: npt.NDArray[Any]
    whole: npt.NDArray[np.int64]


class SumFailed(RoundAborted):
    """There is no sum; `event` says why, and what was tried."""

    def __init__(self, aborted: SecureSumAborted, event: events.SecureSum) -> None:
        super().__init__(aborted.found, rule=aborted.rule, fix=aborted.fix, who=aborted.who)
        self.event, self.reason = event, aborted.reason


@dataclass(frozen=True)
class SecurePlan:
    """The sum of every round, proven not to overflow.

    Attributes:
        settings: of the sum, all of them.
        quantise: packs updates.
        masks: whether there are masks.
        config: a round's configuration, but for what names the round.
        expected: the public number that a noised sum is divided by; None without noise.
        task_sha256: hash of the algorithm and its local work.
    """

    settings: SecureSumConfig
    quantise: Quantise
    masks: bool
    config: RoundConfig
    expected: float | None
    task_sha256: bytes

    @property
    def encoding(self) -> Encoding:
        """Of a round."""
        return Encoding(self.config, self.quantise.size)

    @property
    def shape(self) -> PackedShape:
        """What an update takes."""
        quantise = self.quantise
        return PackedShape(quantise.size, len(quantise.given), quantise.double)

    def pipeline(self, before: Pipeline) -> Pipeline:
        """The stages of a run, with those of the sum in their places."""
        own = [self.quantise, Mask(self.masks)]
        noise = [] if self.expected is None else [NoiseShares(self.expected)]
        stages = sorted([*before.stages, *own, *noise], key=lambda stage: ORDER.index(stage.place))
        return Pipeline(tuple(stages))

    def facts(self) -> dict[str, Any]:
        """What reports say of it."""
        config = self.config
        noise = None
        if config.noise.mechanism != Mechanism.NONE:
            noise = (
                f"{Mechanism(config.noise.mechanism).name.lower().replace('_', '-')}, shares of the clients"
            )
        return {
            "threat": Threat(config.threat).name.lower(),
            "neighbours": config.k,
            "threshold": config.t,
            "n_max": config.n_max,
            "bits": config.bits,
            "dimension": config.dimension,
            "frac_bits": config.frac_bits,
            "value_bound": config.value_bound,
            "weight_max": self.quantise.weight_max,
            "rotate": bool(config.rotation),
            "noise": noise,
        }


def plan_secure_sum(
    scenario: Scenario,
    algorithm: Algorithm,
    specs: Mapping[str, TermSpec],
    work: LocalWork,
    *,
    cohort: int,
    max_weight: float,
    largest: int,
    double: bool,
    clip: float | None = None,
    noise: NoiseConfig | None = None,
) -> SecurePlan | None:
    """The sum of every round; None without a `[secure_sum]` block.

    Args:
        scenario: the settings.
        algorithm: bound to the population.
        specs: terms of an update.
        work: local work, as the algorithm adjusted it.
        cohort: clients of a round.
        max_weight: the largest weight a client may have.
        largest: examples of the largest client.
        double: whether the parameters are float64.
        clip: the L2 bound of a noised update.
        noise: in the opened sum.

    Raises:
        ConfigError: an algorithm without a sum, or settings that contradict each other.
        SettingsRefused: the sum could overflow, or has too few neighbours.
    """
    block = scenario.secure_sum
    if block is None:
        return None
    _check_algorithm(algorithm)
    uniform = getattr(algorithm, "weighting", "") == "uniform"
    private = noise is not None
    alike = private or (uniform and not any(spec.own_weight for spec in specs.values()))
    weight_max = block.weight_max or (1 if alike else math.ceil(max_weight))
    most = work.step_count(largest) * (work.batch_size or largest)
    quantise = Quantise(dict(specs), weight_max, block.value_bound, most, private, double or private)
    settings = _settings(scenario, block, cohort, weight_max, clip, noise)
    if settings.value_bound > LARGEST:
        raise ConfigError(
            f"value_bound = {settings.value_bound}",
            rule=f"at most {LARGEST}: updates are floating-point numbers",
            who="secure_sum",
        )
    config = settings.round_config(
        job="plan", round=0, nonce=_NONE, model_sha256=_NONE, schema_sha256=_NONE, task_sha256=_NONE,
        roster_sha256=_NONE, size=quantise.size, clients=settings.n_max, slots=quantise.bounds,
    )  # fmt: skip
    named = [
        scenario.algorithm.model_dump(mode="json"),
        scenario.local.model_dump(mode="json"),
        scenario.loss,
    ]
    task = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
    expected = float(cohort) if private else None
    return SecurePlan(settings, quantise, block.masks, config, expected, task)


def _settings(
    scenario: Scenario,
    block: SecureSumBlock,
    cohort: int,
    weight_max: int,
    clip: float | None,
    noise: NoiseConfig | None,
) -> SecureSumConfig:
    """All settings, with those that other blocks decide."""
    if (quorum := quorum_for(cohort, scenario.round)) < _LEAST:
        raise ConfigError(
            f"a quorum of {quorum} in a cohort of {cohort}",
            rule=f"a sum of fewer than {_LEAST} hides nobody",
            fix="raise the cohort or round.quorum",
            who="secure_sum",
        )
    given = {name: getattr(block, name) for name in SecureSumConfig.model_fields}
    if given["deadlines"] is None:
        share, usual = scenario.round.budget_s / _BUDGET_S, DeadlinesConfig()
        seconds = {phase: min(_LONGEST_S, share * getattr(usual, phase)) for phase in PHASES}
        given["deadlines"] = DeadlinesConfig(**seconds)
    given |= {
        "n_min": quorum,
        "n_max": asked_for(cohort, scenario.round),
        "weight_max": weight_max,
        "noise": noise,
    }
    return SecureSumConfig(**given | ({} if clip is None else {"clip": clip}))


def _check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose server needs more than a sum."""
    if algorithm.pooled:
        rule, fix = "one client holds all data, and a sum of one hides nobody", "take [secure_sum] out"
    elif not algorithm.linear:
        rule, fix = (
            "its server needs each update by itself",
            "use a linear algorithm such as fedavg or fedadam",
        )
    else:
        return
    raise ConfigError(f"the algorithm {algorithm.name}", rule=rule, fix=fix, who="secure_sum")


class SecureRounds:
    """Makes the sums of a run.

    Args:
        plan: of every round.
        program: the model.
        seed: root seed; keys and rounding come from it, so that a run repeats, and hide nothing from whoever
            has it.
        noise: the secret of the clients' noise.
        charge: called before a sum is opened.
    """

    def __init__(
        self,
        plan: SecurePlan,
        program: Program,
        *,
        seed: int,
        noise: NoiseSource | None = None,
        charge: Callable[[Release], None] | None = None,
    ) -> None:
        self.plan, self._program, self._seed = plan, program, seed
        self._noise, self._charge = noise, charge
        self._suspects = Suspects()

    def failed(self, number: int, asked: Mapping[int, str], reason: str) -> events.SecureSum:
        """What is said of a round that ended before its sum began; arguments as those of `sum`."""
        return self._event(number, asked, failed=reason)

    def sum(
        self,
        number: int,
        message: Message,
        asked: Mapping[int, str],
        packed: Mapping[int, Packed],
    ) -> tuple[Total, tuple[int, ...], events.SecureSum]:
        """The sum of a round.

        Args:
            number: of the round, 0-based.
            message: what clients received.
            asked: everybody asked, and where each vanishes; "" for those who stay to the end.
            packed: what those hand in who come so far.

        Returns:
            The total of the packed updates, the survivors, and what is said of it.

        Raises:
            SumFailed: no sum was opened.
        """
        plan, clients = self.plan, sorted(asked)
        table = np.zeros((len(clients), plan.shape.size), np.float64 if plan.shape.double else np.float32)
        whole = np.zeros((len(clients), 1 + plan.shape.slots), np.int64)
        for place, client in enumerate(clients):
            if client in packed:
                table[place], whole[place] = packed[client]
        weights = [max(1, int(weight)) for weight in whole[:, 0]]  # of those who hand in nothing: unread
        slots = {name: whole[:, column].tolist() for column, name in enumerate(plan.quantise.given, start=1)}
        task = Task(
            bytes.fromhex(model_sha256(_tensors(message))),
            bytes.fromhex(self._program.schema.sha256),
            plan.task_sha256,
            plan.shape.size,
        )
        setup = Setup.of(
            Inputs(
                tuple(client + 1 for client in clients), table, tuple(weights), plan.quantise.bounds, slots
            ),
            plan.settings,
            drops={client + 1: phase for client, phase in asked.items() if phase},
            seed=derive(self._seed, "secure sum", round=number),
            context=Context(round=number, task=task, noise=self._noise, charge=self._charge),
        )
        try:
            found = run_attempts(
                setup, MemoryJournals(), MAX_ATTEMPTS, masks=plan.masks, suspects=self._suspects
            )
        except SecureSumAborted as aborted:
            raise SumFailed(
                aborted,
                self._event(
                    number,
                    asked,
                    failed=str(aborted.reason),
                    attempts=aborted.attempts,
                    faults=_reasons(aborted.faults),
                ),
            ) from aborted
        if not found.exact:  # pragma: no cover - the machines refuse before
            raise MyceliaError("the opened sum is not that of the survivors", who=f"round {number}")
        total = plan.quantise.opened(found.values, found.weight, found.slots, len(found.survivors))
        survivors = tuple(client - 1 for client in found.survivors)
        return total, survivors, self._opened(number, asked, found, total)

    def _opened(
        self, number: int, asked: Mapping[int, str], found: SecureSumResult, total: Total
    ) -> events.SecureSum:
        return self._event(
            number, asked,
            attempts=found.attempts,
            survivors=len(found.survivors),
            faults=_reasons(found.faults),
            phase_ms=dict(found.phase_ms),
            bytes_up=found.bytes_up,
            bytes_down=found.bytes_down,
            upload_bytes=found.upload_bytes,
            share_bytes=found.share_bytes,
            transcript_sha256=found.transcript_sha256,
            clipped=self.plan.quantise.report(total).get("clipped"),
        )  # fmt: skip

    def _event(self, number: int, asked: Mapping[int, str], **more: Any) -> events.SecureSum:
        plan = self.plan
        order = {phase: place for place, phase in enumerate(PHASES)}
        gone = [phase.partition(":")[0] for phase in asked.values() if phase]
        return events.SecureSum(
            round=number + 1, masked=plan.masks, asked=len(asked), n_min=plan.config.n_min,
            dropped=dict(Counter(sorted(gone, key=order.__getitem__))), settings=plan.facts(), **more,
        )  # fmt: skip


def _reasons(faults: Sequence[Fault]) -> dict[str, int]:
    """How many of each reason."""
    return dict(Counter(str(fault.reason) for fault in faults))


def _tensors(message: Message) -> dict[str, Any]:
    """All that a client receives, by name."""
    tensors = {"vector": message.vector}
    tensors |= {f"buffer/{name}": tensor for name, tensor in message.buffers.items()}
    return tensors | {f"extra/{name}": tensor for name, tensor in message.extra.items()}
