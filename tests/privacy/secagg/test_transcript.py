"""One session of five clients, one of which drops out, against a second derivation of every byte.

The second derivation shares no code with the first: structs by `struct`, hashes by `hashlib`, ciphers and
curves by `cryptography`, polynomials in Python's whole numbers.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.client.history import ClientHistory
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.engine.rng import generator
from mycelia.privacy.secagg.events import (
    ChunkReceived,
    Effect,
    Finish,
    LocalUpdate,
    Received,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry
from mycelia.privacy.secagg.round_config import NoiseBlock, RoundConfig

CLIENTS, SILENT = (1, 2, 3, 4, 5), 4
BITS, PRIME, T = 19, 2**31 - 1, 3
VECTORS = {client: [client, -client, 2**15 - client] for client in CLIENTS}
SEEDS = {client: bytes([16 + client]) * 32 for client in (0, *CLIENTS)}

SESSION_ID = "12029b5e69d0a161d11712594a46223c9631e5d1e34ef4629dd9ddd798cd52c5"
TRANSCRIPT = "28f89d80f7cec243248a3ee4e4427a1d614e87ca049d919bcd575e650f2e4f47"
TRAFFIC = "184c7b656e20296da63ec1342ac345003cb5d957b4724f88f2e5f908a06e42b5"

# --- the second derivation ---

Value = int | bytes | str | Sequence["Value"]


def field(value: Value) -> bytes:
    if isinstance(value, int):
        return struct.pack(">IQ", 8, value)
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return struct.pack(">I", len(value)) + value
    return struct.pack(">I", len(value)) + b"".join(map(field, value))


def pack(*values: Value) -> bytes:
    return b"".join(map(field, values))


def sha(*values: Value) -> bytes:
    return hashlib.sha256(pack(*values)).digest()


def drawn(client: int, number: int, count: int) -> bytes:
    """What a client's generator gives when it is asked for the n-th time."""
    return hashlib.shake_128(b"%d,%d" % (client, number)).digest(count)


def derive(ikm: bytes, label: str, i: int, j: int, session: bytes) -> bytes:
    info = label.encode() + b"\0" + struct.pack(">QQ", min(i, j), max(i, j))
    return HKDF(SHA256(), 32, session, info).derive(ikm)


def agree(private: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def stream(key: bytes, count: int) -> list[int]:
    words = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * count))
    return [word % 2**BITS for word in struct.unpack(f"<{count}I", words)]


def packed(values: Sequence[int]) -> bytes:
    whole = sum((value % 2**BITS) << (BITS * place) for place, value in enumerate(values))
    return whole.to_bytes((BITS * len(values) + 7) // 8, "little")


def signed(kind: str, session: bytes, sender: int, body: bytes) -> bytes:
    key = Ed25519PrivateKey.from_private_bytes(SEEDS[sender])
    signature = key.sign(pack("SA1/sig", kind, session, sender, body))
    return pack("SA1/envelope", kind, session, sender, body, signature)


def bitmap(members: Sequence[int]) -> bytes:
    return bytes([sum(1 << CLIENTS.index(member) for member in members)])


def rebuild(shares: dict[int, bytes]) -> bytes:
    """Interpolation at 0, limb by limb."""
    secret = 0
    points = {x: struct.unpack(">9I", share) for x, share in shares.items()}
    for limb in range(9):
        total = 0
        for x, values in points.items():
            up, down = 1, 1
            for other in points:
                if other != x:
                    up, down = up * other % PRIME, down * (other - x) % PRIME
            total += values[limb] * up * pow(down, -1, PRIME)
        secret += (total % PRIME) << (30 * limb)
    return secret.to_bytes(32, "little")


# --- the session ---

IDENTITIES = {client: Identity(seed) for client, seed in SEEDS.items()}
ROSTER = Roster(
    1,
    100,
    tuple(ClientEntry(client, IDENTITIES[client].public, Issuer.OFFLINE, 0, 100) for client in CLIENTS),
    (ServerEntry("server", IDENTITIES[0].public, 0, 100),),
)
CONFIG = RoundConfig(
    job="frozen", round=6, attempt=1, nonce=bytes(range(32)), model_sha256=b"\1" * 32,
    schema_sha256=b"\2" * 32, task_sha256=b"\3" * 32, roster_sha256=ROSTER.sha256, n_min=3, n_max=5, graph=0,
    k=4, threshold_rule=1, t=T, threat=1, corrupt_ppm=0, dropout_ppm=200_000, bits=BITS, dimension=3,
    slots=(("weight", 1),), frac_bits=16, value_bound=2**15, l2_steps=0, rotation=0, noise=NoiseBlock(),
    deadlines_ms=(1000, 2000, 3000, 4000, 5000), seal=0,
)  # fmt: skip


def source(client: int) -> Callable[[int], bytes]:
    number = 0

    def draw(count: int) -> bytes:
        nonlocal number
        number += 1
        return drawn(client, number - 1, count)

    return draw


Traffic = dict[tuple[str, int, int], bytes]


def session() -> tuple[Traffic, ServerResult]:
    """Kind, sender and receiver of every message to its bytes, chunks behind the header; and the result."""
    task = Task(b"\1" * 32, b"\2" * 32, b"\3" * 32, 3)
    clients = {
        client: SecureSumClient(
            client, IDENTITIES[client], ROSTER, task, unix_time=50, rounding=generator(0, "frozen"),
            past=ClientHistory(), random=source(client),
        )
        for client in CLIENTS
    }  # fmt: skip
    server = SecureSumServer(CONFIG, 3, CLIENTS, IDENTITIES[0], ROSTER, unix_time=50, random=source(0))
    traffic: Traffic = {}
    todo: list[Effect] = server.handle(Tick(0.0))
    results: list[ServerResult] = []
    while todo or not results:
        if not todo:
            todo = server.handle(Tick(server.deadline or 0.0))
        effect = todo.pop(0)
        if isinstance(effect, Finish):
            results.append(effect.result)
        if not isinstance(effect, Send):
            continue
        traffic[kind_of(effect.data), 0, effect.to] = effect.data
        answers = clients[effect.to].handle(Received(0, effect.data))
        if kind_of(effect.data) == "deliver" and effect.to != SILENT:
            update = LocalUpdate(np.array(VECTORS[effect.to]), 1, {})
            answers = clients[effect.to].handle(update)
        for answer in answers:
            if effect.to == SILENT and kind_of(effect.data) == "survivors":
                continue
            if isinstance(answer, Send):
                traffic[kind_of(answer.data), effect.to, 0] = answer.data
                todo += server.handle(Received(effect.to, answer.data))
            if isinstance(answer, SendStream):
                chunks = [bytes(chunk) for chunk in answer.chunks]
                traffic["masked", effect.to, 0] = answer.header + b"".join(chunks)
                todo += server.handle(Received(effect.to, answer.header))
                for number, chunk in enumerate(chunks):
                    todo += server.handle(ChunkReceived(effect.to, number, chunk))
    return traffic, results[0]


def kind_of(data: bytes) -> str:
    """The second field of an envelope."""
    start = 4 + len("SA1/envelope")
    (size,) = struct.unpack_from(">I", data, start)
    return data[start + 4 : start + 4 + size].decode()


def body_of(data: bytes) -> bytes:
    """The fifth field of an envelope."""
    place = 0
    for _ in range(4):
        (size,) = struct.unpack_from(">I", data, place)
        place += 4 + size
    (size,) = struct.unpack_from(">I", data, place)
    return data[place + 4 : place + 4 + size]


def test_a_session_of_five_byte_by_byte() -> None:
    traffic, result = session()
    session_id = sha(
        "SA1/config", 1, "frozen", 6, 1, bytes(range(32)), b"\1" * 32, b"\2" * 32, b"\3" * 32, ROSTER.sha256,
        3, 5, 0, 4, 1, T, 1, 0, 200_000, BITS, 3, [["weight", 1]], 16, 2**15, 0, 0, [0, 0, 0, 0],
        [1000, 2000, 3000, 4000, 5000], 0,
    )  # fmt: skip
    assert session_id == CONFIG.session_id
    assert session_id.hex() == SESSION_ID

    # advertise
    channel = {client: drawn(client, 0, 32) for client in CLIENTS}
    mask = {client: drawn(client, 1, 32) for client in CLIENTS}
    nonces = {client: drawn(client, 2, 16) for client in CLIENTS}
    seeds = {client: drawn(client, 3, 32) for client in CLIENTS}
    adverts = {
        client: pack(
            "SA1/msg/advert", session_id, client, public_of(channel[client]), public_of(mask[client]),
            nonces[client],
        )
        for client in CLIENTS
    }  # fmt: skip
    for client in CLIENTS:
        assert traffic["advert", client, 0] == signed("advert", session_id, client, adverts[client])

    # share
    others = {client: [other for other in CLIENTS if other != client] for client in CLIENTS}
    for client in CLIENTS:
        signatures = {other: signed("advert", session_id, other, adverts[other])[-64:] for other in CLIENTS}
        roll = pack(
            "SA1/msg/roll", list(CLIENTS), [nonces[one] for one in CLIENTS],
            [adverts[other] + signatures[other] for other in others[client]],
        )  # fmt: skip
        assert traffic["roll", 0, client] == signed("roll", session_id, 0, roll)
    u0 = sha("SA1/U0", session_id, list(CLIENTS), [nonces[client] for client in CLIENTS])
    held: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    dealt: dict[int, list[bytes]] = {}
    for owner in CLIENTS:
        body = body_of(traffic["shares", owner, 0])
        commitment = sha("SA1/com", session_id, owner, seeds[owner])
        head = pack("SA1/msg/shares", u0, commitment)
        assert body.startswith(head + struct.pack(">I", 4))
        rest = body[len(head) + 4 :]
        dealt[owner] = [rest[4 + 124 * place : 124 * (place + 1)] for place in range(4)]
        assert traffic["shares", owner, 0] == signed("shares", session_id, owner, head + field(dealt[owner]))
        for index, holder in enumerate(others[owner], 1):
            label = "sa1/chan-lo-hi" if owner < holder else "sa1/chan-hi-lo"
            agreed = agree(channel[owner], public_of(channel[holder]))
            key = derive(agreed, label, owner, holder, session_id)
            context = pack("SA1/share", session_id, u0, owner, holder, index, 4, T)
            sealed, tag_b, tag_s = (dealt[owner][index - 1][a:b] for a, b in ((0, 88), (88, 104), (104, 120)))
            plain = AESGCM(key).decrypt(bytes(12), sealed, context)
            s_share, b_share = plain[:36], plain[36:]
            assert tag_b == sha("SA1/tag", session_id, owner, index, 0, b_share)[:16]
            assert tag_s == sha("SA1/tag", session_id, owner, index, 1, s_share)[:16]
            held[owner, holder] = b_share, s_share
        for chosen in ((1, 2, 3), (2, 3, 4), (1, 2, 4)):
            for which, secret in ((0, seeds[owner]), (1, mask[owner])):
                found = rebuild({x: held[owner, others[owner][x - 1]][which] for x in chosen})
                assert found == secret

    # masked
    alive = [client for client in CLIENTS if client != SILENT]
    u1 = sha("SA1/U1", session_id, bitmap(CLIENTS))
    pairs = {
        (i, j): derive(agree(mask[i], public_of(mask[j])), "sa1/pair", i, j, session_id)
        for i in CLIENTS
        for j in others[i]
    }
    for client in CLIENTS:
        fields = [dealt[owner][others[owner].index(client)] for owner in others[client]]
        deliver = pack("SA1/msg/deliver", bitmap(CLIENTS), others[client], fields)
        assert traffic["deliver", 0, client] == signed("deliver", session_id, 0, deliver)
    for client in alive:
        own = derive(seeds[client], "sa1/self", client, client, session_id)
        words = [1, *VECTORS[client]]
        words = [word + more for word, more in zip(words, stream(own, 4), strict=True)]
        for other in others[client]:
            sign = 1 if client < other else -1
            masks = stream(pairs[client, other], 4)
            words = [word + sign * more for word, more in zip(words, masks, strict=True)]
        data = packed(words)
        header = pack("SA1/msg/masked", u1, len(data), hashlib.sha256(data).digest())
        assert traffic["masked", client, 0] == signed("masked", session_id, client, header) + data
    assert ("masked", SILENT, 0) not in traffic

    # agree
    u2 = sha("SA1/U2", session_id, bitmap(alive))
    survivors = signed("survivors", session_id, 0, pack("SA1/msg/survivors", u0, u1, bitmap(alive)))
    agreement = pack("SA1/msg/agree", u0, u1, u2)
    for client in alive:
        assert traffic["survivors", 0, client] == survivors
        assert traffic["agree", client, 0] == signed("agree", session_id, client, agreement)

    # unmask
    for client in alive:
        near = [other for other in others[client] if other != SILENT]
        signatures = {one: signed("agree", session_id, one, agreement)[-64:] for one in near}
        opening = pack("SA1/msg/open", near[:T], [signatures[one] for one in near[:T]])
        assert traffic["open", 0, client] == signed("open", session_id, 0, opening)
        b_shares = [held[owner, client][0] for owner in near]
        answer = pack("SA1/msg/unmask", b_shares, [held[SILENT, client][1]])
        assert traffic["unmask", client, 0] == signed("unmask", session_id, client, answer)

    # the end
    total = [len(alive), *np.sum([VECTORS[client] for client in alive], axis=0).tolist()]
    assert result.decoded.total.tolist() == total[1:]
    assert (result.decoded.weight, result.survivors) == (4, tuple(alive))
    transcript = sha("SA1/done", session_id, u0, u1, u2, hashlib.sha256(packed(total)).digest(), len(alive))
    assert result.transcript == transcript
    for client in alive:
        assert traffic["done", 0, client] == signed("done", session_id, 0, pack("SA1/msg/done", transcript))
    assert transcript.hex() == TRANSCRIPT
    everything = b"".join(traffic[name] for name in sorted(traffic))
    assert hashlib.sha256(everything).hexdigest() == TRAFFIC
