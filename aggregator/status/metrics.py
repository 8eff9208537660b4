"""The board as Prometheus reads it. No label holds a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mycelia.aggregator.status.board import ROUND_SECONDS, Board
from mycelia.aggregator.status.runs import PHASES

__all__ = ["exposition", "registry"]

_RESULTS: Final = ("published", "failed")


def registry(board: Board) -> CollectorRegistry:
    """A registry of its own with the metrics of one board."""
    made = CollectorRegistry()
    made.register(_BoardCollector(board))
    return made


def exposition(metrics: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What is sent to a reader, and its content type.

    Args:
        metrics: from `registry`.
        accept: what the reader takes, as its request says.
    """
    encoder, content_type = choose_encoder(accept)
    return encoder(metrics), content_type


class _BoardCollector(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def describe(self) -> Iterable[Metric]:
        """As they are collected."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """What the board says now."""
        board, counts = self._board, self._board.counts
        rounds = CounterMetricFamily("mycelia_rounds", "Rounds that are over.", labels=["result"])
        for result in _RESULTS:
            rounds.add_metric([result], counts.rounds[result])
        yield rounds
        yield self._round_seconds()
        yield self._phase()
        yield GaugeMetricFamily(
            "mycelia_clients_connected", "Devices whose stream is open.", value=board.devices_connected()
        )
        outcomes = CounterMetricFamily(
            "mycelia_client_outcomes",
            "What became of devices that were asked, by phase and code, or else status.",
            labels=["phase", "reason"],
        )
        for (phase, reason), count in counts.outcomes.items():
            outcomes.add_metric([phase, reason], count)
        yield outcomes
        traffic = CounterMetricFamily(
            "mycelia_bytes", "Bytes over all streams: up from devices, down to them.", labels=["direction"]
        )
        traffic.add_metric(["up"], counts.bytes_up)
        traffic.add_metric(["down"], counts.bytes_down)
        yield traffic
        dropouts = CounterMetricFamily(
            "mycelia_secagg_dropouts", "Devices that dropped out of a secure sum.", labels=["phase"]
        )
        for phase, count in counts.secagg_dropouts.items():
            dropouts.add_metric([phase], count)
        yield dropouts
        epsilon = GaugeMetricFamily(
            "mycelia_epsilon_spent", "Upper bound of ε that a run has spent.", labels=["run"]
        )
        for run, spent in board.epsilons():
            epsilon.add_metric([run], spent)
        yield epsilon
        yield GaugeMetricFamily(
            "mycelia_spool_bytes", "Bytes of payloads that are not in the sum yet.", value=board.spool_used
        )
        ends = GaugeMetricFamily(
            "mycelia_certificate_expiry_seconds",
            "Seconds until the first of a kind expires; below 0 if it has.",
            labels=["kind"],
        )
        for kind, left in board.seconds_left().items():
            ends.add_metric([kind], left)
        yield ends
        refused = CounterMetricFamily(
            "mycelia_refused_frames", "Frames that were refused, and streams that ended.", labels=["reason"]
        )
        for reason, count in counts.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            "mycelia_insecure", "1 if the server runs without TLS.", value=int(board.insecure)
        )

    def _round_seconds(self) -> Metric:
        counts, total = self._board.counts, 0
        classes = []
        for bound, count in zip((*map(str, ROUND_SECONDS), "+Inf"), counts.round_classes, strict=True):
            total += count
            classes.append((bound, float(total)))
        return HistogramMetricFamily(
            "mycelia_round_seconds",
            "How long rounds took.",
            buckets=classes,
            sum_value=counts.round_seconds,
        )

    def _phase(self) -> Metric:
        family = GaugeMetricFamily(
            "mycelia_phase", "1 for the phase that a run is in, 0 for the others.", labels=["run", "phase"]
        )
        for run, now in self._board.phases():
            for phase in (*PHASES, "other"):
                family.add_metric([run, phase], int(phase == now))
        return family
