"""`mycelia enrol`: operator, server and device, with files and by token, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mycelia.aggregator.enrolment import EnrolmentPort
from mycelia.aggregator.identity import ServerKeys, check_client
from mycelia.aggregator.identity_authority import Authority
from mycelia.aggregator.identity_online import OnlineAuthority
from mycelia.aggregator.identity_tokens import TokenTries
from mycelia.client.identity import DeviceIdentity
from tests.cli.command_line import Done, mycelia

Capture = pytest.CaptureFixture[str]
DAY = 86_400


class Command:
    """Runs `mycelia enrol`."""

    def __init__(self, capsys: Capture, folder: Path) -> None:
        self._capsys, self.folder = capsys, folder

    def __call__(self, *arguments: object) -> Done:
        return mycelia(self._capsys, "enrol", *arguments)

    def json(self, *arguments: object) -> Any:
        done = self(*arguments, "--format", "json")
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    def refused(self, code: int, *arguments: object) -> str:
        """What, rule and fix on stderr, and nothing on stdout."""
        done = self(*arguments)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("error: ")
        assert "Rule: " in done.err
        assert "Traceback" not in done.err
        return done.err


@pytest.fixture
def enrol(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capsys, tmp_path)


@pytest.fixture
def operator(enrol: Command) -> Command:
    assert enrol.json("init", "--ca", "operator")["epoch"] == 1
    return enrol


def travel(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """The commands read a clock that is so much ahead."""
    now = time.time() + days * DAY
    monkeypatch.setattr("mycelia.cli.enrol._now", lambda: int(now))


def test_the_whole_way_with_files(operator: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operator.json(
        "server",
        "--ca",
        "operator",
        "--name",
        "agg-1",
        "--dns",
        "fl.example.org",
        "--ip",
        "10.0.0.1",
        "--out",
        "keys",
    )
    assert (made["server"], made["epoch"]) == ("agg-1", 2)
    assert ServerKeys.open(Path("keys"), int(time.time())).name == "agg-1"
    asked = operator.json(
        "request", "--operator", "operator/operator.pub", "--name", "ward 7", "--out", "identity"
    )
    assert asked == {"identity": "identity", "client": 0, "request": "identity/request-1.bin"}
    assert operator.json("request", "--out", "identity") == asked  # the second run asks the same
    issued = operator.json(
        "issue", asked["request"], "--ca", "operator", "--group", "a", "--group", "b", "--out", "reply.bin"
    )
    assert (issued["client"], issued["name"], issued["issuer"]) == (1, "ward 7", "offline")
    for _ in range(2):
        taken = operator.json("accept", "reply.bin", "--identity", "identity")
        assert (taken["client"], taken["epoch"]) == (1, 3)
    assert "enrolled as client 1" in operator.refused(1, "request", "--out", "identity")

    travel(monkeypatch, 61)
    renewal = operator.json("request", "--renew", "--out", "identity")["request"]
    assert renewal == "identity/request-2.bin"
    assert "it is a renewal" in operator.refused(1, "issue", renewal, "--ca", "operator", "--out", "no.bin")
    assert not Path("no.bin").exists()
    operator.json("renew", renewal, "--ca", "operator", "--out", "reply-2.bin")
    operator.json("accept", "reply-2.bin", "--identity", "identity")
    listed = operator.json("list", "--ca", "operator")
    assert [(entry["client"], entry["state"]) for entry in listed["clients"]] == [
        (1, "until renewed"),
        (1, "valid"),
    ]
    assert listed["clients"][1]["groups"] == ["a", "b"]
    operator.json("renew", "--ca", "operator", "--server", "keys/tls.crt", "--out", "new.crt")
    Path("new.crt").replace("keys/tls.crt")
    assert operator.json("renew", "--ca", "operator")["epoch"] == 6

    with Authority.open(Path("operator")) as ca, DeviceIdentity.open(Path("identity")) as device:
        now = int(time.time()) + 61 * DAY
        assert ServerKeys.open(Path("keys"), now).check(ca.roster, now)
        for keys in device.keys:
            entry = check_client(keys.certificate.der, ca.roster, ca.operator.key, now)
            assert entry.identity_key == keys.identity.public
    assert operator.json("revoke", 1, "--ca", "operator")["revoked"] == [1]
    done = operator("revoke", 1, "--ca", "operator")
    assert (done.code, done.err) == (0, "client 1 was revoked before\n")
    assert "no client has the id 2" in operator.refused(1, "revoke", 1, 2, "--ca", "operator")
    states = [entry["state"] for entry in operator.json("list", "--ca", "operator")["clients"]]
    assert states == ["revoked", "revoked"]


def test_text_is_for_people(operator: Command) -> None:
    done = operator("list", "--ca", "operator")
    assert (done.code, done.out) == (0, "")
    assert "lists nobody" in done.err
    done = operator(
        "request", "--operator", "operator/operator.pub", "--name", "[bold]x", "--out", "identity"
    )
    assert done.out.splitlines()[2].split() == ["request", "identity/request-1.bin"]
    operator("issue", "identity/request-1.bin", "--ca", "operator", "--out", "reply.bin")
    done = operator("list", "--ca", "operator")
    assert done.err == ""
    assert done.out.splitlines()[0].split() == ["client", "name", "groups", "issuer", "not", "after", "state"]
    assert "[bold]x" in done.out


def test_nothing_is_overwritten(operator: Command) -> None:
    before = Path("operator/operator.key").read_bytes()
    assert "already" in operator.refused(1, "init", "--ca", "operator")
    assert Path("operator/operator.key").read_bytes() == before
    operator("request", "--operator", "operator/operator.pub", "--out", "identity")
    Path("reply.bin").write_text("mine")
    arguments = ("issue", "identity/request-1.bin", "--ca", "operator", "--out", "reply.bin")
    assert "already" in operator.refused(1, *arguments)
    assert Path("reply.bin").read_text() == "mine"
    assert operator.json("list", "--ca", "operator")["clients"] == []  # nothing was signed either
    server = ("server", "--ca", "operator", "--dns", "a.example", "--out", "keys", "--name")
    operator.json(*server, "a")
    assert "already" in operator.refused(1, *server, "b")


def test_what_goes_wrong(operator: Command) -> None:
    Path("file").write_text("x")
    Path("other").mkdir()
    Path("other/file").write_text("x")
    cases: list[tuple[int, tuple[object, ...], str]] = [
        (1, ("list", "--ca", "nowhere"), "mycelia enrol init"),
        (1, ("list", "--ca", "file"), "no operator's folder"),
        (1, ("issue", "nowhere", "--ca", "operator", "--out", "r"), "nowhere: it cannot be read"),
        (1, ("issue", "file", "--ca", "operator", "--out", "r"), "it is no enrolment request"),
        (1, ("issue", "operator", "--ca", "operator", "--out", "r"), "no ordinary file"),
        (1, ("accept", "file", "--identity", "nowhere"), "no identity folder"),
        (1, ("request", "--operator", "file", "--out", "identity"), "no operator's certificate"),
        (1, ("request", "--operator", "operator/operator.pub", "--out", "other"), "no identity folder"),
        (2, ("request", "--out", "identity"), "--operator operator.pub"),
        (1, ("request", "--renew", "--out", "identity"), "no identity folder"),
        (2, ("request", "--renew", "--out", "identity", "--name", "x"), "keeps the operator and the name"),
        (2, ("renew", "--ca", "operator", "--days", 10), "for the roster"),
        (2, ("renew", "file", "--ca", "operator"), "with --out"),
        (2, ("renew", "--ca", "operator", "--out", "r"), "with --out"),
        (2, ("renew", "file", "--ca", "operator", "--server", "file", "--out", "r"), "with --out"),
        (1, ("renew", "--ca", "operator", "--server", "file", "--out", "r"), "one certificate in PEM"),
        (2, ("server", "--ca", "operator", "--name", "a", "--out", "keys"), "--dns or --ip"),
        (2, ("server", "--ca", "operator", "--name", "a", "--ip", "x", "--out", "keys"), "no address"),
        (2, ("token", "--ca", "operator", "--expires", "31d"), "at most 30d"),
        (2, ("token", "--ca", "operator", "--expires", "soon"), "24h"),
        (2, ("check",), "--ca, --identity and --keys"),
        (2, ("check", "--ca", "operator", "--keys", "keys"), "--ca, --identity and --keys"),
        (1, ("check", "--keys", "nowhere"), "cannot be used"),
    ]
    for code, arguments, said in cases:
        assert said in operator.refused(code, *arguments), arguments
    assert not Path("r").exists()
    assert not Path("identity").exists()
    assert not Path("keys").exists()
    Path("operator/operator.key").chmod(0o644)
    assert "chmod 600" in operator.refused(1, "list", "--ca", "operator")
    assert operator("revoke", "x", "--ca", "operator").code == 2  # usage
    assert operator("init").code == 2


def test_a_folder_in_use(operator: Command) -> None:
    with Authority.open(Path("operator")):
        assert "another process" in operator.refused(1, "list", "--ca", "operator")
    assert operator("list", "--ca", "operator").code == 0


def test_another_operator(operator: Command) -> None:
    operator.json("init", "--ca", "other")
    operator.json("request", "--operator", "operator/operator.pub", "--out", "identity")
    arguments = ("request", "--operator", "other/operator.pub", "--out", "identity")
    assert "is not that of" in operator.refused(1, *arguments)
    assert "another name" in operator.refused(1, "request", "--out", "identity", "--name", "x")
    assert operator("request", "--out", "identity").code == 0  # and no lock is left
    operator.json("issue", "identity/request-1.bin", "--ca", "other", "--out", "reply.bin")
    assert "not signed by the operator" in operator.refused(
        1, "accept", "reply.bin", "--identity", "identity"
    )


def test_check_warns(operator: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    operator.json("server", "--ca", "operator", "--name", "agg-1", "--dns", "a.example", "--out", "keys")
    operator.json("request", "--operator", "operator/operator.pub", "--out", "identity")
    operator.json("issue", "identity/request-1.bin", "--ca", "operator", "--days", 80, "--out", "reply.bin")
    refusal = operator.refused(1, "check", "--identity", "identity")
    assert "mycelia enrol accept" in refusal
    operator.json("accept", "reply.bin", "--identity", "identity")
    for days, code, states in (
        (0, 0, {"client 1": "valid", "server agg-1": "valid", "roster epoch 3": "valid"}),
        (51, 0, {"client 1": "soon", "server agg-1": "valid"}),
        (74, 3, {"client 1": "urgent", "server agg-1": "soon"}),
        (81, 3, {"client 1": "expired", "server agg-1": "soon"}),
    ):
        travel(monkeypatch, days)
        done = operator("check", "--ca", "operator", "--format", "json")
        found = {row["what"]: row for row in json.loads(done.out)["expiries"]}
        assert done.code == code
        assert states.items() <= {what: row["state"] for what, row in found.items()}.items()
        assert found["operator key"]["state"] == "valid"
        warned = {what for what, row in found.items() if row["state"] != "valid"}
        assert done.err.count("warning: ") == len(warned)
        done = operator("check", "--identity", "identity")
        assert (done.code, "client 1" in done.out) == (code, True)
        assert ("mycelia enrol request --renew --out identity" in done.err) == (days > 0)
        assert operator("check", "--keys", "keys").code == 0
    assert "client 1 expired on" in operator("check", "--ca", "operator").err


# --- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_shown_once(operator: Command) -> None:
    done = operator("token", "--ca", "operator", "--count", 3, "--expires", "2h")
    tokens = done.out.split()
    assert (done.code, len(set(tokens)), {len(token) for token in tokens}) == (0, 3, {64})
    kept = Path("operator/tokens.json").read_text()
    assert not any(token in kept + done.err for token in tokens)
    made = operator.json("token", "--ca", "operator")
    assert len(made["tokens"]) == 1
    assert abs(made["not_after"] - time.time() - DAY) < 600


def test_no_token_on_the_command_line(operator: Command) -> None:
    (token,) = operator.json("token", "--ca", "operator")["tokens"]
    arguments = ("--operator", "operator/operator.pub", "--out", "identity", "--server", "localhost:1")
    said = operator.refused(2, "request", *arguments, "--token", token)
    assert "--token-file" in said
    assert token not in said
    Path("t.txt").write_text(f"{token}\n")
    Path("t.txt").chmod(0o644)
    assert "chmod 600" in operator.refused(1, "request", *arguments, "--token-file", "t.txt")
    assert "give both" in operator.refused(2, "request", *arguments)
    Path("t.txt").chmod(0o600)
    for wrong in ("", token[:-1], token.upper(), f"{token} {token}"):
        Path("t.txt").write_text(wrong)
        assert "no token" in operator.refused(1, "request", *arguments, "--token-file", "t.txt")
    assert not Path("identity").exists()


class Port:
    """The enrolment port of a server, in a thread of its own as the command waits for the answer.

    Attributes:
        number: where it listens.
        rosters: the documents that the server was given.
    """

    def __init__(self) -> None:
        self.number, self.rosters = 0, list[bytes]()
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(30)

    def wait_closed(self) -> None:
        asyncio.run_coroutine_threadsafe(self._port.wait_for(False), self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        authority = OnlineAuthority(Path("operator"), self._take)
        keys = ServerKeys.open(Path("keys"), int(time.time()))
        self._port = EnrolmentPort(keys, authority, tries=TokenTries(100))
        self.number = await self._port.start("localhost:0")
        self._ready.set()
        await self._end.wait()
        await self._port.stop()
        await authority.close()

    async def _take(self, document: bytes) -> None:
        self.rosters.append(document)


@pytest.fixture
def port(operator: Command) -> Iterator[Port]:
    operator.json("server", "--ca", "operator", "--name", "agg-1", "--dns", "localhost", "--out", "keys")
    made = Port()
    yield made
    made.close()


def test_enrolment_by_token(operator: Command, port: Port) -> None:
    first, second = operator.json("token", "--ca", "operator", "--count", 2)["tokens"]
    token = operator.folder / "t.txt"
    token.touch(0o600)

    def arguments(out: str, operator_folder: str = "operator") -> tuple[object, ...]:
        at = ("--server", f"localhost:{port.number}", "--token-file", token)
        return ("request", *at, "--operator", f"{operator_folder}/operator.pub", "--out", out)

    (spare,) = operator.json("token", "--ca", "operator")["tokens"]  # so that the port stays open
    token.write_text("00" * 32)
    assert "BAD_TOKEN" in operator.refused(1, *arguments("identity"))
    token.write_text(first)
    enrolled = operator.json(*arguments("identity"))  # with the keys of the first try
    assert (enrolled["client"], enrolled["epoch"]) == (1, 3)
    assert "enrolled as client 1" in operator.refused(1, *arguments("identity"))
    assert "BAD_TOKEN" in operator.refused(1, *arguments("identity-2"))  # it is used
    token.write_text(second)
    assert operator.json(*arguments("identity-2"))["client"] == 2
    issuers = [entry["issuer"] for entry in operator.json("list", "--ca", "operator")["clients"]]
    assert issuers == ["online", "online"]
    assert port.rosters == [*port.rosters[:1], Path("operator/roster.bin").read_bytes()]
    operator.json("init", "--ca", "other")
    said = operator.refused(1, *arguments("identity-3", "other"))  # a server of another operator
    assert "UNAVAILABLE" in said
    assert "operator.pub" in said
    token.write_text(spare)
    assert operator.json(*arguments("identity-4"))["client"] == 3
    port.wait_closed()  # the last token is used
    said = operator.refused(1, *arguments("identity-5"))
    assert "UNAVAILABLE" in said
    assert "unused tokens" in said
