"""Shares of secrets against a slow oracle on Python's integers."""

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.shamir import LIMBS, PRIME, combine, decode_shares, encode_shares, split

Bytes = npt.NDArray[np.uint8]


def oracle_limbs(secret: bytes) -> list[int]:
    number = int.from_bytes(secret, "little")
    return [number >> 30 * limb & (2**30 - 1) for limb in range(9)]


def oracle_split(secret: bytes, k: int, coefficients: list[list[int]]) -> list[list[int]]:
    """Shares of holders 1 … k; `coefficients` lists those of x, of x², …, each limb by limb."""
    rows = [oracle_limbs(secret), *coefficients]
    return [
        [sum(row[limb] * x**power for power, row in enumerate(rows)) % PRIME for limb in range(9)]
        for x in range(1, k + 1)
    ]


def oracle_combine(shares: dict[int, list[int]]) -> bytes:
    """Lagrange's formula at 0."""
    number = 0
    for limb in range(9):
        value = 0
        for x, share in shares.items():
            weight = 1
            for other in shares:
                if other != x:
                    weight = weight * other * pow(other - x, -1, PRIME) % PRIME
            value = (value + weight * share[limb]) % PRIME
        number |= value << 30 * limb
    return number.to_bytes(32, "little")


def secret_rows(*secrets: bytes) -> Bytes:
    return np.frombuffer(b"".join(secrets), np.uint8).reshape(-1, 32)


def seeded(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def test_the_frozen_share() -> None:
    words = np.arange(1, 19, dtype="<u4").tobytes()  # 1 … 9 for x, 10 … 18 for x², limb by limb
    asked = []

    def random(count: int) -> bytes:
        asked.append(count)
        return words

    shares = split(secret_rows(bytes(range(32))), 5, 3, random)
    assert asked == [72]
    assert shares.shape == (1, 5, LIMBS)
    expected = "030201ff1c18152d30a091bb0383445b12111186185451e121918324074708970000210d"
    assert encode_shares(shares[0, 4]).hex() == expected
    assert decode_shares(bytes.fromhex(expected)).tolist() == shares[:, 4].tolist()


@given(st.data(), st.integers(2, 40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_shares_are_those_of_the_oracle_and_any_t_rebuild(data: st.DataObject, t: int, count: int) -> None:
    k = data.draw(st.integers(t, 2 * t - 1))
    secrets = [data.draw(st.binary(min_size=32, max_size=32)) for _ in range(count)]
    numbers = data.draw(st.randoms(use_true_random=False))
    coefficients = [
        [[numbers.randrange(PRIME) for _ in range(9)] for _ in range(count)] for _ in range(t - 1)
    ]
    words = np.array(coefficients, "<u4").tobytes()
    shares = split(secret_rows(*secrets), k, t, lambda size: words)
    for index, secret in enumerate(secrets):
        expected = oracle_split(secret, k, [power[index] for power in coefficients])
        assert shares[index].tolist() == expected
    # every owner by another set of holders, in another order
    holders = [numbers.sample(range(1, k + 1), t) for _ in range(count)]
    chosen = np.stack([shares[index, np.array(row) - 1] for index, row in enumerate(holders)])
    assert [bytes(row) for row in combine(chosen, holders)] == secrets
    first = {x: shares[0, x - 1].tolist() for x in holders[0]}
    assert oracle_combine(first) == secrets[0]


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(31) + b"\x80", b"\x01" + bytes(31)])
@pytest.mark.parametrize(("k", "t"), [(2, 2), (3, 2), (99, 67), (300, 200)])
def test_edges_of_the_range(secret: bytes, k: int, t: int) -> None:
    shares = split(secret_rows(secret), k, t)
    mixed = np.random.default_rng(t).permutation(k)[:t] + 1
    for holders in (np.arange(1, t + 1), np.arange(k - t + 1, k + 1), mixed):
        assert bytes(combine(shares[:, holders - 1], holders[np.newaxis])[0]) == secret


def test_many_owners_at_once() -> None:
    """More rows than are worked on at a time, each with holders of its own."""
    generator = np.random.default_rng(1)
    secrets = generator.integers(0, 256, (700, 32), np.uint8)
    shares = split(secrets, 99, 60, generator.bytes)
    holders = np.stack([generator.permutation(99)[:60] for _ in secrets])
    chosen = np.take_along_axis(shares, holders[:, :, np.newaxis], axis=1)
    np.testing.assert_array_equal(combine(chosen, holders + 1), secrets)


def test_far_holders() -> None:
    """Holders are at most 2¹⁵ − 1; a polynomial of degree 1 is known at each of them."""
    limbs = oracle_limbs(bytes(range(32)))
    far = 2**15 - 1
    shares = {x: [(limb + 5 * x) % PRIME for limb in limbs] for x in (far, 7)}
    assert oracle_combine(shares) == bytes(range(32))
    assert bytes(combine(np.array([list(shares.values())], np.uint32), [list(shares)])[0]) == bytes(range(32))


def test_no_secrets() -> None:
    empty = combine(np.empty((0, 3, LIMBS), np.uint32), np.empty((0, 3), np.int64))
    assert empty.shape == (0, 32)
    assert decode_shares(b"").shape == (0, LIMBS)
    assert split(np.empty((0, 32), np.uint8), 3, 2).shape == (0, 3, LIMBS)


def joint_counts(shares: npt.NDArray[np.uint32], first: int, second: int) -> npt.NDArray[np.int64]:
    """How often two holders' shares fall into each of 16 × 16 equal parts of the residues."""
    parts = (shares[:, [first, second]].astype(np.int64) * 16 // PRIME).reshape(len(shares), 2, LIMBS)
    return np.bincount((parts[:, 0] * 16 + parts[:, 1]).reshape(-1), minlength=256)


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_fewer_than_t_shares_are_uniform(secret: bytes) -> None:
    shares = split(secret_rows(*[secret] * 6000), 4, 3, seeded(11))
    for first, second in ((0, 1), (0, 3), (1, 2), (2, 3)):
        assert stats.chisquare(joint_counts(shares, first, second)).pvalue > 1e-4


def test_share_coefficients_random() -> None:
    """Two shares of t = 3 tell nothing; rows of zeros in place of random ones would tell the secret."""
    numbers = np.random.default_rng(3)

    def half_zero(count: int) -> bytes:  # the coefficients of x² are missing
        words = numbers.integers(0, PRIME, count // 4, np.uint32)
        words[words.size // 2 :] = 0
        return words.tobytes()

    secrets = secret_rows(*[bytes(range(32))] * 6000)
    weak = split(secrets, 4, 3, half_zero)
    assert stats.chisquare(joint_counts(weak, 0, 1)).pvalue < 1e-12
    # shares made with the system's own bits are another sharing every time
    first, second = split(secrets[:1], 5, 3), split(secrets[:1], 5, 3)
    assert (first != second).all(axis=2).all()
    assert split.__defaults__ == (os.urandom,)


def test_the_word_that_is_no_residue_is_skipped() -> None:
    """2³¹ − 1 is drawn again, not taken for 0; the 32nd bit does not count."""
    given_out = [
        np.array([PRIME, 2**32 - 1, *range(1, 8)], "<u4").tobytes(),
        np.array([2**31 + 8, 9], "<u4").tobytes(),
    ]
    asked = []

    def random(count: int) -> bytes:
        asked.append(count)
        return given_out.pop(0)

    shares = split(secret_rows(bytes(range(32))), 3, 2, random)
    assert asked == [36, 8]
    assert shares[0].tolist() == oracle_split(bytes(range(32)), 3, [list(range(1, 10))])


def test_modulus_is_a_constant() -> None:
    """The modulus is no argument; a threshold of 1, or one that both secrets can reach, is refused."""
    assert PRIME == 2_147_483_647
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7))
    for k, t in ((1, 1), (3, 1), (3, 0), (4, 2), (10, 5), (3, 4), (2**15, 2**15 - 1)):
        with pytest.raises(SecureSumError, match="WEAK_PARAMETERS") as refused:
            split(secret_rows(bytes(32)), k, t)
        assert refused.value.reason == Reason.WEAK_PARAMETERS


def test_threshold_many_shares_cost() -> None:
    """Spare shares are left out: t of them are enough, and one fewer rebuilds nothing."""
    secret = bytes(range(32))
    shares = split(secret_rows(secret), 999, 667, seeded(2))
    assert bytes(combine(shares[:, :667], np.arange(1, 668)[np.newaxis])[0]) == secret
    with pytest.raises(SecureSumError, match="SHARE_MISMATCH"):
        combine(shares[:, :666], np.arange(1, 667)[np.newaxis])


def test_bad_share_is_found_and_named() -> None:
    """What is no secret is refused with its owner; what is another secret is for the commitments to find."""
    secret = bytes(range(32))
    shares = split(secret_rows(secret, secret, secret), 5, 3, seeded(4))
    outcomes = set()
    for bit in range(31):
        damaged = shares[:, :3].copy()
        damaged[1, 0, 8] ^= 1 << bit
        # holder 1 of 1, 2, 3 has weight 3 · 2 / (2 · 1) = 3
        limb = (0x1F1E + 3 * (int(damaged[1, 0, 8]) - int(shares[1, 0, 8]))) % PRIME
        outcomes.add(limb < 2**16)
        if limb < 2**16:
            rebuilt = combine(damaged, [[1, 2, 3]] * 3, owners=[21, 22, 23])
            assert [bytes(row) for row in rebuilt] == [
                secret,
                secret[:30] + limb.to_bytes(2, "little"),
                secret,
            ]
        else:
            with pytest.raises(SecureSumError, match="owner 22") as refused:
                combine(damaged, [[1, 2, 3]] * 3, owners=[21, 22, 23])
            assert (refused.value.reason, refused.value.owner) == (Reason.SHARE_MISMATCH, 22)
    assert outcomes == {False, True}


def share_of(values: list[int]) -> npt.NDArray[np.uint32]:
    """One holder of a constant polynomial, twice."""
    return np.array([[values, values]], np.uint32)


def test_limbs_and_numbers_out_of_range() -> None:
    top = [2**30 - 1] * 8 + [2**16 - 1]
    assert bytes(combine(share_of(top), [[1, 2]])[0]) == b"\xff" * 32
    for values in ([2**30] + [0] * 8, [0] * 7 + [2**30, 0], [0] * 8 + [2**16], [0] * 8 + [PRIME - 1]):
        with pytest.raises(SecureSumError, match="SHARE_MISMATCH") as refused:
            combine(share_of(values), [[1, 2]])
        assert refused.value.owner is None


def test_shares_that_are_no_residues() -> None:
    with pytest.raises(SecureSumError, match="BAD_SHARE") as refused:
        combine(share_of([PRIME] + [0] * 8), [[1, 2]], owners=[9])
    assert (refused.value.reason, refused.value.owner) == (Reason.BAD_SHARE, 9)
    good = encode_shares(np.full((2, LIMBS), PRIME - 1, np.uint32))
    assert len(good) == 72
    assert (decode_shares(good) == PRIME - 1).all()
    for bad in (good[:35], good + b"\0", bytes.fromhex("7fffffff") + good[4:], good[:68] + b"\xff" * 4):
        with pytest.raises(SecureSumError, match="BAD_SHARE"):
            decode_shares(bad)


@pytest.mark.parametrize(
    "holders", [[[0, 1]], [[-1, 1]], [[1, 1]], [[1, 2**15]], [[1, 2, 3]], [1, 2], [[1.0, 2.0]]]
)
def test_holders_that_are_none(holders: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="holder"):
        combine(share_of([0] * 9), holders)


def test_a_holder_twice_among_many() -> None:
    shares = np.zeros((3, 2, LIMBS), np.uint32)
    with pytest.raises(ConfigError, match="a holder twice"):
        combine(shares, [[1, 2], [3, 3], [1, 2]])


def test_other_shapes() -> None:
    with pytest.raises(ConfigError, match="secrets"):
        split(np.zeros((1, 31), np.uint8), 3, 2)
    with pytest.raises(ConfigError, match="secrets"):
        split(np.zeros((1, 32), np.int64), 3, 2)
    with pytest.raises(ConfigError, match="shares"):
        combine(np.zeros((1, 2, LIMBS), np.int64), [[1, 2]])
    with pytest.raises(ConfigError, match="shares"):
        combine(np.zeros((1, 2, 8), np.uint32), [[1, 2]])
