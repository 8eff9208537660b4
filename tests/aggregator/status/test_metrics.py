"""What Prometheus reads, with its own parser."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from mycelia.aggregator.status import Board
from mycelia.aggregator.status.metrics import exposition, registry
from tests.aggregator.status.boards import DAY, Clock, full, play, start

LABELS = {
    "mycelia_rounds": {"result"},
    "mycelia_round_seconds": {"le"},
    "mycelia_phase": {"run", "phase"},
    "mycelia_clients_connected": set(),
    "mycelia_client_outcomes": {"phase", "reason"},
    "mycelia_bytes": {"direction"},
    "mycelia_secagg_dropouts": {"phase"},
    "mycelia_epsilon_spent": {"run"},
    "mycelia_spool_bytes": set(),
    "mycelia_certificate_expiry_seconds": {"kind"},
    "mycelia_refused_frames": {"reason"},
    "mycelia_insecure": set(),
}


def samples(board: Board) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, _ = exposition(registry(board), "")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(board: Board, name: str, **labels: str) -> float:
    return samples(board)[name, frozenset(labels.items())]


def test_the_metrics_are_those_of_the_specification() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition(registry(board), "")[0].decode()):
        assert family.documentation
        found[family.name] = {label for sample in family.samples for label in sample.labels}
    assert found == LABELS
    assert not any(name.endswith("_created") for name, _ in samples(board))


def test_their_values_are_what_happened() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)  # 3 plain rounds of 4 devices, 12 masked ones of 40 of which one failed
    assert value(board, "mycelia_rounds_total", result="published") == 14
    assert value(board, "mycelia_rounds_total", result="failed") == 1
    assert value(board, "mycelia_round_seconds_count") == 15
    assert value(board, "mycelia_round_seconds_sum") == 45
    assert value(board, "mycelia_round_seconds_bucket", le="2.0") == 0
    assert value(board, "mycelia_round_seconds_bucket", le="5.0") == 15
    assert value(board, "mycelia_round_seconds_bucket", le="+Inf") == 15
    assert value(board, "mycelia_phase", run="study-12", phase="train") == 1
    assert value(board, "mycelia_phase", run="study-12", phase="merge") == 0
    assert value(board, "mycelia_phase", run="warm-up", phase="done") == 1
    assert value(board, "mycelia_clients_connected") == 149
    assert value(board, "mycelia_client_outcomes_total", phase="train", reason="ACCEPTED") == 3 * 3 + 12 * 39
    assert value(board, "mycelia_client_outcomes_total", phase="train", reason="STALL") == 15
    assert value(board, "mycelia_bytes_total", direction="up") == 10_000_000
    assert value(board, "mycelia_bytes_total", direction="down") == 20_000_000
    assert value(board, "mycelia_secagg_dropouts_total", phase="train") == 12
    assert value(board, "mycelia_epsilon_spent", run="study-12") == 1.25
    assert value(board, "mycelia_spool_bytes") == 4096
    assert value(board, "mycelia_certificate_expiry_seconds", kind="client") == 3 * DAY
    assert value(board, "mycelia_certificate_expiry_seconds", kind="operator") == 700 * DAY
    assert value(board, "mycelia_refused_frames_total", reason="REVOKED") == 1
    assert value(board, "mycelia_insecure") == 1


@pytest.mark.parametrize(
    ("seconds", "class_"), [(0.0, "1.0"), (1.0, "1.0"), (1.01, "2.0"), (3600.0, "3600.0"), (3601.0, "+Inf")]
)
def test_a_length_falls_into_its_class(seconds: float, class_: str) -> None:
    board = Board()
    board.round_ended("r", 1, result="published", seconds=seconds)
    counted = {
        dict(labels)["le"]: count
        for (name, labels), count in samples(board).items()
        if name == "mycelia_round_seconds_bucket"
    }
    assert next(bound for bound in counted if counted[bound] == 1) == class_


def test_no_label_holds_a_device() -> None:
    board = Board()
    start(board)
    secret = "device-4711"
    board.connected(4711, secret)
    board.expiries([("client 4711", 5), (f"{secret} x", 6)])
    play(board, "study-12", 1, [4710, 4711])
    board.outcome("study-12", 1, 4711, "DECLINED", secret, f"failed: {secret}", secret)
    board.outcome("study-12", 1, 4711, "REJECTED", "train", f"{secret.upper()}", secret)
    board.disconnected(4711, secret)
    board.refused(secret)
    said = {text for (_, labels), _ in samples(board).items() for pair in labels for text in pair}
    assert not any("471" in text or secret in text.lower() for text in said)
    assert value(board, "mycelia_client_outcomes_total", phase="other", reason="DECLINED") == 1
    assert value(board, "mycelia_refused_frames_total", reason="OTHER") == 1


def test_a_reader_that_takes_openmetrics_gets_it() -> None:
    clock = Clock()
    board = clock.board()
    full(board, clock.wall)
    body, content_type = exposition(registry(board), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics_families(body.decode())} == LABELS.keys()


def test_two_boards_have_nothing_in_common() -> None:
    one, other = Board(), Board()
    start(one)
    one.refused("STALL")
    assert value(one, "mycelia_refused_frames_total", reason="STALL") == 1
    assert not any("STALL" in str(labels) for _, labels in samples(other))
