"""Reading, overriding, checking and writing configuration."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from mycelia.engine.config import Named, Strict, load_config, nearest, to_toml
from mycelia.engine.errors import ConfigError


class Local(Strict):
    epochs: Annotated[int, Field(ge=0)] = 1
    steps: Annotated[int, Field(ge=0)] = 0
    lr: Annotated[float, Field(gt=0)] = 0.1

    def conflicts(self) -> Iterable[tuple[str, str]]:
        if self.epochs == 0 and self.steps == 0:
            yield "steps", "no work"
            yield "epochs", "no work"


class Settings(Strict):
    unavailable = frozenset({"privacy"})

    model: Annotated[str, Field(min_length=1)] = "cnn"
    rounds: Annotated[int, Field(ge=1)] = 20
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    note: str | None = None
    algorithm: Named = Named(name="fedavg")
    local: Local = Local()


def refused(data: dict, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Settings, data, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_tables_and_named_tables() -> None:
    settings = load_config(
        Settings, {"algorithm": {"name": "fedprox", "mu": 0.1}, "local": {"lr": 1}, "sizes": [3]}
    )
    assert settings.algorithm.name == "fedprox"
    assert settings.algorithm.options == {"mu": 0.1}
    assert settings.local == Local(lr=1.0)
    assert settings.sizes == (3,)
    assert load_config(Settings, {"algorithm": "scaffold"}).algorithm == Named(name="scaffold")


def test_a_file_and_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "mlp"\n[local]\nlr = 0.5\n')
    settings = load_config(
        Settings,
        file,
        ["local.steps=5", "rounds = 3", "model=lenet", "model=resnet8", "flag=true", "sizes=[7]"],
    )
    assert settings.local == Local(lr=0.5, steps=5)
    assert (settings.rounds, settings.model, settings.flag, settings.sizes) == (3, "resnet8", True, (7,))


def test_an_override_of_one_option_keeps_the_name() -> None:
    assert load_config(Settings, {}, ["algorithm.mu=0.1"]).algorithm == Named(name="fedavg", mu=0.1)
    given_by_name = load_config(Settings, {"algorithm": "fedprox"}, ["algorithm.mu=0.1"])
    assert given_by_name.algorithm == Named(name="fedprox", mu=0.1)
    replaced = load_config(Settings, {"algorithm": {"name": "fedprox", "mu": 1.0}}, ["algorithm=fedavg"])
    assert replaced.algorithm == Named(name="fedavg")


def test_an_override_is_a_toml_value_or_a_bare_string() -> None:
    for text, value in [
        ("fedprox", "fedprox"),
        ('"a b"', "a b"),
        ("csv:/data/my file.csv", "csv:/data/my file.csv"),
        ("2024-01-01", "2024-01-01"),
        ("a=b", "a=b"),
        ("1\nrounds = 7", "1\nrounds = 7"),
    ]:
        settings = load_config(Settings, {}, [f"note={text}"])
        assert (settings.note, settings.rounds) == (value, 20)


def test_the_source_is_not_changed() -> None:
    source = {"local": {"lr": 0.5}}
    load_config(Settings, source, ["local.lr=1"])
    assert source == {"local": {"lr": 0.5}}


def test_a_model_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().rounds = 3  # type: ignore[misc]


def test_every_wrong_setting_is_reported_at_once() -> None:
    message = refused(
        {"modle": "cnn", "rounds": 0, "privacy": {}, "local": {"epoch": 1, "lr": -1.0}, "model": ""}
    )
    assert "6 settings are wrong" in message
    assert "modle: unknown key; did you mean 'model'?" in message
    assert "rounds = 0: must be greater than or equal to 1" in message
    assert "privacy: not available in this version" in message
    assert "local.epoch: unknown key; did you mean 'epochs'? Valid: epochs, lr, steps" in message
    assert "local.lr = -1.0: must be greater than 0" in message
    assert "model = '': must not be empty" in message


def test_contradictions_are_all_reported_under_their_table() -> None:
    message = refused({"local": {"epochs": 0}})
    assert "local.steps: no work" in message
    assert "local.epochs: no work" in message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"rounds": "3"}, "rounds = '3': must be a valid integer"),
        ({"rounds": True}, "rounds = True: must be a valid integer"),
        ({"rounds": 2.0}, "rounds = 2.0: must be a valid integer"),
        ({"flag": 1}, "flag = 1: must be a valid boolean"),
        ({"local": {"lr": float("inf")}}, "local.lr = inf: must be a finite number"),
        ({"local": {"lr": float("nan")}}, "local.lr = nan: must be"),
        ({"local": 3}, "local = 3: must be a table"),
        ({"algorithm": ""}, "algorithm.name = '': must not be empty"),
        ({"algorithm": " fedavg"}, "algorithm.name = ' fedavg': must be a name, without spaces at its ends"),
        ({"algorithm": {"mu": 1}}, "algorithm.name: missing"),
        ({"algorithm": 3}, "algorithm = 3: must be a table"),
        ({"sizes": [1, "x"]}, "sizes.1 = 'x': must be a valid integer"),
        ({"model": "x" * 500 + " "}, None),
    ],
)
def test_a_wrong_value_names_key_value_and_rule(data: dict, says: str | None) -> None:
    if says is None:
        assert load_config(Settings, data).model == data["model"]
    else:
        assert says in refused(data)


def test_a_long_value_is_cut() -> None:
    assert len(refused({"rounds": "x" * 10_000})) < 250


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rounds", "'rounds' is no override"),
        ("=3", "'=3' is no override"),
        ("local..lr=3", "is no override"),
        ("rounds.x=1", "rounds = {'x': 1}"),
        ("loca.lr=1", "loca: unknown key; did you mean 'local'?"),
        ("local.lr=", "local.lr = '': must be a valid number"),
        ("model=", "model = '': must not be empty"),
    ],
)
def test_a_wrong_override(override: str, says: str) -> None:
    assert says in refused({}, override)


def test_a_key_below_a_setting_that_is_no_table() -> None:
    assert "'model.x=1': model is 'cnn'" in refused({"model": "cnn"}, "model.x=1")


def test_files_that_are_not_there_or_not_toml(tmp_path: Path) -> None:
    missing, broken, binary = tmp_path / "no.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("rounds = \n")
    binary.write_bytes(b"\xff\xfe")
    for file, says in [
        (missing, "no such file"),
        (broken, "line 1"),
        (binary, "not valid TOML"),
        (tmp_path, "read"),
    ]:
        with pytest.raises(ConfigError, match=says) as caught:
            load_config(Settings, file)
        assert caught.value.who == str(file)


def test_toml_of_the_defaults() -> None:
    expected = {
        "model": "cnn",
        "rounds": 20,
        "flag": False,
        "sizes": [1, 2],
        "algorithm": "fedavg",
        "local": {"epochs": 1, "steps": 0, "lr": 0.1},
    }
    assert tomllib.loads(to_toml(Settings())) == expected
    assert tomllib.loads(to_toml(Named(name="x"))) == {"name": "x"}


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), _TEXT)


@given(
    note=st.none() | _TEXT,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    options=st.dictionaries(
        _TEXT.filter(lambda key: key != "name"),
        _SCALARS | st.lists(_SCALARS, max_size=3) | st.dictionaries(_TEXT, _SCALARS, max_size=2),
        max_size=3,
    ),
)
def test_toml_comes_back_equal(note: str | None, lr: float, options: dict) -> None:
    data = {"algorithm": {"name": "fedprox", **options}, "local": {"lr": lr}}
    settings = load_config(Settings, data if note is None else data | {"note": note})
    assert load_config(Settings, tomllib.loads(to_toml(settings))) == settings


def test_what_has_no_toml_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no TOML form"):
        to_toml(Named(name="x", thing=object()))


def test_nearest_without_anything_to_choose_from() -> None:
    assert nearest("x", []) == "there are none"
    assert nearest("zzz", ["b", "a"]) == "Valid: a, b"
