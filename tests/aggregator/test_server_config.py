"""server.toml: what it takes, what it refuses, and several runs on one server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycelia.aggregator.limits import Limits
from mycelia.aggregator.server_config import ServerConfig, check_together, load_server_config, run_settings
from mycelia.engine.config import to_toml
from mycelia.engine.errors import ConfigError

SPECIFIED = """
server     = { listen = "0.0.0.0:8443", enrol_listen = "0.0.0.0:8444", keys = "server-keys/", roster = "roster.bin", operator = "ca/" }
store      = { url = "sqlite:///mycelia.db", blobs = "blobs/" }
run        = { name = "study-12", purpose = "study-12", max_failed_rounds = 3 }
algorithm  = "fedavg"
model      = "ward.models:unet"
example    = { inputs = [1, 28, 28], classes = 10 }
rounds     = 200
cohort     = 40
round      = { budget_s = 600, over_select = 1.25, quorum = 0.8, max_attempts = 3 }
secure_sum = { threat = "active", corrupt = 0.1, dropout = 0.2 }
status     = { listen = "127.0.0.1:8445" }
"""  # noqa: E501
LEAST = """
model = "mlp"
data = "digits"
server = { keys = "server-keys/", roster = "roster.bin" }
run = { name = "a", purpose = "tests" }
"""


def load(folder: Path, text: str, *overrides: str, name: str = "server.toml") -> ServerConfig:
    path = folder / name
    path.write_text(text)
    return load_server_config(path, overrides)


def test_the_specified_file(tmp_path: Path) -> None:
    config = load(tmp_path, SPECIFIED)
    assert config.server.keys == str(tmp_path / "server-keys")
    assert config.server.operator == str(tmp_path / "ca")
    assert config.store.url == f"sqlite:///{tmp_path}/mycelia.db"
    assert (config.store.blobs, config.run.out) == (str(tmp_path / "blobs"), str(tmp_path / "runs/study-12"))
    assert config.status is not None
    assert config.status.listen == "127.0.0.1:8445"
    assert config.max_weight == 100_000
    assert (config.classes, config.loss_for(config.classes)) == (10, "cross-entropy")
    assert config.example is not None
    inputs, targets = config.example.batch(3)
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == ((3, 1, 28, 28), "f4", (3,), "i8")
    assert load(tmp_path, to_toml(config), name="again.toml") == config


def test_the_least_file(tmp_path: Path) -> None:
    config = load(tmp_path, LEAST)
    assert (config.server.listen, config.server.enrol_listen, config.status) == ("0.0.0.0:8443", None, None)
    assert config.store.url == f"sqlite:///{tmp_path}/mycelia.db"
    assert (config.round.over_select, config.round.max_failed_rounds) == (1.25, 3)
    assert config.limits.limits() == Limits()
    assert (config.payload.max, config.payload.spool_max) == (2**34, 0)
    assert load(tmp_path, to_toml(config), name="again.toml") == config


def test_paths(tmp_path: Path) -> None:
    """Relative to the file; absolute ones, databases elsewhere and rows stay."""
    config = load(
        tmp_path, LEAST, "store.url=sqlite:////srv/a.db", "store.blobs=/srv/blobs", "run.out=/srv/out"
    )
    assert (config.store.url, config.store.blobs) == ("sqlite:////srv/a.db", "/srv/blobs")
    assert config.run.out == "/srv/out"
    shared = load(tmp_path, LEAST, "store.url=postgresql://fl@db/mycelia", "store.blobs=rows")
    assert (shared.store.url, shared.store.blobs) == ("postgresql://fl@db/mycelia", "rows")
    own = load(tmp_path, LEAST, "data=npz:ward7.npz")
    assert own.data is not None
    assert own.data.name == f"npz:{tmp_path}/ward7.npz"
    (tmp_path / "other").mkdir()
    other = load(tmp_path / "other", LEAST, "data=npz:ward7.npz")
    mine, others = run_settings(own), run_settings(other)
    assert mine == others  # servers of one run keep their data where they like
    assert run_settings(load(tmp_path, LEAST)) != mine


def test_failed_rounds(tmp_path: Path) -> None:
    for override in ("run.max_failed_rounds=5", "round.max_failed_rounds=5"):
        config = load(tmp_path, LEAST, override)
        assert config.run.max_failed_rounds == config.round.max_failed_rounds == 5
    with pytest.raises(ConfigError, match=r"contradicts round\.max_failed_rounds"):
        load(tmp_path, LEAST, "run.max_failed_rounds=5", "round.max_failed_rounds=4")


def test_the_largest_weight(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST, "run.max_examples=50").max_weight == 50
    assert load(tmp_path, LEAST, "update.max_weight=7.5").max_weight == 7.5
    private = (
        'privacy = { unit = "client", epsilon = 8.0, delta = 1e-5, clip = { name = "abadi", bound = 1.0 } }'
    )
    assert load(tmp_path, f"{LEAST}\n{private}", "round.over_select=1").max_weight == 1


PRIVATE = (
    'privacy = { unit = "example", epsilon = 8.0, delta = 1e-5, clip = { name = "abadi", bound = 1.0 } }\n'
    'algorithm = { name = "fedavg", weighting = "uniform" }'
)


def test_example_level_privacy_knows_how_many_examples_there_are(tmp_path: Path) -> None:
    for more in ([], ["privacy.sampling_rate=0.01"]):
        with pytest.raises(ConfigError, match=r"run\.examples: missing"):
            load(tmp_path, f"{LEAST}\n{PRIVATE}", *more)
    assert load(tmp_path, f"{LEAST}\n{PRIVATE}", "run.examples=1000").run.examples == 1000


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("server.listn=a:1", "did you mean 'listen'"),
        ("server.insecure=true", "unknown key"),
        ("server.listen=8443", "server.listen"),
        ("server.listen=localhost", "host:port"),
        ("server.enrol_listen=0.0.0.0:8444", "name it: operator"),
        ("server.keys=", "server.keys"),
        ("store.url=mysql://db", "sqlite:///FILE"),
        ("store.url=sqlite:///:memory:", "has to outlive"),
        ("store.url=sqlite://", "has to outlive"),
        ("store.url=postgresql://fl:secret@db/mycelia", "holds a password"),
        ("store.blobs=rows", "with SQLite name a folder"),
        ("run.name=", "run.name"),
        ("run.name=../elsewhere", "letters, digits"),
        ("run.purpose=", "run.purpose"),
        ("run.max_failed_rounds=0", "run.max_failed_rounds"),
        ("run.max_examples=0", "run.max_examples"),
        ("run.population=3", "a cohort of 10"),
        ("round.budget_s=19", "round.budget_s"),
        ("round.over_select=0.5", "round.over_select"),
        ("limits.streams=0", "limits.streams"),
        ("limits.stream=5", "did you mean 'streams'"),
        ("payload.max=1", "payload.max"),
        ("status.listen=0.0.0.0:8445", "token_file"),
        ("secure_sum.threat=none", "secure_sum.threat"),
        ("secure_sum.tread=active", "did you mean 'threat'"),
        ("example.inputs=[8]", "leave one of them out"),
        ("cohorts=5", "did you mean 'cohort'"),
    ],
)
def test_wrong_settings(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, LEAST, override)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value).replace(override, "")


def test_more_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="example: missing"):
        load(tmp_path, LEAST.replace('data = "digits"', ""))
    with pytest.raises(ConfigError, match="labels of classes are int64"):
        load(tmp_path, SPECIFIED, "example.target_dtype=float32")
    with pytest.raises(ConfigError, match="has the port of listen"):
        load(tmp_path, SPECIFIED, "server.enrol_listen=0.0.0.0:8443")
    with pytest.raises(ConfigError, match="more than 50 devices"):
        load(tmp_path, SPECIFIED, "run.population=50", "run.max_examples=10", "run.examples=501")
    for table in ("server", "run"):
        lines = [line for line in LEAST.splitlines() if not line.startswith(table)]
        with pytest.raises(ConfigError, match=f"{table}: missing"):
            load(tmp_path, "\n".join(lines))


def test_several_runs(tmp_path: Path) -> None:
    first = load(tmp_path, LEAST)
    second = load(tmp_path, LEAST.replace('"a"', '"b"'), "rounds=3", name="b.toml")
    check_together([first, second])
    with pytest.raises(ConfigError, match="no run"):
        check_together([])
    with pytest.raises(ConfigError, match="name 'a'"):
        check_together([first, load(tmp_path, LEAST, "run.out=elsewhere", name="c.toml")])
    with pytest.raises(ConfigError, match="two runs have the out"):
        check_together([first, load(tmp_path, LEAST, "run.name=c", "run.out=runs/a", name="c.toml")])
    for override, table in (
        ("server.listen=0.0.0.0:1", "server"),
        ("store.blobs=other", "store"),
        ("limits.streams=5", "limits"),
        ("payload.spool_max=5", "payload"),
        ("status.listen=127.0.0.1:1", "status"),
    ):
        other = load(tmp_path, LEAST.replace('"a"', '"b"'), override, name="b.toml")
        with pytest.raises(ConfigError) as caught:
            check_together([first, other])
        assert f"[{table}]" in str(caught.value)
