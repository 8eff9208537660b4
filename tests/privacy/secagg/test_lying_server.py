"""Whatever the server says, and with whomever it colludes, no client's two secrets are opened together."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient
from mycelia.privacy.secagg import keys, messages
from mycelia.privacy.secagg.events import Effect, Received, Tick
from mycelia.privacy.secagg.messages import (
    PHASES,
    SERVER,
    Advert,
    Complaint,
    Config,
    Deliver,
    Done,
    Envelope,
    Message,
    Open,
    Reason,
    Roll,
    RoundConfig,
    Survivors,
)
from tests.privacy.secagg.lying import (
    CLIENTS,
    CORRUPT,
    HONEST,
    IDENTITIES,
    LAST,
    Bench,
    make_roster,
    refused,
    round_config,
    with_key,
)

BASE = round_config()

# --- each attack by itself ---


def begun(phase: str, **named: object) -> Bench:
    """All clients, as far as an honest server would have brought them."""
    bench = Bench(**named)  # type: ignore[arg-type]
    for client in CLIENTS:
        bench.config(client, BASE)
    if phase != "advertise":
        bench.run_on(phase)
    return bench


def made(message: Message | None) -> Message:
    assert message is not None
    return message


def first_roll(bench: Bench) -> Roll:
    roll = bench.roll(1)
    assert roll is not None
    return roll


def first_deliver(bench: Bench) -> Deliver:
    deliver = bench.deliver(1)
    assert deliver is not None
    return deliver


def with_advert(roll: Roll, envelope: Envelope) -> Roll:
    """Another advert in the place of that client's."""
    return replace(
        roll,
        adverts=tuple(envelope if one.sender == envelope.sender else one for one in roll.adverts),
    )


def corrupt_key(name: str, value: Callable[[Bench, Roll], bytes]) -> Callable[[Bench], list[Effect]]:
    def attack(bench: Bench) -> list[Effect]:
        roll = first_roll(bench)
        one = next(advert for advert in roll.adverts if advert.sender == CORRUPT[0])
        return bench.say(1, with_advert(roll, with_key(bench, one, CORRUPT[0], **{name: value(bench, roll)})))

    return attack


def key_of(client: int, name: str) -> Callable[[Bench, Roll], bytes]:
    def value(bench: Bench, roll: Roll) -> bytes:
        found = getattr(Advert.decode(bench.heard[BASE.session_id].adverts[client].body, BASE), name)
        assert isinstance(found, bytes)
        return found

    return value


def unsigned(bench: Bench) -> list[Effect]:
    roll = first_roll(bench)
    return bench.say(1, with_advert(roll, replace(roll.adverts[2], signature=bytes(64))))


def swapped(bench: Bench) -> list[Effect]:
    """The keys of two clients, each under the other's name."""
    roll = first_roll(bench)
    one, two = roll.adverts[:2]
    mixed = (replace(one, body=two.body), replace(two, body=one.body), *roll.adverts[2:])
    return bench.say(1, replace(roll, adverts=mixed))


def foreign(bench: Bench) -> list[Effect]:
    """A neighbour's advert from another session."""
    other = Bench()
    for client in CLIENTS:
        other.config(client, round_config(nonce=9))
    strange = other.heard[round_config(nonce=9).session_id].adverts[3]
    return bench.say(1, with_advert(first_roll(bench), strange))


def crossed(bench: Bench) -> list[Effect]:
    deliver = first_deliver(bench)
    return bench.say(1, replace(deliver, fields=(deliver.fields[1], deliver.fields[0], *deliver.fields[2:])))


def of_another(bench: Bench) -> list[Effect]:
    """What was sealed for client 2."""
    deliver, other = first_deliver(bench), bench.deliver(2)
    assert other is not None
    return bench.say(1, replace(deliver, fields=(*deliver.fields[:1], other.fields[1], *deliver.fields[2:])))


def second_survivors(bench: Bench) -> list[Effect]:
    return bench.say(1, made(bench.survivors(1, without=[3])))


def borrowed(bench: Bench) -> list[Effect]:
    """Signatures of those who are no neighbours: its own, and one twice under two names."""
    opening = bench.opening(1)
    assert opening is not None
    return bench.say(1, replace(opening, signatures=(opening.signatures[1], *opening.signatures[1:])))


def too_few(bench: Bench) -> list[Effect]:
    opening = bench.opening(1)
    assert opening is not None
    return bench.say(1, Open(opening.signers[:4], opening.signatures[:4]))


def for_another_set(bench: Bench) -> list[Effect]:
    """Signatures that were given, for a set that this client never signed."""
    for client in HONEST[1:]:
        bench.say(client, made(bench.survivors(client)))
    bench.say(1, made(bench.survivors(1, without=[3])))
    return bench.say(1, made(bench.opening(1, bench.shown[2].agreement)))


def again_after_release(bench: Bench) -> list[Effect]:
    bench.restart(1)
    return bench.config(1, round_config(attempt=1))


def same_session_again(bench: Bench) -> list[Effect]:
    bench.restart(1)
    return bench.config(1, BASE)


def older_round(bench: Bench) -> list[Effect]:
    bench.config(1, round_config(round=3))
    return bench.config(1, round_config(round=2, attempt=7))


def asked(**changes: object) -> Callable[[Bench], list[Effect]]:
    return lambda bench: bench.config(1, replace(BASE, **changes))  # type: ignore[arg-type]


def stricter(
    policy: ClientPolicy, attack: Callable[[Bench], list[Effect]]
) -> Callable[[Bench], list[Effect]]:
    """The same, against a client with a policy of its own."""

    def attacked(bench: Bench) -> list[Effect]:
        bench.restart(1, policy=policy)
        return attack(bench)

    return attacked


def weak(**changes: int) -> Callable[[Bench], list[Effect]]:
    """A configuration that nobody could make, as the bytes that a liar writes."""

    def attack(bench: Bench) -> list[Effect]:
        lie = object.__new__(RoundConfig)
        lie.__dict__.update({**vars(BASE), **changes})
        lie.__dict__.pop("session_id", None)
        return bench.say(1, Config(lie))

    return attack


def expired(bench: Bench) -> list[Effect]:
    bench.restart(1, unix_time=LAST + 1)
    return bench.config(1, BASE)


def hidden_revocation(bench: Bench) -> list[Effect]:
    """The round is for an older roster, from before client 7 was revoked."""
    bench.restart(1, roster=make_roster(revoked=[7], epoch=2))
    return bench.config(1, BASE)


def older_roster(bench: Bench) -> list[Effect]:
    newer = make_roster(epoch=5)
    bench.restart(1, roster=newer)
    bench.config(1, round_config(roster=newer))
    bench.restart(1)
    return bench.config(1, round_config(round=1))


def revoked_in_roll(bench: Bench) -> list[Effect]:
    """A client that the roster revokes is in the cohort."""
    newer = make_roster(revoked=[7], epoch=2)
    for client in CLIENTS:
        bench.restart(client, roster=newer)
        bench.config(client, round_config(round=1, roster=newer))
    heard = bench.heard[round_config(round=1, roster=newer).session_id]
    advert = Advert(heard.config.session_id, 7, b"\1" * 32, b"\2" * 32, bytes(16))
    heard.adverts[7] = bench.sign_as(7, advert, heard.config.session_id)
    return bench.say(1, first_roll(bench))


def of_a_client(bench: Bench) -> list[Effect]:
    """A message of the server's kind, signed by a client."""
    envelope = keys.sign(first_roll(bench), BASE.session_id, 7, IDENTITIES[7])
    return bench.tell(1, Received(SERVER, envelope.encode()))


ATTACKS: dict[str, tuple[str, Callable[[Bench], list[Effect]], set[Reason]]] = {
    "a second survivor list": ("agree", second_survivors, {Reason.EQUIVOCATION}),
    "a second survivor list after the opening": ("unmask", second_survivors, {Reason.EQUIVOCATION}),
    "swapped keys": ("advertise", swapped, {Reason.BAD_ROLL, Reason.BAD_SIGNATURE}),
    "a mask key of another": ("advertise", corrupt_key("mask_key", key_of(2, "mask_key")), {Reason.BAD_KEY}),
    "a key for another use": (
        "advertise", corrupt_key("mask_key", key_of(2, "channel_key")), {Reason.BAD_KEY}
    ),
    "one's own key back": ("advertise", corrupt_key("channel_key", key_of(1, "mask_key")), {Reason.BAD_KEY}),
    "a mask key of low order": ("advertise", corrupt_key("mask_key", lambda *_: bytes(32)), {Reason.BAD_KEY}),
    "a channel key of low order": (
        "advertise", corrupt_key("channel_key", lambda *_: b"\1" + bytes(31)), {Reason.BAD_KEY}
    ),
    "an unsigned key": ("advertise", unsigned, {Reason.BAD_SIGNATURE}),
    "a neighbour from another session": ("advertise", foreign, {Reason.SPLIT_VIEW}),
    "foreign neighbours": (
        "advertise",
        lambda bench: bench.say(1, replace(first_roll(bench), adverts=first_roll(bench).adverts[1:])),
        {Reason.BAD_ROLL},
    ),
    "another nonce of a neighbour": (
        "advertise",
        lambda bench: bench.say(
            1, replace(first_roll(bench), nonces=(*first_roll(bench).nonces[:-1], bytes(16)))
        ),
        {Reason.BAD_ROLL},
    ),
    "a cohort below n_min": (
        "advertise", lambda bench: bench.say(1, made(bench.roll(1, without=[2, 3, 4]))), {Reason.BAD_ROLL}
    ),
    "crossed shares": ("share", crossed, {Reason.BAD_SHARE}),
    "shares for another client": ("share", of_another, {Reason.BAD_SHARE}),
    "partial delivery": (
        "share",
        lambda bench: bench.say(
            1, replace(first_deliver(bench), owners=(2, 3, 4), fields=first_deliver(bench).fields[:3])
        ),
        {Reason.BAD_ROLL},
    ),
    "too few who shared": (
        "share", lambda bench: bench.say(1, made(bench.deliver(1, without=[2, 3, 4]))), {Reason.BAD_ROLL}
    ),
    "too few survivors": (
        "masked", lambda bench: bench.say(1, made(bench.survivors(1, without=[2, 3, 4]))), {Reason.SPLIT_VIEW}
    ),
    "an early opening": (
        "share", lambda bench: bench.say(1, Open((2, 3), (bytes(64), bytes(64)))), {Reason.WRONG_PHASE}
    ),
    "survivors before the masks": (
        "advertise",
        lambda bench: bench.say(1, Survivors(bytes(32), bytes(32), b"\xff")),
        {Reason.WRONG_PHASE},
    ),
    "an end before the beginning": (
        "share", lambda bench: bench.say(1, Done(bytes(32))), {Reason.WRONG_PHASE}
    ),
    "too few agree": ("agree", too_few, {Reason.INCONSISTENT_SURVIVORS}),
    "borrowed signatures": ("agree", borrowed, {Reason.INCONSISTENT_SURVIVORS}),
    "an opening for a set it never signed": ("masked", for_another_set, {Reason.INCONSISTENT_SURVIVORS}),
    "another attempt after a release": ("unmask", again_after_release, {Reason.ALREADY_RELEASED}),
    "the same session again": ("unmask", same_session_again, {Reason.REPLAY}),
    "an older round": ("advertise", older_round, {Reason.REPLAY}),
    "a weaker threat": ("", asked(threat=0), {Reason.POLICY}),
    "a smaller n_min": (
        "",
        stricter(ClientPolicy(n_min=6), asked(n_min=5)),
        {Reason.POLICY, Reason.WEAK_PARAMETERS},
    ),
    "a threshold that opens both": ("", weak(threshold_rule=0, t=3), {Reason.WEAK_PARAMETERS}),
    "a threshold of one": ("", weak(threshold_rule=0, t=1), {Reason.WEAK_PARAMETERS}),
    "fewer corrupt than there are": (
        "",
        stricter(ClientPolicy(corrupt=0.4), asked(corrupt_ppm=0)),
        {Reason.WEAK_PARAMETERS},
    ),
    "a ring too small": ("", asked(bits=17), {Reason.OVERFLOW}),
    "another model": ("", asked(model_sha256=bytes(32)), {Reason.MODEL_MISMATCH}),
    "another task": ("", asked(task_sha256=bytes(32)), {Reason.MODEL_MISMATCH}),
    "an expired key of the server": ("", expired, {Reason.BAD_SIGNATURE}),
    "a hidden revocation": ("", hidden_revocation, {Reason.BAD_SIGNATURE}),
    "an older roster": ("", older_roster, {Reason.BAD_SIGNATURE}),
    "a revoked client in the cohort": ("", revoked_in_roll, {Reason.BAD_SIGNATURE}),
    "a client that plays the server": ("advertise", of_a_client, {Reason.BAD_SIGNATURE}),
    "a complaint": ("share", lambda bench: bench.say(1, Complaint(2)), {Reason.WRONG_PHASE}),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_is_refused_with_its_reason(name: str) -> None:
    phase, attack, expected = ATTACKS[name]
    bench = begun(phase) if phase else Bench()
    effects = attack(bench)
    assert refused(effects) <= expected
    assert refused(effects)
    bench.check()


def test_without_lies_all_is_released_once() -> None:
    bench = begun("unmask")
    bench.check()
    session = BASE.session_id
    assert {owner for _, owner in bench.released} == set(CLIENTS)
    assert all(len(holders) == len(CLIENTS) - 1 for holders in bench.released.values())
    assert {sessions.copy().pop() for sessions in bench.releases.values()} == {session}


class Forgetful(SecureSumClient):
    """Signs and opens whatever it is asked to: what the bench must find."""

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        session = self._session
        if isinstance(event, Received) and session is not None and session.u2:
            envelope = Envelope.decode(event.data, len(event.data))
            if envelope.kind == "survivors":
                self._expects = Survivors
                for kind in ("survivors", "open"):
                    self._answered.pop(kind, None)
                session.held = dict(self._spare)
        effects = super().handle(event)  # type: ignore[arg-type]
        if session is not None and session.held:
            self._spare = dict(session.held)
        return effects


def test_a_client_that_opens_twice_is_found() -> None:
    bench = begun("unmask", client=Forgetful)
    bench.check()
    bench.run_on("masked")
    for client in HONEST[1:]:
        bench.say(client, made(bench.survivors(client, without=[1])))
    for client in HONEST[1:]:
        bench.say(client, made(bench.opening(client)))
    with pytest.raises(AssertionError, match="rebuild"):
        bench.check()


# --- any schedule ---

CONFIGS = (
    BASE,
    round_config(attempt=1, nonce=1),
    round_config(attempt=2, nonce=1),
    round_config(round=1),
    replace(BASE, nonce=b"\2" * 32),
    replace(BASE, model_sha256=bytes(32)),
    replace(BASE, n_min=7),
)
CLIENT = st.sampled_from(CLIENTS)
FEW = st.lists(CLIENT, max_size=3).map(tuple)


ONE = st.lists(CLIENT, max_size=1).map(tuple)
WHICH = st.sampled_from([0, 0, 0, *range(len(CONFIGS))])
END = st.sampled_from(PHASES[1:])


def seldom(machine: "LyingServer") -> bool:
    """What ends sessions comes in some steps only, or none would get far."""
    return machine.steps % 10 == 9


class LyingServer(RuleBasedStateMachine):
    """Says anything to anybody, in any order; a step is one thing said, or a whole phase."""

    def __init__(self) -> None:
        super().__init__()
        self.bench, self.steps = Bench(), 0
        self.damaged: set[bytes] = set()

    @initialize(which=WHICH, end=END, without=ONE)
    def begin(self, which: int, end: str, without: tuple[int, ...]) -> None:
        self.play(which, end, without, ())

    @precondition(seldom)
    @rule(which=WHICH, end=END, without=ONE, silent=ONE)
    def play(self, which: int, end: str, without: tuple[int, ...], silent: tuple[int, ...]) -> None:
        """A session as an honest server would run it, as far as some phase."""
        self.open_session(which, ())
        self.bench.run_on("masked" if end in ("agree", "unmask") else end)
        if end in ("agree", "unmask"):
            self.bench.run_on(end, without, silent, start="agree")

    @precondition(seldom)
    @rule(client=CLIENT, which=WHICH)
    def say_config(self, client: int, which: int) -> None:
        self.bench.config(client, CONFIGS[which])

    @precondition(seldom)
    @rule(which=WHICH, but=ONE)
    def open_session(self, which: int, but: tuple[int, ...]) -> None:
        for client in CLIENTS:
            if client not in but:
                self.bench.config(client, CONFIGS[which])

    @rule(start=st.integers(0, 3), count=st.integers(1, 4), without=FEW, silent=FEW)
    def go_on(self, start: int, count: int, without: tuple[int, ...], silent: tuple[int, ...]) -> None:
        end = PHASES[1:][min(start + count - 1, 3)]
        self.bench.run_on(end, without, silent, start=PHASES[1:][start])

    @rule(client=CLIENT, without=FEW, change=st.integers(0, 5))
    def say_roll(self, client: int, without: tuple[int, ...], change: int) -> None:
        roll = self.bench.roll(client, without)
        if roll is None:
            return
        if change == 1:
            roll = replace(roll, adverts=roll.adverts[::-1])
        elif change == 2:
            roll = replace(roll, nonces=(*roll.nonces[:-1], bytes(16)))
        elif change == 3:
            roll = replace(roll, adverts=(roll.adverts[0], *roll.adverts[:-1]))
        self.bench.say(client, roll)

    @rule(client=CLIENT, without=FEW, change=st.integers(0, 4))
    def say_deliver(self, client: int, without: tuple[int, ...], change: int) -> None:
        deliver = self.bench.deliver(client, without)
        if deliver is None:
            return
        if change == 1 and deliver.fields:
            deliver = replace(deliver, fields=(deliver.fields[-1], *deliver.fields[:-1]))
        elif change == 2:
            deliver = replace(deliver, owners=deliver.owners[1:], fields=deliver.fields[1:])
        self.bench.say(client, deliver)

    @rule(client=CLIENT)
    def update(self, client: int) -> None:
        self.bench.update(client)

    @rule(client=CLIENT, without=FEW)
    def say_survivors(self, client: int, without: tuple[int, ...]) -> None:
        message = self.bench.survivors(client, without)
        if message is not None:
            self.bench.say(client, message)

    @rule(without=FEW, others=FEW, but=FEW)
    def say_two_sets(self, without: tuple[int, ...], others: tuple[int, ...], but: tuple[int, ...]) -> None:
        """One set of survivors to some, another to the rest, and to each what would open it."""
        for client in CLIENTS:
            message = self.bench.survivors(client, without if client in but else others)
            if message is not None:
                self.bench.say(client, message)
        self.open_all(0)

    @rule(which=st.integers(0, 3))
    def open_all(self, which: int) -> None:
        for client in CLIENTS:
            self.say_open(client, which)

    @rule(client=CLIENT, which=st.integers(0, 3))
    def say_open(self, client: int, which: int) -> None:
        """With the signatures for the set that was shown last, or for another that somebody signed."""
        shown = self.bench.shown.get(client)
        if shown is None:
            return
        others = sorted(self.bench.heard[shown.config.session_id].agreed)
        agreement = others[which % len(others)] if which and others else None
        opening = self.bench.opening(client, agreement)
        if opening is not None:
            self.bench.say(client, opening)

    @rule(client=CLIENT, which=st.integers(0, 10**6))
    def repeat(self, client: int, which: int) -> None:
        if self.bench.said:
            self.bench.say_bytes(client, self.bench.said[which % len(self.bench.said)])

    @rule(client=CLIENT, which=st.integers(0, 10**6), place=st.integers(0, 10**6), bit=st.integers(0, 7))
    def damage(self, client: int, which: int, place: int, bit: int) -> None:
        # What is damaged twice in the same place is whole again.
        whole = [data for data in self.bench.said if data not in self.damaged]
        if whole:
            data = bytearray(whole[which % len(whole)])
            data[place % len(data)] ^= 1 << bit
            self.damaged.add(bytes(data))
            assert refused(self.bench.say_bytes(client, bytes(data)))

    @precondition(seldom)
    @rule(client=CLIENT)
    def restart(self, client: int) -> None:
        self.bench.restart(client)

    @precondition(seldom)
    @rule(client=CLIENT, seconds=st.floats(0, 700))
    def wait(self, client: int, seconds: float) -> None:
        self.bench.time += seconds
        self.bench.tell(client, Tick(self.bench.time))

    @precondition(seldom)
    @rule(client=CLIENT)
    def end(self, client: int) -> None:
        self.bench.say(client, Done(bytes(32)) if client % 2 else messages.Abort(Reason.LATE))

    @invariant()
    def no_owner_gives_both(self) -> None:
        self.steps += 1
        self.bench.check()
        if len(self.bench.said) > 2000:
            del self.bench.said[:1000]


@pytest.mark.parametrize(("runs", "steps"), [(12, 40), pytest.param(1000, 100, marks=pytest.mark.slow)])
def test_whatever_a_server_says(runs: int, steps: int) -> None:
    """10⁵ steps in the long run."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LyingServer,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            derandomize=runs < 100,
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def test_the_bench_gets_far_enough_to_matter() -> None:
    """A schedule with dropouts opens, in the bench too: both kinds of shares leave honest clients."""
    bench = Bench()
    for client in CLIENTS:
        bench.config(client, BASE)
    bench.run_on("masked")
    bench.run_on("unmask", without=[3], silent=[3], start="agree")
    bench.check()
    kinds = {
        owner: {kind for kinds in holders.values() for kind in kinds}
        for (_, owner), holders in bench.released.items()
    }
    assert kinds == {client: {"s" if client == 3 else "b"} for client in CLIENTS}
