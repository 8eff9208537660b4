"""What `mycelia client` says while it runs: a line for each thing that happened to a device."""

from __future__ import annotations

from mycelia.cli.output import note
from mycelia.client.notices import (
    Accepted,
    ConnectedTo,
    Declined,
    Delivered,
    Disconnected,
    Failed,
    KeysRenewed,
    Measured,
    Notice,
    Started,
    Trained,
    Uploaded,
    Waiting,
)

__all__ = ["Lines"]


class Lines:
    """Lines on stderr.

    Args:
        number: of the device, where several write; 0: it is alone.
    """

    def __init__(self, number: int = 0) -> None:
        self._prefix = f"client {number}  " if number else ""
        self._rounds = 0
        self._apart = False

    def notice(self, notice: Notice) -> None:
        """Say it."""
        text, kind = self._text(notice)
        if text:
            note(f"{self._prefix}{text}", kind)

    def _text(self, notice: Notice) -> tuple[str, str]:  # noqa: PLR0912 - one case for each notice
        match notice:
            case ConnectedTo(server, client, tls, _):
                self._apart = False
                how = "TLS 1.3" if tls else "no TLS"
                return f"enrolled as {client}, connected to {server} ({how})", ""
            case Disconnected(reason, wait_s):
                if self._apart:  # it was said, and is tried again and again
                    return "", ""
                self._apart = True
                return f"not connected, tried again in {wait_s:.0f} s: {reason}", "warning"
            case Waiting(delay_s, reason):
                return f"waits {delay_s:.0f} s: {reason}", ""
            case Started(_, rounds, _):
                self._rounds = rounds
                return "", ""
            case Trained(at, rounds, rows, _, loss, seconds):
                said = "" if loss is None else f", loss {loss:.4g}"
                return f"round {at.round + 1}/{rounds}  trained on {rows} rows in {seconds:.1f} s{said}", ""
            case Uploaded(at, size, masked):
                kind = "masked upload" if masked else "upload"
                return f"round {at.round + 1}/{self._rounds}  {kind} {size / 1000:.0f} KB", ""
            case Accepted(at):
                return f"round {at.round + 1}/{self._rounds}  accepted", ""
            case Declined(at, field, asked, allowed):
                return f"round {at.round + 1}  declined: {field} asked {asked}, allowed {allowed}", "warning"
            case Failed(at, reason, hint):
                return f"round {at.round + 1}  {reason}: {hint}", "warning"
            case Measured(at, examples, values):
                figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                return f"round {at.round + 1}  measured on {examples} rows: {figures}", ""
            case Delivered(run, model, personal):
                more = "" if personal is None else f", its own in {personal}"
                return f"done: {run}; model in {model}{more}", ""
            case KeysRenewed():
                return "keys renewed", ""
