"""client.toml: what it takes, and that nothing a server asks is stronger than the owner's policy."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.client.config import (
    Asked,
    ClientConfig,
    History,
    Policy,
    Refusal,
    load_client_config,
)
from mycelia.client.policy import ClientPolicy
from mycelia.engine.config import load_config, to_toml
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.messages import Threat

NOON = datetime(2026, 3, 1, 12, 0)
SPECIFIED = """
client = { server = ["fl.example.org:8443"], identity = "identity/", model = "ward.models:unet", data = "images:ward7/" }
[policy]
purposes = ["study-12"]
algorithms = ["fedavg", "fedprox"]
secure_sum = "required"
threat = "active"
issuer = "offline"
min_cohort = 20
limits = { epsilon = 4.0, delta = 1e-6, local_epochs = 2, rounds_per_day = 24, upload_mb_per_day = 500 }
hours = "20:00-06:00"
"""  # noqa: E501
POLICY: dict[str, Any] = {
    "purposes": ["study-12"],
    "algorithms": ["fedavg"],
    "datasets": ["ward7"],
    "models": ["unet"],
    "secure_sum": "required",
    "threat": "active",
    "issuer": "offline",
    "min_cohort": 20,
    "min_threshold": 0.6,
    "corrupt": 0.1,
    "limits": {
        "epsilon": 4.0,
        "delta": 1e-6,
        "local_epochs": 2,
        "local_steps": 100,
        "rounds_per_day": 24,
        "rounds_total": 200,
        "upload_mb_per_day": 500,
    },
    "hours": "08:00-18:00",
}
ASKED = Asked(
    run="run",
    purpose="study-12",
    algorithm="fedavg",
    dataset="ward7",
    model="unet",
    schema_sha256="00" * 32,
    secure_sum=True,
    threat="active",
    cohort=20,
    threshold=0.6,
    corrupt=0.1,
    issuers=frozenset({"offline"}),
    epsilon=3.0,
    delta=5e-7,
    local_epochs=2,
    local_steps=100,
    upload_bytes=10**6,
)
HISTORY = History(23, 199, 499 * 10**6, 1.0, 5e-7)


def policy(**changes: Any) -> Policy:
    return load_config(Policy, POLICY | changes)


def test_all_that_is_allowed() -> None:
    assert policy().refusal(ASKED, NOON, HISTORY) is None


BEYOND: list[tuple[Refusal, dict[str, Any], dict[str, Any]]] = [
    (Refusal("purposes", "study-13", "study-12"), {"purpose": "study-13"}, {}),
    (Refusal("algorithms", "scaffold", "fedavg"), {"algorithm": "scaffold"}, {}),
    (Refusal("datasets", "ward8", "ward7"), {"dataset": "ward8"}, {}),
    (Refusal("models", "vit", "unet"), {"model": "vit"}, {}),
    (
        Refusal("secure_sum", "none", "required"),
        {"secure_sum": False, "threat": "", "threshold": 0.0, "corrupt": 0.0},
        {},
    ),
    (Refusal("threat", "passive", "active"), {"threat": "passive"}, {}),
    (Refusal("threat", "none", "active"), {"threat": ""}, {}),
    (Refusal("issuer", "offline, online", "offline"), {"issuers": frozenset({"offline", "online"})}, {}),
    (Refusal("issuer", "unknown", "offline"), {"issuers": frozenset()}, {}),
    (Refusal("min_cohort", "19", "at least 20"), {"cohort": 19}, {}),
    (Refusal("min_threshold", "0.59", "at least 0.6"), {"threshold": 0.59}, {}),
    (Refusal("min_threshold", "nan", "at least 0.6"), {"threshold": float("nan")}, {}),
    (Refusal("corrupt", "0.09", "at least 0.1"), {"corrupt": 0.09}, {}),
    (Refusal("limits.epsilon", "3.1", "at most 4, of which 1 is spent"), {"epsilon": 3.1}, {}),
    (Refusal("limits.epsilon", "3", "at most 4, of which 1.1 is spent"), {}, {"epsilon_spent": 1.1}),
    (Refusal("limits.epsilon", "no bound", "at most 4"), {"epsilon": None}, {}),
    (Refusal("limits.epsilon", "nan", "at most 4, of which 1 is spent"), {"epsilon": float("nan")}, {}),
    (Refusal("limits.epsilon", "-2", "at most 4, of which 1 is spent"), {"epsilon": -2.0}, {}),
    (Refusal("limits.delta", "6e-07", "at most 1e-06, of which 5e-07 is spent"), {"delta": 6e-7}, {}),
    (Refusal("limits.delta", "no bound", "at most 1e-06"), {"delta": None}, {}),
    (Refusal("limits.local_epochs", "2.5", "at most 2"), {"local_epochs": 2.5}, {}),
    (Refusal("limits.local_steps", "101", "at most 100"), {"local_steps": 101}, {}),
    (Refusal("limits.rounds_per_day", "25", "at most 24"), {}, {"rounds_today": 24}),
    (Refusal("limits.rounds_total", "201", "at most 200"), {}, {"rounds_total": 200}),
    (Refusal("limits.upload_mb_per_day", "500.001", "at most 500"), {"upload_bytes": 1_001_000}, {}),
]


@pytest.mark.parametrize(("refusal", "asked", "history"), BEYOND, ids=lambda value: "")
def test_policy_cannot_be_loosened_by_server(
    refusal: Refusal, asked: dict[str, Any], history: dict[str, Any]
) -> None:
    """Whatever else the server asks, in each field the owner's word is the last."""
    found = policy().refusal(ASKED._replace(**asked), NOON, HISTORY._replace(**history))
    assert found == refusal


def test_every_field_is_looked_at() -> None:
    fields = {refusal.field for refusal, _, _ in BEYOND} | {"hours"}
    limits = {f"limits.{name}" for name in POLICY["limits"]}
    assert fields == (set(Policy.model_fields) - {"limits"}) | limits


def test_any_is_the_only_word_for_anything() -> None:
    anything = load_config(
        Policy,
        {
            "purposes": "any", "algorithms": "any", "datasets": "any", "models": "any", "secure_sum": "any",
            "issuer": "any", "min_cohort": 1, "hours": "any",
        },
    )  # fmt: skip
    plain = Asked(
        "run", "whatever", "some", "data", cohort=1, issuers=frozenset({"online"}), local_steps=10**9
    )
    assert anything.refusal(plain, NOON, History(10**6, 10**6, 10**12)) is None
    for field in ("purposes", "algorithms", "datasets", "models"):
        nothing = policy(**{field: []})
        refusal = nothing.refusal(ASKED, NOON, HISTORY)
        assert refusal is not None
        assert (refusal.field, refusal.allowed) == (field, "none")
        for wrong in (["any"], ["any", "x"], "all", "", "*"):
            with pytest.raises(ConfigError, match=field):
                policy(**{field: wrong})


def test_an_evaluation_spends_nothing() -> None:
    asked = Asked("run", "study-12", "fedavg", "ward7", "unet", trains=False)
    assert policy().refusal(asked, NOON, History(10**6, 10**6, 10**12, 9.0)) is None
    assert policy().refusal(asked._replace(purpose="other"), NOON, HISTORY) is not None
    assert policy().refusal(asked, NOON.replace(hour=19), HISTORY) is not None


@pytest.mark.parametrize(
    ("hours", "allowed", "refused"),
    [
        ("20:00-06:00", ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
        ("08:30-18:00", ["08:30", "17:59"], ["08:29", "18:00", "00:00"]),
        ("00:00-23:59", ["00:00", "23:58"], ["23:59"]),
        ("23:00-00:00", ["23:00", "23:59"], ["00:00", "22:59"]),
    ],
)
def test_hours(hours: str, allowed: list[str], refused: list[str]) -> None:
    for text, may in [*((text, True) for text in allowed), *((text, False) for text in refused)]:
        now = datetime.strptime(f"2026-03-01 {text}", "%Y-%m-%d %H:%M")
        refusal = policy(hours=hours).refusal(ASKED, now, HISTORY)
        assert refusal == (None if may else Refusal("hours", text, hours))


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_and_their_complement(first: int, last: int, minute: int) -> None:
    """At any minute, exactly one of "a-b" and "b-a" allows training."""
    if first == last:
        return
    times = [f"{value // 60:02}:{value % 60:02}" for value in (first, last)]
    now = datetime(2026, 3, 1) + timedelta(minutes=minute)
    found = [
        policy(hours=f"{a}-{b}").refusal(ASKED, now, HISTORY) is None for a, b in (times, reversed(times))
    ]
    assert sum(found) == 1


def test_the_part_for_the_secure_sum() -> None:
    assert policy().secure_policy() == ClientPolicy(20, Threat.ACTIVE, 0.1, 0.6)
    loose = {
        "purposes": "any",
        "algorithms": "any",
        "secure_sum": "any",
        "threat": "passive",
        "min_cohort": 1,
    }
    assert load_config(Policy, loose).secure_policy() == ClientPolicy(3, Threat.PASSIVE)


def test_who_enrolled_the_others() -> None:
    """Left out, it follows from the server that is guarded against."""
    asked = ASKED._replace(issuers=frozenset({"online"}))
    for threat, issuer, may in (
        ("active", None, False),
        ("passive", None, True),
        ("active", "any", True),
        ("passive", "offline", False),
    ):
        more = {} if issuer is None else {"issuer": issuer}
        given_policy = {name: value for name, value in POLICY.items() if name != "issuer"} | more
        found = load_config(Policy, given_policy | {"threat": threat}).refusal(asked, NOON, HISTORY)
        assert (found is None) is may


# --- the file -------------------------------------------------------------------------------------


def test_the_specified_file(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text(SPECIFIED)
    config = load_client_config(path)
    assert config.server == ("fl.example.org:8443",)
    assert config.identity == tmp_path / "identity"
    assert config.state == tmp_path / "identity" / "state"
    assert config.out == tmp_path / "identity" / "state" / "model"
    assert (config.model.name, config.data.name) == ("ward.models:unet", f"images:{tmp_path}/ward7")
    assert config.policy.limits.epsilon == 4.0
    assert load_config(ClientConfig, tmp_path / "client.toml", []) != config  # paths are as they were written
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_client_config(again) == config
    changed = load_client_config(path, ["client.state=elsewhere", "policy.limits.local_epochs=5"])
    assert (changed.state, changed.policy.limits.local_epochs) == (tmp_path / "elsewhere", 5)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ('"digits"', "digits"),
        ('"hf:org/set"', "hf:org/set"),
        ('"package.module:load"', "package.module:load"),
        ('"npz:/data/a.npz"', "npz:/data/a.npz"),
        ('{ name = "csv:a.csv", test = "b.csv" }', "csv:{0}/a.csv"),
    ],
)
def test_where_data_is(tmp_path: Path, data: str, found: str) -> None:
    path = tmp_path / "client.toml"
    path.write_text(SPECIFIED.replace('"images:ward7/"', data))
    config = load_client_config(path)
    assert config.data.name == found.format(tmp_path)
    assert config.data.options.get("test") in {None, f"{tmp_path}/b.csv"}


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ('issuer = "offline"', 'isuer = "offline"', "did you mean 'issuer'"),
        ('issuer = "offline"', 'issuer = "of-line"', "policy.issuer"),
        ('secure_sum = "required"', 'secure_sum = "require"', "policy.secure_sum"),
        ('secure_sum = "required"', "secure_sum = true", "policy.secure_sum"),
        ('secure_sum = "required"', 'secure_sum = ""', "policy.secure_sum"),
        ('threat = "active"', 'threat = "none"', "policy.threat"),
        ("min_cohort = 20", "min_cohort = 2", "3 or more where a secure sum is required"),
        ("min_cohort = 20", "min_threshold = 1.5", "policy.min_threshold"),
        ("delta = 1e-6, ", "", "ε says nothing without δ"),
        ("epsilon = 4.0, ", "", "give both"),
        ("epsilon = 4.0", "epsilon = -1.0", "policy.limits.epsilon"),
        ("delta = 1e-6", "delta = 1.0", "below 1"),
        ("local_epochs = 2", 'local_epochs = "all"', "policy.limits.local_epochs"),
        ("rounds_per_day", "rounds_a_day", "did you mean 'rounds_per_day'"),
        ('"20:00-06:00"', '"20-6"', "two times of the day"),
        ('"20:00-06:00"', '"24:00-06:00"', "two times of the day"),
        ('"20:00-06:00"', '"06:00-06:00"', "that differ"),
        ('"20:00-06:00"', '""', "policy.hours"),
        ('purposes = ["study-12"]', "", "policy.purposes: missing"),
        ('purposes = ["study-12"]', 'purposes = [""]', "policy.purposes"),
        ('["fl.example.org:8443"]', "[]", "client.server"),
        ('["fl.example.org:8443"]', '["fl.example.org"]', "host:port"),
        ('["fl.example.org:8443"]', '["a:1", "a:1"]', "names a server twice"),
        ("identity =", "indentity =", "did you mean 'identity'"),
        ("[policy]", "[polcy]", "did you mean 'policy'"),
    ],
)
def test_wrong_files(tmp_path: Path, line: str, wrong: str, said: str) -> None:
    path = tmp_path / "client.toml"
    path.write_text(SPECIFIED.replace(line, wrong))
    with pytest.raises(ConfigError) as caught:
        load_client_config(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
