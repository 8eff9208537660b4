"""The settings that simulate and serve share."""

import pytest

from mycelia.aggregator.config import FederationConfig, RoundConfig
from mycelia.engine.config import load_config
from mycelia.engine.errors import ConfigError

LEAST = {"model": "cnn", "data": "fashion-mnist"}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(FederationConfig, LEAST, overrides)
    return str(caught.value)


def test_the_defaults() -> None:
    config = load_config(FederationConfig, LEAST)
    assert (config.algorithm.name, config.selector.name) == ("fedavg", "uniform")
    assert (config.rounds, config.cohort, config.seed, config.plan) == (20, 10, 0, "default")
    assert (config.local.epochs, config.local.steps, config.local.batch_size, config.local.lr) == (
        1,
        0,
        10,
        0.1,
    )
    assert config.round == RoundConfig(
        budget_s=600, over_select=1, quorum=0.8, on_failure="drop", max_attempts=3, stragglers="discard"
    )
    assert config.evaluation.every == 1


def test_the_loss_follows_the_data_unless_given() -> None:
    config = load_config(FederationConfig, LEAST)
    assert (config.loss_for(10), config.loss_for(None)) == ("cross-entropy", "mse")
    assert load_config(FederationConfig, LEAST, ["loss=mae"]).loss_for(None) == "mae"


def test_model_and_data_are_needed() -> None:
    with pytest.raises(ConfigError, match="model: missing"):
        load_config(FederationConfig, {"data": "digits"})


@pytest.mark.parametrize("block", ["defence", "adversary"])
def test_a_block_that_is_not_built_is_refused_and_never_ignored(block: str) -> None:
    assert f"{block}: not available in this version" in refused(f"{block}.name=x")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("local.epochs=0", "local.steps: epochs and steps are both 0"),
        ("local.epochs=-1", "local.epochs = -1"),
        ("local.batch_size=0", "local.batch_size = 0"),
        ("local.lr=0", "local.lr = 0"),
        ("rounds=0", "rounds = 0"),
        ("cohort=0", "cohort = 0"),
        ("seed=-1", "seed = -1"),
        ("seed=9223372036854775808", "seed = 9223372036854775808"),
        ("plan=fast", "plan = 'fast': must be 'default', 'tune', 'eager', 'interpreter' or 'inductor'"),
        ("loss=", "loss = '': must not be empty"),
        ("model=", "model.name = '': must not be empty"),
        ("round.budget_s=19", "round.budget_s = 19"),
        ("round.quorum=0", "round.quorum = 0"),
        ("round.quorum=1.1", "round.quorum = 1.1"),
        ("round.over_select=0.9", "round.over_select = 0.9"),
        ("round.max_attempts=0", "round.max_attempts = 0"),
        ("round.on_failure=ignore", "must be 'drop', 'retry', 'replace' or 'abort'"),
        ("round.stragglers=buffered", "round.stragglers: 'buffered' is not available in this version"),
        ("round.qorum=1", "round.qorum: unknown key; did you mean 'quorum'?"),
        ("selector=unifrom", "selector: no selector is called 'unifrom'"),
        ("selector.power=2", "selector: power: unknown key"),
        ("selector=no_such_module:pick", "no_such_module"),
    ],
)
def test_bad_settings(override: str, says: str) -> None:
    assert says in refused(override)


def test_steps_replace_epochs() -> None:
    assert load_config(FederationConfig, LEAST, ["local.epochs=0", "local.steps=5"]).local.steps == 5


def test_poisson_rules_out_what_would_change_its_rate() -> None:
    settings = ["round.over_select=1.5", "round.on_failure=replace", "round.stragglers=next_round"]
    message = refused("selector=poisson", *settings)
    assert "round.stragglers: the selector poisson admits no other clients" in message
    assert "round.over_select: must be 1" in message
    assert "round.on_failure: the selector poisson draws no replacements" in message
