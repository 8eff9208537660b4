"""No secret of a secure sum is in a journal, a log, an event, an error or a message before its time."""

import base64
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mycelia.aggregator.secagg import SecureSumServer
from mycelia.client.secagg import SecureSumClient
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Abort, Effect, Persist, Refuse
from mycelia.privacy.secagg.messages import (
    Complaint,
    Done,
    Masked,
    Reason,
    Shares,
    Survivors,
    Unmask,
)
from mycelia.simulations.secure_sum_journals import FileJournals, Sink
from mycelia.simulations.secure_sums import InFlight, Keys, SecureSumAborted, SecureSumResult, Wire
from tests.privacy.secagg.leaks import Secrets, collected
from tests.privacy.secagg.sums import run_sum

VECTORS = np.random.default_rng(4).integers(-(2**14), 2**14, (7, 29))
NOISE = {"mechanism": "skellam", "variance": 20_000, "corrupt": 1}
SETTINGS = SecureSumConfig(n_min=5, corrupt=0.1, dropout=0.2, clip=4.0, noise=NOISE)
LOG = logging.getLogger("mycelia.test")


class Kept(FileJournals):
    """Journals of sessions stay as they were at the end."""

    def end(self, sink: Sink) -> None:
        sink.close()


class Talking:
    """Logs all that a driver may: phases, errors, records and outcomes; and itself."""

    def handle(self, event: object) -> list[Effect]:
        effects = super().handle(event)  # type: ignore[misc]
        LOG.debug("%r in %s: %r", self, self.phase, event)  # type: ignore[attr-defined]
        LOG.debug("%r", getattr(self, "_session", None))
        for effect in effects:
            LOG.debug("%r", effect)
            if isinstance(effect, Refuse | Abort):
                LOG.debug("%s", "".join(traceback.format_exception(effect.error)))
        return effects  # type: ignore[no-any-return]


class TalkingServer(Talking, SecureSumServer):
    pass


class TalkingClient(Talking, SecureSumClient):
    pass


def complaining(flight: InFlight, keys: Keys) -> InFlight:
    if isinstance(flight.message, Masked) and flight.sender == 2:
        return replace(flight, raw=keys.sign(Complaint(3), 2), chunks=())
    return flight


def cheating(flight: InFlight, keys: Keys) -> InFlight:
    message = flight.message
    if isinstance(message, Unmask) and flight.sender == 2:
        wrong = (bytes(36), *message.b_shares[1:])
        return replace(flight, raw=keys.sign(replace(message, b_shares=wrong), 2))
    if isinstance(message, Survivors) and flight.receiver == 4:
        return replace(flight, raw=keys.sign(replace(message, u2=b"\x37"), "server"))
    return flight


def misdealing(flight: InFlight, keys: Keys) -> InFlight:
    if isinstance(flight.message, Shares) and flight.sender == 2:
        return replace(flight, raw=keys.sign(replace(flight.message, commitment=bytes(32)), 2))
    return flight


SCHEDULES: dict[str, dict[str, object]] = {
    "nobody leaves": {},
    "one leaves in each phase": {"drops": {1: "share", 3: "masked"}},
    "late and half uploads": {"drops": {3: "masked:late", 5: "masked:partial"}},
    "too few": {"drops": {1: "masked", 2: "masked", 3: "masked"}},
    "a server that stops": {"drops": {3: "masked"}, "crash": {"server": "SNAPSHOT"}},
    "a server that stops again": {"drops": {3: "masked"}, "crash": {"server": "CHARGED"}},
    "a client that stops": {"crash": {4: "agree"}},
    "a complaint": {"wire": complaining, "corrupt": [2], "attempts": 2},
    "lies on both sides": {"wire": cheating, "corrupt": [2]},
    "another commitment": {"wire": misdealing, "corrupt": [2]},
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file with all that anybody logs."""
    path = tmp_path / "log.txt"
    handler, root = logging.FileHandler(path), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield path
    root.setLevel(level)
    root.removeHandler(handler)
    handler.close()


def everything(folder: Path) -> bytes:
    """All files, those with a dot and those of the log included."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def play(folder: Path, name: str) -> tuple[Secrets, SecureSumResult | SecureSumAborted]:
    actors = {**dict.fromkeys(range(1, 8), TalkingClient), "server": TalkingServer}
    journals = Kept(folder, range(1, 8))
    with collected() as secrets:
        found = run_sum(journals, VECTORS, SETTINGS, actors=actors, **SCHEDULES[name])  # type: ignore[arg-type]
    journals.close()
    LOG.debug("%r", found if isinstance(found, SecureSumAborted) else found.faults)
    return secrets, found


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_secret_is_left_behind(
    name: str, tmp_path: Path, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets, found = play(tmp_path, name)
    assert set(secrets.bytes_) >= {
        "agreement", "agreement key", "identity", "input of sa1/pair", "key sa1/pair", "key sa1/chan-lo-hi",
        "key sa1/self", "mask key", "mask stream", "share", "unmasked vector",
    }  # fmt: skip
    assert set(secrets.arrays) == {"unmasked vector", "noise"}
    if isinstance(found, SecureSumResult):
        assert found.exact
        assert "rebuilt secret" in secrets.bytes_
    told = capfd.readouterr()
    hay = everything(tmp_path) + (told.out + told.err).encode()
    assert log.stat().st_size > 10_000
    assert secrets.find(hay) == set()


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "raw": bytes,
    "hex": lambda secret: secret.hex().encode(),
    "upper hex": lambda secret: b"a" + secret.hex().upper().encode(),
    "base64": base64.b64encode,
    "base64 after a byte": lambda secret: base64.b64encode(b"?" + secret),
    "base64 after two bytes": lambda secret: base64.urlsafe_b64encode(b"??" + secret),
    "escapes": lambda secret: repr(secret).encode(),
    "numbers": lambda secret: str(list(secret)).encode(),
    "a part": lambda secret: secret[3:15],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Secrets, bytes]:
    folder = tmp_path_factory.mktemp("played")
    secrets, _ = play(folder, "one leaves in each phase")
    return secrets, everything(folder)


@pytest.mark.parametrize("form", FORMS)
def test_a_planted_secret_is_found(form: str, played: tuple[Secrets, bytes]) -> None:
    secrets, hay = played
    for kind in secrets.bytes_.values():
        secret = sorted(kind)[0][:36]
        assert secrets.find(hay[:1000] + b" " + FORMS[form](secret) + b"\n" + hay[1000:2000])


def test_a_planted_vector_is_found(played: tuple[Secrets, bytes]) -> None:
    secrets, _ = played
    for name, arrays in secrets.arrays.items():
        for planted in (
            arrays[0].tobytes(),
            arrays[1].astype(np.float32).tobytes(),
            str(arrays[2].tolist()).encode(),
            " ".join(map(str, arrays[3])).encode(),
        ):
            assert name in secrets.find(b"before " + planted + b" after")


@pytest.mark.parametrize("kind", ["RECEIPT", "AGREE", "RESULT"])
def test_a_server_that_writes_a_secret_down_is_found_out(kind: str, tmp_path: Path) -> None:
    class Careless(SecureSumServer):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            for place, effect in enumerate(effects):
                if isinstance(effect, Persist) and effect.record.kind == kind:
                    more = next(iter(secrets.bytes_["share"])).hex().encode()
                    effects[place] = Persist(replace(effect.record, body=effect.record.body + more))
            return effects

    journals = Kept(tmp_path, range(1, 8))
    with collected() as secrets:
        run_sum(journals, VECTORS, SETTINGS, actors={"server": Careless})
    journals.close()
    assert secrets.find(everything(tmp_path)) == {"share"}


def listening(kept: list[InFlight]) -> Wire:
    def wire(flight: InFlight, keys: Keys) -> InFlight:
        kept.append(flight)
        return flight

    return wire


def test_nothing_leaves_before_survivors_agreed() -> None:
    kept: list[InFlight] = []
    with collected() as secrets:
        found = run_sum(vectors=VECTORS, config=SETTINGS, drops={3: "masked"}, wire=listening(kept))
    assert isinstance(found, SecureSumResult)
    before = [flight for flight in kept if not isinstance(flight.message, Unmask)]
    hay = b"".join(flight.raw + b"".join(flight.chunks) for flight in before)
    assert secrets.find(hay) == set()
    opened = [flight for flight in kept if isinstance(flight.message, Unmask)]
    assert secrets.find(b"".join(flight.raw for flight in opened)) == {"share"}
    first = next(place for place, flight in enumerate(kept) if isinstance(flight.message, Unmask))
    assert sum(isinstance(flight.message, Survivors) for flight in kept[:first]) == 7  # all of U1 are told


def test_the_outcome_is_all_that_stays(tmp_path: Path) -> None:
    journals = FileJournals(tmp_path, range(1, 8))
    with collected() as secrets:
        found = run_sum(journals, VECTORS, SETTINGS, drops={3: "masked"})
    journals.close()
    hay = everything(tmp_path / "server")
    assert isinstance(found, SecureSumResult)
    assert bytes.fromhex(found.transcript_sha256) in hay
    assert secrets.find(hay) == set()


def test_errors_and_outcomes_have_no_values_in_them() -> None:
    found = run_sum(vectors=VECTORS, config=SETTINGS, wire=misdealing, corrupt=[2])
    assert isinstance(found, SecureSumAborted)
    assert found.reason == Reason.SHARE_MISMATCH
    numbers = "".join(letter if letter.isdigit() else " " for letter in str(found)).split()
    assert all(int(number) < 100 for number in numbers)
    assert Done(bytes(32)).KIND not in str(found)
