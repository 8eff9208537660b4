"""The recipes of docs/ spend what they say; nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from mycelia.engine.config import load_config
from mycelia.engine.models import build
from mycelia.engine.training import steps_per_epoch
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.central import PrivatePlan, plan_training
from mycelia.privacy.central_config import PrivateTrainConfig
from mycelia.privacy.sampling import Poisson

RECIPES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("*.toml"))
EXAMPLES = {"fashion-mnist": 60_000, "digits": 1_438}  # Xiao et al. 2017; four fifths of 1,797
SHAPES = {"fashion-mnist": (1, 28, 28), "digits": (1, 8, 8)}
DELTAS = {"fashion-mnist": 1e-5, "digits": 1e-4}


def planned(recipe: Path) -> tuple[PrivateTrainConfig, PrivatePlan, float, int]:
    """The configuration, its plan, the sampling rate and the number of steps."""
    config = load_config(PrivateTrainConfig, recipe)
    assert config.privacy is not None
    examples = EXAMPLES[config.data.name]
    steps = config.steps or config.epochs * steps_per_epoch(examples, config.batch_size)
    plan = plan_training(config.privacy, batch_size=config.batch_size, examples=examples, steps=steps)
    return config, plan, config.batch_size / examples, steps


def test_every_data_set_has_its_recipe() -> None:
    assert {load_config(PrivateTrainConfig, recipe).data.name for recipe in RECIPES} == set(EXAMPLES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_stays_within_three(recipe: Path) -> None:
    config, plan, rate, steps = planned(recipe)
    assert config.privacy is not None
    assert config.privacy.delta == DELTAS[config.data.name]
    assert config.privacy.noise_source == "os"
    found = epsilon(Poisson(rate), plan.noise_multiplier, steps, config.privacy.delta)
    assert found.epsilon <= 3
    assert plan.epsilon == pytest.approx(found.epsilon, rel=1e-12)
    assert (found.accountant, found.sampling, found.relation) == ("pld", "poisson", "add-remove")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_another_accountant_says_the_same(recipe: Path) -> None:
    config, plan, rate, steps = planned(recipe)
    assert config.privacy is not None
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(plan.noise_multiplier))
    theirs = PLDAccountant().compose(event, steps).get_epsilon(config.privacy.delta)
    assert plan.epsilon == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_model_of_a_recipe_takes_its_data(recipe: Path) -> None:
    config = load_config(PrivateTrainConfig, recipe)
    build(config.model.name, SHAPES[config.data.name], 10, **config.model.options)
