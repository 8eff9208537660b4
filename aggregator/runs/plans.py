"""What a run comes to before its first device: model, algorithm, sums, noise, and what tasks say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from mycelia.aggregator import selectors
from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.noise_shares import SharePlan
from mycelia.aggregator.private_plans import ServerPlan, plan_privacy
from mycelia.aggregator.rounds import most_updates
from mycelia.aggregator.secure_plans import SecurePlan, plan_secure_sum
from mycelia.aggregator.selectors import Selector
from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.aggregator.wire.updates_form import UpdateEntries, term_specs, update_entries
from mycelia.engine.algorithms import Algorithm, ServerState
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalWork
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from mycelia.engine.schema import Entry, Role
from mycelia.engine.sums import SumFormat, TermSpec
from mycelia.engine.types import Tensors
from mycelia.privacy.client_plans import ClientPlan
from mycelia.privacy.secagg.config import NoiseConfig

__all__ = ["Population", "RunPlan", "plan_run"]


@dataclass(frozen=True)
class Population:
    """What is known of the devices before they come.

    Attributes:
        clients: how many there are.
        max_examples: the most examples that one of them may have.
        examples: of all of them together, which is public; 0: unknown.
    """

    clients: int
    max_examples: int
    examples: int = 0


@dataclass(frozen=True)
class RunPlan:
    """A run, checked.

    Attributes:
        name: of the run.
        purpose: what devices' policies know it by.
        config: the settings.
        population: what is known of the devices.
        program: the model and its loss.
        algorithm: bound to the population.
        work: what a device does, as the algorithm adjusted it.
        selector: draws the cohorts.
        max_weight: the largest weight of a device.
        form: of the exact sum.
        privacy: what the `[privacy]` block comes to.
        secure: what the `[secure_sum]` block comes to.
        settings: what tasks say.
        entries: the tensors of an update that no secure sum packs.
        test: examples of the server's own; None: it has none.
        classes: of the targets; None: regression.
    """

    name: str
    purpose: str
    config: FederationConfig
    population: Population
    program: Program
    algorithm: Algorithm
    work: LocalWork
    selector: Selector
    max_weight: float
    form: SumFormat
    privacy: ServerPlan | ClientPlan | SharePlan | None
    secure: SecurePlan | None
    settings: TaskSettings
    entries: UpdateEntries
    test: Examples | None
    classes: int | None

    @cached_property
    def task_settings(self) -> bytes:
        """The bytes of the settings in a task."""
        return self.settings.encode()

    @cached_property
    def model_schema(self) -> tuple[Entry, ...]:
        """The tensors of the payload MODEL."""
        return self.program.schema.of(Role.PARAMETER, Role.BUFFER, Role.COUNTER)

    def message(self, state: ServerState, public: Tensors) -> dict[str, torch.Tensor]:
        """What devices get beside the model, by name."""
        return {**self.algorithm.message_extra(state), **public}

    @property
    def most_steps(self) -> int:
        """The most local steps of a device in a round."""
        return self.work.step_count(self.population.max_examples)

    @property
    def most_examples(self) -> int:
        """The most examples that a device trains on in a round, repetitions included."""
        if isinstance(self.privacy, ClientPlan) and self.privacy.config.unit == "example":
            return self.most_steps * self.population.max_examples  # a draw may, however unlikely, take all
        return self.most_steps * (self.work.batch_size or self.population.max_examples)


def plan_run(
    config: FederationConfig,
    recipe: Recipe,
    *,
    name: str,
    purpose: str,
    population: Population,
    test: Examples | None = None,
) -> RunPlan:
    """Check the settings of a run, and work out what follows from them.

    Args:
        config: the settings.
        recipe: of the model, from the server's own data or from the shape of an example.
        name: of the run.
        purpose: what devices' policies know it by.
        population: what is known of the devices.
        test: examples that the server measures models on.

    Raises:
        ConfigError: settings that contradict each other, or that a deployment does not have.
        SettingsRefused: a secure sum that could overflow, or has too few neighbours.
    """
    _check_deployed(config, population)
    with user_code(f"algorithm {config.algorithm.name}"):
        algorithm = build_algorithm(config.algorithm.name, **config.algorithm.options)
        algorithm = algorithm.bind(population=population.clients)
    if algorithm.pooled:
        raise ConfigError(
            f"the algorithm {algorithm.name}",
            rule="devices keep their examples to themselves",
            fix="use fedavg, or `mycelia train` where the data is in one place",
            who="algorithm",
        )
    local = config.local
    work = algorithm.work(LocalWork(local.epochs, local.steps, local.batch_size, local.lr))
    with user_code(f"model {config.model.name}"):
        program = recipe()
    max_weight = _max_weight(config, population)
    double = program.flatten(program.init()[0]).dtype == torch.float64
    secure_sum = partial(
        plan_secure_sum, config, algorithm, cohort=config.cohort, max_weight=max_weight,
        largest=population.max_examples, double=double,
    )  # fmt: skip
    bare = _settings(config, recipe.loss, population, max_weight)

    def specs() -> dict[str, TermSpec]:
        with user_code(f"algorithm {config.algorithm.name}"):
            return term_specs(program, algorithm, bare)

    def noised(clip: float, noise: NoiseConfig) -> SecurePlan | None:
        unclipped = bare.model_copy(update={"privacy": None})
        return secure_sum(term_specs(program, algorithm, unclipped), work, clip=clip, noise=noise)

    privacy = plan_privacy(
        config, algorithm, program, work, cohort=config.cohort, clients=population.clients,
        examples=population.examples, make=noised,
    )  # fmt: skip
    if isinstance(privacy, ClientPlan):
        work = privacy.work(work)
    secure = privacy.secure if isinstance(privacy, SharePlan) else secure_sum(specs(), work)
    settings = bare if secure is None else bare.model_copy(update={"packing": secure.packing})
    selector = selectors.build(config.selector.name, **config.selector.options)
    return RunPlan(
        name=name,
        purpose=purpose,
        config=config,
        population=population,
        program=program,
        algorithm=algorithm,
        work=work,
        selector=selector,
        max_weight=max_weight,
        form=SumFormat.plan(
            specs(),
            max_weight,
            most_updates(config.cohort, population.clients, config.round, selector.fixed_size),
        ),
        privacy=privacy,
        secure=secure,
        settings=settings,
        entries=update_entries(program, algorithm, settings),
        test=test,
        classes=recipe.classes,
    )


def _settings(config: FederationConfig, loss: str, population: Population, max_weight: float) -> TaskSettings:
    return TaskSettings(
        algorithm=config.algorithm,
        loss=loss,
        local=config.local,
        update=config.update,
        max_weight=max_weight,
        seed=config.seed,
        rounds=config.rounds,
        cohort=config.cohort,
        population=population.clients,
        examples=population.examples,
        privacy=config.privacy,
    )


def _max_weight(config: FederationConfig, population: Population) -> float:
    if config.privacy is not None:
        return config.privacy.weight_max or 1.0
    return config.update.max_weight or float(population.max_examples)


def _check_deployed(config: FederationConfig, population: Population) -> None:
    """Refuse what only a simulation has."""
    if not 0 < config.cohort <= population.clients:
        raise ConfigError(
            f"a cohort of {config.cohort} of {population.clients} devices",
            rule="there are as many devices as a round asks",
            fix="enrol more devices, or lower cohort",
            who="cohort",
        )
    if config.round.stragglers != "discard":
        raise ConfigError(
            f"round.stragglers = {config.round.stragglers!r}",
            rule="a deployed round takes the updates of its own round alone",
            fix="leave it out",
            who="round.stragglers",
        )
    if config.selector.name == "weighted" and not config.selector.options.get("weights"):
        raise ConfigError(
            "a draw by size",
            rule="a server does not know how many examples devices have",
            fix="give selector.weights, or use uniform",
            who="selector",
        )
    if config.secure_sum is not None and not config.secure_sum.masks:
        raise ConfigError(
            "secure_sum.masks = false",
            rule="a secure sum between machines has masks",
            fix="take [secure_sum] out, or leave masks out",
            who="secure_sum",
        )
    if population.max_examples < 1 or not math.isfinite(population.max_examples):
        raise ConfigError(
            f"max_examples is {population.max_examples}", rule="at least 1", who="run.max_examples"
        )
