"""`mycelia bench secagg`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.output import THRESHOLD_NOT_MET, Format, FormatOption, note, print_json, print_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["app"]

app = typer.Typer(
    help="Measure what a protocol costs on this machine.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
)


class ThreatModel(StrEnum):
    """Which server the neighbours and the threshold have to be safe against."""

    passive = "passive"
    active = "active"


class Peer(StrEnum):
    """Whose secure sum is measured beside ours."""

    flwr = "flwr"


@app.callback()
def _group() -> None:
    """Keeps `secagg` a command of its own while it is the only one."""


@app.command("secagg")
def secagg(
    clients: Annotated[int, typer.Option("--clients", help="Clients of the sum.")],
    dim: Annotated[int, typer.Option("--dim", help="Entries of each client's vector.")],
    neighbours: Annotated[int, typer.Option("--neighbours", help="Clients that hold shares of one another.")],
    threshold: Annotated[int, typer.Option("--threshold", help="Shares that rebuild a secret.")],
    dropout: Annotated[
        float, typer.Option("--dropout", help="Share of the clients that vanish before their upload.")
    ] = 0.0,
    bits: Annotated[int, typer.Option("--bits", help="Bits of an element of the sum.")] = 32,
    threat: Annotated[
        ThreatModel, typer.Option("--threat", help="What neighbours and threshold have to withstand.")
    ] = ThreatModel.passive,
    repeat: Annotated[int, typer.Option("--repeat", help="Sums; times are medians over them.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of vectors and dropouts; never of keys.")] = 0,
    against: Annotated[
        Peer | None, typer.Option("--against", help="Measure a peer in the same call.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option("--peer-python", metavar="FILE", help="An interpreter that has the peer.")
    ] = None,
    format: FormatOption = Format.text,
) -> int:
    """Measure a secure sum: CPU time and bytes of both sides, on one thread.

    Example: mycelia bench secagg --clients 100 --dim 100000 --neighbours 50 --threshold 26 --dropout 0.1
    """
    from mycelia.simulations.secure_sum_bench import SecureSumBench, flower, measure

    bench = SecureSumBench(
        clients=clients, dim=dim, neighbours=neighbours, threshold=threshold, dropout=dropout, bits=bits,
        threat=threat.value, repeat=repeat, seed=seed,
    )  # fmt: skip
    peer = flower(bench, peer_python) if against is not None else None
    found = measure(bench)
    if peer is not None:
        names = {
            "client": "client_ms",
            "server": "server_ms",
            "upload": "upload_bytes",
            "share": "share_bytes",
            "memory": "peak_bytes",
        }
        found |= {
            "peer": peer,
            "ratio": {key: peer[name] / found[name] for key, name in names.items() if found[name]},
        }
    if format is Format.json:
        print_json(found)
    else:
        print_pairs(_lines(found))
    if not found["exact"]:
        note("the sum is not the sum of the survivors' vectors", "error")
        return THRESHOLD_NOT_MET
    return 0


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    kernel, security = found["kernel"], found["security"]
    lines = [
        ("sum", f"{found['clients']} clients, {found['dropped']} dropped, {found['dim']} entries"),
        ("exact", "yes" if found["exact"] else "NO"),
        ("neighbours, threshold", f"{found['neighbours']}, {found['threshold']}"),
        ("safe against", ", ".join(name for name, safe in security.items() if safe) or "nobody"),
        ("client", f"{found['client_ms']:.1f} ms, {found['client_over_limit']:.2f} x its limit"),
        ("server", f"{found['server_ms']:.1f} ms, {found['server_over_limit']:.2f} x its limit"),
        ("upload", f"{found['upload_bytes']} bytes of {found['ring_bits']} bits an entry"),
        ("shares", f"{found['share_bytes']} bytes a client"),
        ("mask kernel", f"{kernel['words_per_second'] / 1e9:.2f} G words/s"),
    ]
    if "peer" in found:
        peer, ratio = found["peer"], found["ratio"]
        lines += [
            (
                f"flwr {peer['version']}",
                f"client {peer['client_ms']:.1f} ms, server {peer['server_ms']:.1f} ms",
            ),
            ("flwr / ours", ", ".join(f"{name} {value:.1f}" for name, value in ratio.items())),
        ]
    return lines
