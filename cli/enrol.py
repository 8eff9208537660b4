"""`mycelia enrol init | server | token | request | accept | issue | renew | revoke | list | check`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.output import (
    THRESHOLD_NOT_MET,
    Format,
    FormatOption,
    note,
    print_json,
    print_pairs,
    print_table,
)

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from mycelia.aggregator.identity_authority import Authority
    from mycelia.aggregator.wire import federation_pb2 as pb
    from mycelia.privacy.secagg.roster import ClientEntry

__all__ = ["app"]

app = typer.Typer(
    help="Enrol servers and devices, and renew or revoke their keys.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
)

_LIFE = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ANSWER_S = 30  # so long a server may take to enrol a device

CaOption = Annotated[Path, typer.Option("--ca", help="The operator's folder.", show_default=False)]
DaysOption = Annotated[int, typer.Option("--days", help="How long the certificate is valid.")]
_REQUEST = "A device's request: request-N.bin of its identity folder."


@app.command("init")
def init(ca: CaOption, format: FormatOption = Format.text) -> None:
    """Make an operator: a folder with its key, and a roster of epoch 1.

    Keep the folder on a machine that is no server; give operator.pub to every device.

    Example: mycelia enrol init --ca operator/
    """
    from mycelia.aggregator.identity_authority import Authority

    with Authority.create(ca, _now()) as authority:
        facts = {
            "ca": str(ca),
            "operator_key": authority.operator.key.hex(),
            "not_after": authority.operator.not_after,
            "epoch": authority.roster.epoch,
        }
    _print(facts, format)


@app.command("server")
def server(
    ca: CaOption,
    name: Annotated[str, typer.Option("--name", help="The server's name.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The new folder for its keys.", show_default=False)],
    dns: Annotated[
        list[str] | None, typer.Option("--dns", help="A host name that devices reach it by; may be repeated.")
    ] = None,
    ip: Annotated[
        list[str] | None, typer.Option("--ip", help="An address that devices reach it by; may be repeated.")
    ] = None,
    days: DaysOption = 90,
    format: FormatOption = Format.text,
) -> None:
    """Make the keys and the certificate of a server, and list it in the roster.

    Example: mycelia enrol server --ca operator/ --name agg-1 --dns fl.example.org --out server-keys/
    """
    with _open(ca) as authority:
        entry = authority.add_server(
            name, out, _now(), dns=dns or (), addresses=[_address(text) for text in ip or ()], days=days
        )
        facts = {
            "server": entry.name,
            "keys": str(out),
            "not_after": entry.not_after,
            "roster": str(authority.roster_path),
            "epoch": authority.roster.epoch,
        }
    _print(facts, format)


@app.command("token")
def token(
    ca: CaOption,
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="How many.")] = 1,
    expires: Annotated[
        str, typer.Option("--expires", metavar="30m|24h|7d", help="How long they are good, at most 30d.")
    ] = "24h",
    format: FormatOption = Format.text,
) -> None:
    """Make one-time tokens, each for one device; they are shown this once.

    Example: (umask 077; mycelia enrol token --ca operator/ --count 40 --expires 24h > tokens.txt)
    """
    now = _now()
    until = now + _life(expires)
    with _open(ca) as authority:
        tokens = authority.tokens.make(count, until, now)
    if format is Format.json:
        print_json({"tokens": tokens, "not_after": until})
        return
    for text in tokens:
        print(text)
    note(f"good until {_date(until)}, each for one device; only their hashes are kept")


@app.command("request")
def request(
    out: Annotated[Path, typer.Option("--out", help="The device's identity folder.", show_default=False)],
    operator: Annotated[
        Path | None, typer.Option("--operator", help="The file operator.pub, by a way that is trusted.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="A name for people.")] = "",
    server: Annotated[
        str | None, typer.Option("--server", metavar="HOST:PORT", help="Enrol at this server, by token.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token; mode 0600.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Make new keys for an enrolled device.")] = False,
    token: Annotated[str | None, typer.Option("--token", hidden=True)] = None,
    format: FormatOption = Format.text,
) -> None:
    """Make a device's keys and ask for a certificate: at a server by token, or with a file for the operator.

    Run again, it asks the same again: no second pair of keys is made before the first is answered.

    Example: mycelia enrol request --operator operator.pub --name "ward 7" --out identity/
    """
    from mycelia.client.identity import DeviceIdentity
    from mycelia.engine.errors import ConfigError

    secret = _token(server, token_file, token, renew=renew)
    if renew:
        if operator is not None or name:
            raise ConfigError(
                "--renew with --operator or --name",
                rule="a renewal keeps the operator and the name",
                fix="leave them out; for another operator make another folder",
                who="--renew",
            )
        with DeviceIdentity.open(out) as identity:
            identity.renew()
            _print_request(identity, format)
        return
    with _device(out, operator, name) as identity:
        if server is None:
            identity.request()
            _print_request(identity, format)
            return
        asked = identity.enrol_request(secret)
        keys = identity.accept_enrolled(_ask(server, identity.operator.pem, asked), _now())
        _print(_enrolled(identity, keys.certificate.not_after), format)


@app.command("accept")
def accept(
    reply: Annotated[Path, typer.Argument(help="The operator's answer.", show_default=False)],
    identity: Annotated[
        Path, typer.Option("--identity", help="The device's identity folder.", show_default=False)
    ],
    format: FormatOption = Format.text,
) -> None:
    """Take the operator's answer into the device's identity folder.

    Example: mycelia enrol accept reply.bin --identity identity/
    """
    from mycelia.client.identity import DeviceIdentity
    from mycelia.privacy.secagg.enrolment import MAX_ENROLMENT
    from mycelia.privacy.secagg.key_files import read_public

    data = read_public(reply, MAX_ENROLMENT)
    with DeviceIdentity.open(identity) as device:
        keys = device.accept_reply(data, _now())
        _print(_enrolled(device, keys.certificate.not_after), format)


@app.command("issue")
def issue(
    request: Annotated[Path, typer.Argument(help=_REQUEST, show_default=False)],
    ca: CaOption,
    out: Annotated[Path, typer.Option("--out", help="The file for the answer.", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", help="A name in place of the one that was asked for.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="A group it belongs to; may be repeated.")
    ] = None,
    days: DaysOption = 90,
    format: FormatOption = Format.text,
) -> None:
    """Enrol the device that asks, where the operator's key lies; asked again, the answer is the same.

    Example: mycelia enrol issue request-1.bin --ca operator/ --out reply.bin
    """
    _refuse_existing(out)
    asked = _read_request(request)
    with _open(ca) as authority:
        issued = authority.issue(asked, _now(), name=name, groups=group or (), days=days)
        _answer(authority, authority.reply(issued), issued.entry, out, format)


@app.command("renew")
def renew(
    ca: CaOption,
    request: Annotated[Path | None, typer.Argument(help=_REQUEST, show_default=False)] = None,
    server: Annotated[
        Path | None, typer.Option("--server", help="A server's tls.crt, to make it last longer.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file for the answer.")] = None,
    days: Annotated[
        int | None, typer.Option("--days", help="How long the certificate is valid.  [default: 90]")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Renew a device's keys, a server's certificate, or, with neither, the roster itself.

    Example: mycelia enrol renew request-2.bin --ca operator/ --out reply.bin
    """
    from mycelia.aggregator.identity_authority import CERTIFICATE_DAYS
    from mycelia.engine.errors import ConfigError
    from mycelia.privacy.secagg.key_files import PUBLIC, write_file
    from mycelia.privacy.secagg.private_keys import certificate_pem, read_certificate

    wanted = [what for what in (request, server) if what is not None]
    if len(wanted) > 1 or bool(wanted) != (out is not None) or (days is not None and not wanted):
        raise ConfigError(
            "a request, --server, --out and --days that do not fit together",
            rule="a request or --server, with --out; or none of them, for the roster",
            fix="mycelia enrol renew --help shows an example",
        )
    validity = CERTIFICATE_DAYS if days is None else days
    if out is not None:
        _refuse_existing(out)
    if request is not None and out is not None:
        asked = _read_request(request)
        with _open(ca) as authority:
            issued = authority.renew(asked, _now(), days=validity)
            _answer(authority, authority.reply(issued), issued.entry, out, format)
        return
    held = None if server is None else read_certificate(server)
    with _open(ca) as authority:
        if held is not None and out is not None:
            write_file(out, certificate_pem(authority.renew_server(held, _now(), validity)), PUBLIC)
        else:
            authority.refresh(_now())
        facts = {
            **({} if out is None else {"certificate": str(out)}),
            "roster": str(authority.roster_path),
            "epoch": authority.roster.epoch,
            "roster_not_after": authority.roster.expires,
        }
    _print(facts, format)


@app.command("revoke")
def revoke(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="Of the clients.", show_default=False)],
    ca: CaOption,
    format: FormatOption = Format.text,
) -> None:
    """Refuse clients for ever, from a new epoch of the roster on.

    Example: mycelia enrol revoke 7 12 --ca operator/
    """
    with _open(ca) as authority:
        new = authority.revoke(ids, _now())
        facts = {"revoked": list(new), "roster": str(authority.roster_path), "epoch": authority.roster.epoch}
    for client in sorted(set(ids) - set(new)):
        note(f"client {client} was revoked before")
    _print(facts, format)


@app.command("list")
def list_entries(ca: CaOption, format: FormatOption = Format.text) -> None:
    """List the servers and the devices of the roster.

    Example: mycelia enrol list --ca operator/
    """
    now = _now()
    with _open(ca) as authority:
        roster = authority.roster
    servers = [
        {"server": entry.name, "not_after": entry.not_after, "state": _state(entry.not_after, now)}
        for entry in roster.servers
    ]
    newest = {entry.client: entry for entry in roster.clients}
    clients = [
        {
            "client": entry.client,
            "name": entry.name,
            "groups": list(entry.groups),
            "issuer": entry.issuer.value,
            "not_after": entry.not_after,
            "state": "revoked"
            if entry.client in roster.revoked
            else _state(entry.not_after, now)
            if entry is newest[entry.client]
            else "until renewed",
        }
        for entry in roster.clients
    ]
    if format is Format.json:
        print_json(
            {"epoch": roster.epoch, "not_after": roster.expires, "servers": servers, "clients": clients}
        )
        return
    _table(servers)
    if servers and clients:
        print()
    _table(clients)
    if not servers and not clients:
        note(f"the roster of epoch {roster.epoch} lists nobody")


@app.command("check")
def check(
    ca: Annotated[Path | None, typer.Option("--ca", help="The operator's folder.")] = None,
    identity: Annotated[Path | None, typer.Option("--identity", help="A device's identity folder.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="A server's folder.")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Say what expires when, soonest first; from 30 days before its end with a warning.

    Exits with 3 where something is expired, or will be within 7 days.

    Example: mycelia enrol check --ca operator/
    """
    from mycelia.engine.errors import ConfigError

    given = [folder for folder in (ca, identity, keys) if folder is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{len(given)} folders are named",
            rule="one of --ca, --identity and --keys",
            fix="mycelia enrol check --ca operator/",
        )
    now = _now()
    if ca is not None:
        ends = _ends_of_operator(ca)
    elif identity is not None:
        ends = _ends_of_device(identity)
    else:
        ends = _ends_of_server(given[0])
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "not_after": until,
            "days_left": (until - now) // 86_400,
            "state": _state(until, now),
            "fix": fix,
        }
        for what, until, fix in sorted(ends, key=lambda end: end[1])
    ]
    if format is Format.json:
        print_json({"expiries": rows})
    else:
        _table([{name: value for name, value in row.items() if name != "fix"} for row in rows])
    for row in rows:
        if row["state"] != "valid":
            verb = "expired on" if row["state"] == "expired" else "expires on"
            note(f"{row['what']} {verb} {_date(row['not_after'])}; {row['fix']}", "warning")
    if any(row["state"] in ("urgent", "expired") for row in rows):
        raise typer.Exit(THRESHOLD_NOT_MET)


# --- what expires ---------------------------------------------------------------------------------

_End = tuple[str, int, str]
"""What it is, its last second, and what to do about it."""


def _ends_of_operator(folder: Path) -> list[_End]:
    from mycelia.aggregator.identity import expiries

    with _open(folder) as authority:
        ends = expiries(authority.roster, authority.operator)
    at = f"--ca {folder}"
    fixes = {
        "operator": "make a new operator, and enrol everybody anew: mycelia enrol init",
        "roster": f"mycelia enrol renew {at}",
        "server": f"mycelia enrol renew {at} --server tls.crt --out new.crt",
        "client": f"on the device: mycelia enrol request --renew; then here: mycelia enrol renew {at}",
    }
    words = {"operator": "operator key", "roster": "roster epoch"}
    return [
        (f"{words.get(end.kind, end.kind)} {end.name}".rstrip(), end.not_after, fixes[end.kind])
        for end in ends
    ]


def _ends_of_device(folder: Path) -> list[_End]:
    from mycelia.client.identity import DeviceIdentity

    with DeviceIdentity.open(folder) as device:
        operator, keys = device.operator, device.keys
        if not keys:
            device.check(_now())
    fix = f"mycelia enrol request --renew --out {folder}"
    return [
        (f"client {keys[0].certificate.client}", keys[0].certificate.not_after, fix),
        ("operator key", operator.not_after, "ask the operator for a new operator.pub, and enrol anew"),
    ]


def _ends_of_server(folder: Path) -> list[_End]:
    from mycelia.aggregator.identity import ServerKeys

    keys = ServerKeys.open(folder, None)
    fix = f"mycelia enrol renew --ca operator/ --server {folder / 'tls.crt'} --out new.crt"
    return [
        (f"server {keys.name}", keys.certificate.not_after, fix),
        ("operator key", keys.operator.not_after, "make a new operator, and enrol everybody anew"),
    ]


# --- asking ---------------------------------------------------------------------------------------


def _token(server: str | None, file: Path | None, argument: str | None, *, renew: bool) -> bytes:
    """The token in a file, empty where none is needed."""
    from mycelia.engine.errors import ConfigError, DataError
    from mycelia.privacy.secagg.key_files import read_secret

    if argument is not None:
        raise ConfigError(
            "a token on the command line",
            rule="every user of a machine can read its command lines: this token is no secret any more",
            fix="make another one; put it into a file of mode 0600 and give --token-file",
            who="--token",
        )
    if (server is None) != (file is None) or (renew and server is not None):
        raise ConfigError(
            "--server, --token-file and --renew that do not fit together",
            rule="--server needs --token-file; a renewal needs neither, as a client renews by itself",
            fix="give both, or neither and take the request to the operator",
            who="--server",
        )
    if file is None:
        return b""
    text = read_secret(file).strip()
    if not re.fullmatch(rb"[0-9a-f]{64}", text):
        raise DataError(
            "it holds no token",
            rule="one token: 64 digits and letters a to f",
            fix="mycelia enrol token",
            who=str(file),
        )
    return bytes.fromhex(text.decode())


def _device(folder: Path, operator: Path | None, name: str) -> Any:
    """A new identity folder, or one whose request was not answered yet."""
    from mycelia.client.identity import DeviceIdentity
    from mycelia.engine.errors import ConfigError, DataError
    from mycelia.privacy.secagg.certificates import Operator
    from mycelia.privacy.secagg.key_files import read_public

    pem = None if operator is None else read_public(operator)
    pinned = None if pem is None else Operator.read(pem, str(operator))
    if folder.is_dir() and any(folder.iterdir()):
        device = DeviceIdentity.open(folder)
        other_name = name and device.pending is not None and device.request().name != name
        if other_name or (pinned is not None and pinned.key != device.operator.key):
            device.close()
            raise DataError(
                "its request has another name" if other_name else f"its operator is not that of {operator}",
                rule="an identity folder belongs to one operator, and asks for one name",
                fix="leave the name out to ask the same again, or name another folder with --out",
                who=str(folder),
            )
        return device
    if pem is None:
        raise ConfigError(
            "no operator is named",
            rule="a device knows its operator before it asks",
            fix="give --operator operator.pub, the file from the operator's folder",
            who="--operator",
        )
    return DeviceIdentity.create(folder, pem, name)


def _ask(server: str, operator: bytes, asked: pb.EnrolRequest) -> pb.EnrolReply:
    """Ask at the enrolment port of a server whose certificate is the operator's."""
    import grpc

    from mycelia.aggregator.wire.frames import decode_enrol_reply, encode
    from mycelia.engine.errors import ProtocolError

    credentials = grpc.ssl_channel_credentials(root_certificates=operator)
    with grpc.secure_channel(server, credentials) as channel:
        call = channel.unary_unary(
            "/mycelia.Enrolment/Enrol", request_serializer=encode, response_deserializer=decode_enrol_reply
        )
        try:
            reply: pb.EnrolReply = call(asked, timeout=_ANSWER_S)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
            away = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            raise ProtocolError(
                f"it did not enrol this device: {code.name}, {details!r}",
                rule="the enrolment port of a server whose certificate this operator signed",
                fix="check host, port and operator.pub, and that there are unused tokens: without, the port"
                " is closed; then run the command again, it asks the same again"
                if away
                else "ask the operator; the keys in the folder can be used for another try",
                who=server,
            ) from error
    return reply


# --- small ----------------------------------------------------------------------------------------


def _open(folder: Path) -> Authority:
    from mycelia.aggregator.identity_authority import Authority

    return Authority.open(folder)


def _read_request(path: Path) -> Any:
    from mycelia.privacy.secagg.enrolment import MAX_ENROLMENT, Request
    from mycelia.privacy.secagg.key_files import read_public

    return Request.decode(read_public(path, MAX_ENROLMENT))


def _refuse_existing(path: Path) -> None:
    """Before anything is signed; the write itself looks again."""
    from mycelia.engine.errors import DataError

    if path.exists():
        raise DataError(
            "there is something already",
            rule="keys and documents are never overwritten",
            fix="name another file with --out",
            who=str(path),
        )


def _answer(authority: Authority, reply: bytes, entry: ClientEntry, out: Path, format: Format) -> None:
    from mycelia.privacy.secagg.key_files import PUBLIC, write_file

    write_file(out, reply, PUBLIC)
    facts = {
        "client": entry.client,
        "name": entry.name,
        "issuer": entry.issuer.value,
        "not_after": entry.not_after,
        "reply": str(out),
        "roster": str(authority.roster_path),
        "epoch": authority.roster.epoch,
    }
    _print(facts, format)


def _print_request(identity: Any, format: Format) -> None:
    facts = {"identity": str(identity.folder), "client": identity.client, "request": str(identity.pending)}
    _print(facts, format)


def _enrolled(identity: Any, until: int) -> dict[str, Any]:
    return {
        "client": identity.client,
        "identity": str(identity.folder),
        "not_after": until,
        "epoch": identity.epoch,
    }


def _print(facts: dict[str, Any], format: Format) -> None:
    if format is Format.json:
        print_json(facts)
        return
    print_pairs([(name.replace("_", " "), _cell(name, value)) for name, value in facts.items()])


def _table(rows: list[dict[str, Any]]) -> None:
    if rows:
        numeric = {place for place, name in enumerate(rows[0]) if name in ("client", "days_left")}
        cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
        print_table([name.replace("_", " ") for name in rows[0]], cells, numeric)


def _cell(name: str, value: Any) -> str:
    if name.endswith("not_after"):
        return _date(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _state(not_after: int, now: int) -> str:
    from mycelia.privacy.secagg.certificates import urgency

    return urgency(not_after, now) or "valid"


def _date(seconds: int) -> str:
    from mycelia.privacy.secagg.certificates import date

    return date(seconds)


def _life(text: str) -> int:
    from mycelia.engine.errors import ConfigError

    found = _LIFE.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= 30 * _SECONDS["d"]:
        raise ConfigError(
            f"a life of {text!r}", rule="a number and s, m, h or d, at most 30d", fix="24h", who="--expires"
        )
    return seconds


def _address(text: str) -> IPv4Address | IPv6Address:
    from ipaddress import ip_address

    from mycelia.engine.errors import ConfigError

    try:
        return ip_address(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no address", rule="IPv4 or IPv6", fix="for a host name give --dns", who="--ip"
        ) from error


def _now() -> int:
    return int(time.time())
