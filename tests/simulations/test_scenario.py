"""Scenarios: the built-in ones, files, overrides, and what is refused before anything runs."""

from pathlib import Path

import numpy as np
import pytest

from mycelia.engine.config import load_config, to_toml
from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.simulations.scenario import Scenario, load_scenario, scenario_names

EXAMPLES = Examples(
    np.random.default_rng(0).random((600, 2)),
    np.arange(600) % 10,
    np.random.default_rng(1).integers(0, 30, 600),
)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_scenario("fashion", overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_built_in_scenarios() -> None:
    assert scenario_names() == ["demo", "dp", "dp-ftrl", "fashion", "personalised", "quickstart", "secure"]
    for name in scenario_names():
        scenario = load_scenario(name)
        assert scenario.conflicts() is not None


def test_fashion_is_the_defaults() -> None:
    assert load_scenario("fashion") == load_config(Scenario, {"model": "cnn", "data": "fashion-mnist"})


def test_quickstart_is_what_it_says() -> None:
    quickstart = load_scenario("quickstart")
    assert (quickstart.data.name, quickstart.model.name, quickstart.algorithm.name) == (
        "digits",
        "mlp",
        "fedavg",
    )
    assert quickstart.population.clients == 100
    assert (quickstart.partition.name, quickstart.partition.options) == ("dirichlet", {"alpha": 0.3})
    assert load_scenario("personalised").algorithm.name == "fedbn"


@pytest.mark.parametrize("name", ["dp", "dp-ftrl", "fashion", "personalised", "quickstart", "secure"])
def test_the_configuration_printed_is_the_configuration_read(name: str, tmp_path: Path) -> None:
    dropout = "behaviour.dropout=0.1" if name == "secure" else "behaviour.dropout.train=0.1"
    scenario = load_scenario(name, [dropout, "behaviour.availability.night=0.5", "seed=9"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(scenario))
    assert load_scenario(str(file)) == scenario


def test_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "mlp"\ndata = "digits"\nbehaviour = { dropout = 0.2 }\n')
    scenario = load_scenario(str(file), ["partition=dirichlet", "partition.alpha=0.1", "backend=inline"])
    assert scenario.behaviour.dropout.share == 0.2
    assert scenario.partition.options == {"alpha": 0.1}
    assert scenario.backend.name == "inline"


def test_what_a_partition_keeps_for_testing_is_no_option_of_the_partitioner() -> None:
    scenario = load_scenario("fashion", ["partition.test_fraction=0.25"])
    assert scenario.partition.options == {}
    made = scenario.populate(EXAMPLES).partition
    assert [len(made.test_indices(c)) for c in range(100)] == [1] * 100


def test_no_such_scenario_or_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion'"):
        load_scenario("fasion")
    with pytest.raises(ConfigError, match="no such file"):
        load_scenario(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cohort=101"], "cohort: 101 clients a round, but population.clients is 100"),
        (["population.clients=0"], "population.clients: 0 means all clients of a natural partition"),
        (["population.clients=-1"], "population.clients = -1"),
        (["population.overlap=true"], "population.examples_per_client: 0 would give every client all"),
        (
            ["population.overlap=true", "population.examples_per_client=5", "partition=shards"],
            "population.overlap: only iid and dirichlet",
        ),
        (
            ["partition=quantity", "population.examples_per_client=5"],
            "a quantity partition decides the sizes",
        ),
        (["partition=dirichelt"], "partition: no partitioner is called 'dirichelt'"),
        (["partition.alpha=1"], "partition: alpha: unknown key"),
        (["partition=dirichlet", "partition.alpha=-1"], "partition: alpha = -1"),
        (
            ["partition=dirichlet", "partition.min_size=9", "population.examples_per_client=5"],
            "partition.min_size",
        ),
        (["partition.test_fraction=1"], "partition.test_fraction = 1"),
        (["backend=ray"], "backend.name: 'ray' is not available in this version"),
        (["backend=wokers"], "backend.name = 'wokers': must be 'inline', 'workers'"),
        (["backend.workers=-1"], "backend.workers = -1"),
        (["backend.name=inline", "backend.workers=2"], "backend.workers: the inline backend has none"),
        (["backend.threads=2"], "backend.threads: unknown key; Valid: name, workers"),
        (["behaviour.dropout=2"], "behaviour.dropout.share = 2"),
        (["behaviour.stragglers=0.1"], "behaviour.stragglers: needs speed.steps_per_s"),
        (["privacy.epsilon=8"], "privacy.delta: missing"),
        (["populaton.clients=5"], "populaton: unknown key; did you mean 'population'?"),
        (["selector=poisson", "round.over_select=1.2"], "round.over_select: must be 1"),
    ],
)
def test_bad_settings(overrides: list[str], says: str) -> None:
    assert says in refused(*overrides)


def test_contradictions_in_several_places_come_together() -> None:
    message = refused("cohort=101", "selector=unifrom", "partition=idd")
    assert "3 settings are wrong" in message


def test_populating_draws_by_the_scenario() -> None:
    scenario = load_scenario("fashion", ["partition=natural", "population.clients=0", "seed=3"])
    people = scenario.populate(EXAMPLES)
    assert len(people) == 30
    assert people.seed == 3
    with pytest.raises(ConfigError, match="40 clients a round of 30 in the data"):
        load_scenario("fashion", ["partition=natural", "population.clients=0", "cohort=40"]).populate(
            EXAMPLES
        )


def test_more_clients_than_data() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        load_scenario("fashion", ["population.clients=601"]).populate(EXAMPLES)
    overlapping = [
        "population.clients=1000000",
        "population.examples_per_client=5",
        "population.overlap=true",
    ]
    assert len(load_scenario("fashion", overlapping).populate(EXAMPLES)) == 10**6


def test_an_empty_client_is_named() -> None:
    lonely = Examples(np.zeros((4, 1)), np.zeros(4, dtype=np.int64))
    with pytest.raises((ConfigError, DataError), match="4"):
        load_scenario("fashion", ["population.clients=5", "cohort=2"]).populate(lonely)
