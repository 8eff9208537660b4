"""Keys of the secure sum: published vectors, an HKDF written out once more, the protocol's frozen values."""

import hmac
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

import cryptography_vectors
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.poly1305 import Poly1305
from hypothesis import given
from hypothesis import strategies as st

from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.keys import AgreementKey, Identity, Sealer
from mycelia.privacy.secagg.messages import Done, Reason, Seal, SecureSumError, digest, struct

SESSION = bytes.fromhex("1b121acdbf45d0a7cd7573d006604038a2e1e563eea69d23545933758ffef7f7")
AGREED = bytes.fromhex("9663aa1da97e848a914a436d04163dfbb89178f107f1b5b77ed3854203382854")
PRIME = 2**255 - 19
SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)


def records(name: str) -> Iterator[dict[str, str]]:
    """The records of a file of vectors: lines `name = value`, a new record at each count."""
    record: dict[str, str] | None = None
    with cryptography_vectors.open_vector_file(name, "r") as file:
        for line in file:
            field, equals, value = line.partition("=")
            if field.strip().lower() == "count":
                if record is not None:
                    yield record
                record = {}
            elif equals and record is not None and not line.startswith("["):
                record[field.strip().lower()] = value.strip()
    if record:
        yield record


# --- X25519 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "point", "expected"),
    [  # RFC 7748 §5.2
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_x25519(scalar: str, point: str, expected: str) -> None:
    assert AgreementKey(bytes.fromhex(scalar)).agree(bytes.fromhex(point)).hex() == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [  # RFC 7748 §5.2
        (1, "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"),
        (1000, "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"),
        pytest.param(
            10**6, "7c3911e0ab2586fd864497297e575e6f3bc601c0883c30df5f4dd2d24f665424", marks=pytest.mark.slow
        ),
    ],
)
def test_x25519_iterated(rounds: int, expected: str) -> None:
    scalar = point = (9).to_bytes(32, "little")
    for _ in range(rounds):
        scalar, point = AgreementKey(scalar).agree(point), scalar
    assert scalar.hex() == expected


def test_x25519_agreement() -> None:
    # RFC 7748 §6.1
    alice = AgreementKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = AgreementKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.agree(bob.public).hex() == bob.agree(alice.public).hex() == shared


# u of the points of order 1, 2, 4 and 8 on the curve and its twist (D. J. Bernstein, cr.yp.to/ecdh.html)
EIGHTH = [
    int.from_bytes(bytes.fromhex(text), "little")
    for text in (
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    )
]
LOW = [0, 1, PRIME - 1, *EIGHTH]
ENCODINGS = [  # every 256-bit number that means one of them: the top bit is ignored, and p counts as 0
    number + top
    for number in [*LOW, *(low + PRIME for low in LOW if low + PRIME < 2**255)]
    for top in (0, 2**255)
]


def test_the_points_are_of_low_order() -> None:
    def doubled(u: int) -> int:
        """RFC 7748 appendix A: u of twice a point, for v² = u³ + 486662 u² + u."""
        below = 4 * u * (u * u + 486662 * u + 1) % PRIME
        return (u * u - 1) ** 2 * pow(below, -1, PRIME) % PRIME if below else 0

    assert {doubled(u) for u in EIGHTH} <= {1, PRIME - 1}
    assert {doubled(u) for u in (1, PRIME - 1)} == {0}
    assert len(set(ENCODINGS)) == 14


@pytest.mark.parametrize("number", ENCODINGS)
def test_points_of_low_order_are_refused(number: int) -> None:
    draw = random.Random(1)
    for _ in range(4):
        with pytest.raises(SecureSumError) as caught:
            AgreementKey(draw.randbytes(32)).agree(number.to_bytes(32, "little"), client=7)
        assert (caught.value.reason, caught.value.client) == (Reason.BAD_KEY, 7)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_have_32_bytes(size: int) -> None:
    with pytest.raises(SecureSumError, match="BAD_KEY"):
        AgreementKey(bytes(range(32))).agree(bytes([9]) * size)
    with pytest.raises(ValueError, match="32"):
        AgreementKey(bytes(size))
    with pytest.raises(ValueError, match="32"):
        Identity(bytes(size))


# --- derived keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_hkdf(number: int) -> None:
    # RFC 5869 A.1 to A.3
    vector = list(records("KDF/rfc-5869-HKDF-SHA256.txt"))[number]
    salt, info, ikm, okm = (bytes.fromhex(vector[name]) for name in ("salt", "info", "ikm", "okm"))
    assert HKDF(SHA256(), int(vector["l"]), salt, info).derive(ikm) == okm
    assert hkdf(ikm, salt, info)[: len(okm)] == okm[:32]


def hkdf(ikm: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 §2, one block of output."""
    extracted = hmac.digest(salt or bytes(32), ikm, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


@given(
    st.binary(min_size=1, max_size=64),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(get_args(keys.Label)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_kdf(ikm: bytes, session: bytes, label: keys.Label, i: int, j: int) -> None:
    low, high = sorted((i, j))
    info = label.encode() + b"\0" + low.to_bytes(8, "big") + high.to_bytes(8, "big")
    assert keys.kdf(ikm, session, label, i, j) == hkdf(ikm, session, info)
    assert keys.kdf(ikm, session, label, j, i) == keys.kdf(ikm, session, label, i, j)


def test_the_frozen_keys() -> None:
    first, second = AgreementKey(bytes(range(32))), AgreementKey(bytes(range(32, 64)))
    assert first.agree(second.public) == second.agree(first.public) == AGREED
    pair = keys.kdf(AGREED, SESSION, "sa1/pair", 9, 4)
    assert pair.hex() == "1912ad427da2effe8c027a692515d2797b3ae6d41e8bc465bbaa82b303d6faeb"
    everybody = b"".join(client.to_bytes(8, "big") + bytes([client]) * 16 for client in range(1, 11))
    graph = keys.kdf(everybody, SESSION, "sa1/graph", 0, 0)
    assert graph.hex() == "9359b390ea8181533488a8162d99d8fd6c4a209d29772bebe6b5cbf29363cc00"


def test_no_two_keys_are_one() -> None:
    """Each argument changes the key: session, label, either id, and what it is derived from."""
    ikms, sessions = (AGREED, bytes(32)), (SESSION, bytes(32))
    pairs = [(1, 1), (1, 2), (2, 2), (1, 258), (0, 0)]
    made = [
        keys.kdf(*some, *pair) for some in product(ikms, sessions, get_args(keys.Label)) for pair in pairs
    ]
    assert len(set(made)) == len(made) == 120
    assert AGREED not in made


def test_an_unknown_use_has_no_key() -> None:
    with pytest.raises(KeyError):
        keys.kdf(AGREED, SESSION, "sa1/other", 1, 2)  # type: ignore[arg-type]


def test_channels_have_a_direction() -> None:
    there, back = keys.channel_key(AGREED, SESSION, 4, 9), keys.channel_key(AGREED, SESSION, 9, 4)
    assert there == keys.kdf(AGREED, SESSION, "sa1/chan-lo-hi", 4, 9)
    assert back == keys.kdf(AGREED, SESSION, "sa1/chan-hi-lo", 4, 9)
    assert there != back


# --- sealing --------------------------------------------------------------------------------------


def test_gcm() -> None:
    """NIST CAVP, AES-256 with 96-bit nonces and full tags: encryption, then decryption with its failures."""
    seen = 0
    for vector in records("ciphers/AES/GCM/gcmEncryptExtIV256.rsp"):
        key, nonce, plain, data, out, tag = (
            bytes.fromhex(vector[name]) for name in ("key", "iv", "pt", "aad", "ct", "tag")
        )
        if len(nonce) == 12 and len(tag) == 16:
            assert AESGCM(key).encrypt(nonce, plain, data) == out + tag
            assert AESGCM(key).decrypt(nonce, out + tag, data) == plain
            seen += 1
    assert seen > 300


@pytest.mark.parametrize(
    ("plain", "sealed"),
    [  # McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 13 and 14: nonce of zeros
        ("", "530f8afbc74536b9a963b4f1c4cb738b"),
        ("00" * 16, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
    ],
)
def test_the_sealer_is_gcm(plain: str, sealed: str) -> None:
    assert Sealer(bytes(32)).seal(bytes.fromhex(plain), b"").hex() == sealed
    assert Sealer(bytes(32)).open_(bytes.fromhex(sealed), b"").hex() == plain


def test_chacha20() -> None:
    # RFC 8439 §2.4.2
    key, counter = bytes(range(32)), (1).to_bytes(4, "little")
    nonce = counter + bytes.fromhex("000000000000004a00000000")
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    assert encryptor.update(SUNSCREEN).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


def test_chacha20_poly1305() -> None:
    # RFC 8439 §2.8.2
    key, nonce = bytes(range(0x80, 0xA0)), bytes.fromhex("070000004041424344454647")
    sealed = ChaCha20Poly1305(key).encrypt(nonce, SUNSCREEN, bytes.fromhex("50515253c0c1c2c3c4c5c6c7"))
    assert sealed.hex() == (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
        "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b6116"
        "1ae10b594f09e26a7e902ecbd0600691"
    )


def test_the_sealer_is_chacha20_poly1305() -> None:
    """Composed of cipher and authenticator as RFC 8439 §2.8 does it, with a nonce of zeros."""
    key, plain, context = bytes(range(32)), bytes(range(72)), b"context"

    def stream(block: int) -> bytes:
        nonce = block.to_bytes(4, "little") + bytes(12)
        return Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(128))

    encrypted = bytes(a ^ b for a, b in zip(plain, stream(1), strict=False))
    padded = [part + bytes(-len(part) % 16) for part in (context, encrypted)]
    lengths = len(context).to_bytes(8, "little") + len(encrypted).to_bytes(8, "little")
    tag = Poly1305.generate_tag(stream(0)[:32], b"".join(padded) + lengths)
    assert Sealer(key, Seal.CHACHA20_POLY1305).seal(plain, context) == encrypted + tag


@pytest.mark.parametrize("seal", Seal)
def test_sealing(seal: Seal) -> None:
    key, plain, context = AGREED, bytes(range(72)), b"context"
    sender = Sealer(key, seal)
    sealed = sender.seal(plain, context)
    assert len(sealed) == 88
    with pytest.raises(RuntimeError, match="second message"):
        sender.seal(plain, context)
    with pytest.raises(RuntimeError, match="second message"):
        sender.seal(b"", b"")
    receiver = Sealer(key, seal)
    assert receiver.open_(sealed, context) == plain
    other = Seal(1 - seal)
    attempts = [
        (receiver, sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :], context)
        for place in range(88)
    ]
    attempts += [
        (receiver, sealed[:-1], context),
        (receiver, b"", context),
        (receiver, sealed + b"\0", context),
    ]
    attempts += [(receiver, sealed, b"contexT"), (receiver, sealed, b"")]
    attempts += [(Sealer(bytes(32), seal), sealed, context), (Sealer(key, other), sealed, context)]
    for opener, data, about in attempts:
        with pytest.raises(SecureSumError) as caught:
            opener.open_(data, about, owner=3)
        assert (caught.value.reason, caught.value.owner) == (Reason.BAD_SHARE, 3)


@pytest.mark.parametrize(("size", "seal"), [(16, 0), (24, 0), (31, 0), (33, 1), (32, 2)])
def test_only_256_bit_keys_and_known_ciphers(size: int, seal: int) -> None:
    with pytest.raises(ValueError, match="cipher"):
        Sealer(bytes(size), seal)


U64 = st.integers(0, 2**64 - 1)
HASHES = st.binary(min_size=32, max_size=32)


@given(HASHES, HASHES, st.tuples(U64, U64, U64, U64, U64))
def test_the_context_of_sealed_shares(
    session: bytes, u0: bytes, numbers: tuple[int, int, int, int, int]
) -> None:
    assert keys.share_context(session, u0, *numbers) == struct("SA1/share", session, u0, *numbers)


@given(HASHES, U64, U64, st.sampled_from(keys.ShareKind), st.binary(max_size=40))
def test_share_tags(session: bytes, owner: int, holder: int, kind: int, share: bytes) -> None:
    expected = digest("SA1/tag", session, owner, holder, kind, share)[:16]
    assert keys.share_tag(session, owner, holder, kind, share) == expected


# --- signatures -----------------------------------------------------------------------------------


def test_ed25519() -> None:
    # RFC 8032 §7.1, TEST 1 to 3 and SHA(abc)
    abc = (
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
        "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f"
    )
    for private, public, message, signature in (
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
            "d25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
            "387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
            "4a7c15e9716ed28dc027beceea1ec40a",
        ),
        (
            "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
            "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
            abc,
            "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e030"
            "3dca179c138ac17ad9bef1177331a704",
        ),
    ):
        identity = Identity(bytes.fromhex(private))
        assert identity.public.hex() == public
        assert identity.sign(bytes.fromhex(message)).hex() == signature
        assert keys.verify_bytes(identity.public, bytes.fromhex(signature), bytes.fromhex(message))


def test_ed25519_of_every_length() -> None:
    """The vectors of the reference implementation: messages of 0 to 1,023 bytes."""
    with cryptography_vectors.open_vector_file("asymmetric/Ed25519/sign.input", "r") as file:
        lines = [line.split(":") for line in file]
    assert len(lines) == 1024
    for private, public, message, signed, _ in lines[::8]:
        identity = Identity(bytes.fromhex(private)[:32])
        assert identity.public.hex() == public
        signature = identity.sign(bytes.fromhex(message))
        assert signature.hex() + message == signed
        assert keys.verify_bytes(identity.public, signature, bytes.fromhex(message))


def test_signed_envelopes() -> None:
    server, other = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))
    envelope = keys.sign(Done(bytes(32)), SESSION, 0, server)
    assert envelope.signature == server.sign(envelope.signed)
    keys.verify(envelope, server.public)
    client = keys.sign(Done(bytes(32)), SESSION, 5, other)
    for wrong, public in (
        (envelope, other.public),
        (replace(envelope, sender=5), server.public),
        (replace(envelope, body=envelope.body[:-1]), server.public),
        (replace(envelope, signature=client.signature), server.public),
        (replace(envelope, signature=b""), server.public),
        (client, bytes(31)),
    ):
        with pytest.raises(SecureSumError, match="BAD_SIGNATURE"):
            keys.verify(wrong, public)
    with pytest.raises(SecureSumError) as caught:
        keys.verify(client, server.public)
    assert (caught.value.reason, caught.value.client) == (Reason.BAD_SIGNATURE, 5)


def test_secrets_stay_in_memory() -> None:
    """They do not print, and do not follow other objects to another process or a file."""
    secret = bytes(range(100, 132))
    for holder in (AgreementKey(secret), Identity(secret), Sealer(secret)):
        assert secret.hex() not in repr(holder)
        assert repr(secret) not in repr(holder)
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(holder)


def test_randomness_is_an_argument() -> None:
    taken = []

    def source(size: int) -> bytes:
        taken.append(size)
        return bytes(range(size))

    assert AgreementKey.generate(source).private == Identity.generate(source).private == bytes(range(32))
    assert taken == [32, 32]
    assert AgreementKey.generate().private != AgreementKey.generate().private


# --- hashes of sets -------------------------------------------------------------------------------


def test_hashes_follow_the_protocol() -> None:
    ids, nonces, bits = (2, 5), (bytes(16), bytes([1]) * 16), b"\x03"
    u0, u1, u2 = keys.u0_hash(SESSION, ids, nonces), keys.u1_hash(SESSION, bits), keys.u2_hash(SESSION, bits)
    assert u0 == digest("SA1/U0", SESSION, ids, nonces)
    assert u1 == digest("SA1/U1", SESSION, bits)
    assert u2 == digest("SA1/U2", SESSION, bits)
    assert keys.commitment(SESSION, 5, AGREED) == digest("SA1/com", SESSION, 5, AGREED)
    done = keys.transcript(SESSION, u0, u1, u2, bytes(32), 2)
    assert done == digest("SA1/done", SESSION, u0, u1, u2, bytes(32), 2)
    assert len({u0, u1, u2, done, keys.u1_hash(bytes(32), bits), keys.u1_hash(SESSION, b"\x01")}) == 6


@given(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=40), st.data())
def test_bitmaps(ids: list[int], data: st.DataObject) -> None:
    ids.sort()
    chosen = [client for client in ids if data.draw(st.booleans())]
    bits = keys.bitmap(chosen, ids)
    number = int.from_bytes(bits, "little")
    assert [client for place, client in enumerate(ids) if number >> place & 1] == chosen
    assert len(bits) == -(-len(ids) // 8)
    assert keys.members(bits, ids) == tuple(chosen)


def test_bitmaps_are_strict() -> None:
    ids = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert keys.bitmap((9, 1), ids) == b"\x01\x01"
    for wrong in (b"\x01", b"\x01\x01\x00", b"", b"\x01\x02", b"\x01\x80"):
        with pytest.raises(SecureSumError, match="BAD_ROLL"):
            keys.members(wrong, ids)
    with pytest.raises(ValueError, match="10"):
        keys.bitmap((1, 10), ids)
