"""The graph against its description word for word, and (k, t) against tails summed in log space."""

import itertools
import math
from functools import cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg import graph
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.graph import auto, calculate, check, graph_key, neighbours, permutation
from mycelia.privacy.secagg.masks import Stream
from mycelia.privacy.secagg.round_config import Graph, Threat

SESSION = bytes.fromhex("1b121acdbf45d0a7cd7573d006604038a2e1e563eea69d23545933758ffef7f7")
PASSIVE, ACTIVE = Threat.PASSIVE, Threat.ACTIVE


def nonces_of(ids: range) -> list[bytes]:
    return [client.to_bytes(2, "big") * 8 for client in ids]


# --- neighbours ---------------------------------------------------------------------------------------------


def test_the_frozen_graph() -> None:
    ids = range(1, 11)
    nonces = [bytes([client]) * 16 for client in ids]
    key = graph_key(ids, nonces, SESSION)
    assert key.hex() == "9359b390ea8181533488a8162d99d8fd6c4a209d29772bebe6b5cbf29363cc00"
    assert permutation(key, 10).tolist() == [6, 5, 2, 7, 9, 3, 0, 1, 4, 8]
    assert neighbours(ids, nonces, SESSION, 4, Graph.RING).of(1) == (2, 4, 5, 10)


def test_the_frozen_ring_of_300() -> None:
    ids = range(1, 301)
    nonces = [client.to_bytes(16, "big") for client in ids]
    ring = [ids[position] for position in permutation(graph_key(ids, nonces, SESSION), 300)]
    assert ring == described_ring(ids, nonces)
    assert ring[:10] == [261, 23, 156, 109, 231, 256, 196, 274, 168, 286]
    whole = sha256(b"".join(client.to_bytes(8, "big") for client in ring)).hexdigest()
    assert whole == "a5d878159e2edde74d964c0a46fec4975caac77487d94e0efcc7ab852d31c14a"


def described_ring(ids: range, nonces: list[bytes]) -> list[int]:
    """Ids in the order of the ring, from the description and the primitives alone."""
    secret = b"".join(client.to_bytes(8, "big") + nonce for client, nonce in zip(ids, nonces, strict=True))
    key = HKDF(hashes.SHA256(), 32, SESSION, b"sa1/graph" + bytes(17)).derive(secret)
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    order = list(ids)
    for i in range(len(order) - 1, 0, -1):
        while True:
            word = int.from_bytes(cipher.update(bytes(8)), "little")
            if word < 2**64 // (i + 1) * (i + 1):
                break
        j = word % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize(("ids", "k"), [(range(1, 301), 58), (range(7, 3000, 13), 24), (range(1, 6), 2)])
def test_a_ring_is_what_is_described(ids: range, k: int) -> None:
    nonces = nonces_of(ids)
    ring = described_ring(ids, nonces)
    found = neighbours(ids, nonces, SESSION, k, Graph.RING)
    table = found.table()
    assert table.shape == (len(ids), k)
    for place, client in enumerate(ring):
        beside = {ring[(place + step) % len(ring)] for step in range(-k // 2, k // 2 + 1)} - {client}
        assert found.of(client) == tuple(sorted(beside))
        assert [ids[position] for position in table[ids.index(client)]] == sorted(beside)


@given(st.integers(2, 60), st.integers(1, 30), st.binary(min_size=32, max_size=32), st.sampled_from(Graph))
@settings(max_examples=60, deadline=None)
def test_graphs_are_regular_mutual_and_connected(n: int, half: int, session: bytes, kind: Graph) -> None:
    ids = range(3, 3 + 2 * n, 2)
    found = neighbours(ids, nonces_of(ids), session, 2 * half, kind)
    complete = kind == Graph.COMPLETE or 2 * half >= n - 1
    assert found.k == (n - 1 if complete else 2 * half)
    assert (found.ring is None) == complete
    sets = {client: found.of(client) for client in ids}
    for client, others in sets.items():
        assert len(set(others)) == found.k
        assert client not in others
        assert list(others) == sorted(others)
        for holder, other in enumerate(others, start=1):
            assert client in sets[other]
            assert found.holder(client, other) == holder
    reached, edge = {ids[0]}, {ids[0]}
    while edge:
        edge = {other for client in edge for other in sets[client]} - reached
        reached |= edge
    assert reached == set(ids)
    assert found.table().tolist() == [[ids.index(other) for other in sets[client]] for client in ids]


def test_everything_the_graph_is_made_from_counts() -> None:
    ids = range(1, 41)
    nonces = nonces_of(ids)
    first = neighbours(ids, nonces, SESSION, 6, Graph.RING)
    assert (first.ring == neighbours(tuple(ids), tuple(nonces), SESSION, 6, Graph.RING).ring).all()
    assert first.ring is not None
    others = [
        neighbours(ids, nonces, bytes(32), 6, Graph.RING),
        neighbours(ids, [*nonces[:-1], bytes(16)], SESSION, 6, Graph.RING),
        neighbours([*ids[:-1], 99], nonces, SESSION, 6, Graph.RING),
    ]
    assert all((other.ring != first.ring).any() for other in others)


def test_graph_not_from_a_guessable_generator() -> None:
    """A nonce more, drawn by one honest client, decides who stands beside whom; all orders are as likely."""
    found: dict[tuple[int, ...], int] = {}
    for number in range(4800):
        key = graph_key([1, 2], [bytes(16), number.to_bytes(16, "big")], SESSION)
        order = tuple(permutation(key, 4).tolist())
        found[order] = found.get(order, 0) + 1
    assert set(found) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(found.values())).pvalue > 1e-4


def test_words_beyond_the_last_multiple_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2**64 − 1 is a multiple of 3 and 5, and so is nothing above it; 2**64 is one of 4 and 2
    answers = [[2**64 - 1, 2**64 - 1, 4, 2**64 - 1], [2**64 - 1, 1, 0]]
    asked = []

    def words(self: Stream, start: int, count: int) -> npt.NDArray[np.uint64]:
        asked.append((start, count))
        return np.array(answers.pop(0), np.uint64)

    monkeypatch.setattr(Stream, "words", words)
    # 5: twice skipped, then 4, no change; 4: 3, no change; 3: skipped, then 1: 0 2 1 …; 2: 0: 2 0 …
    assert permutation(bytes(32), 5).tolist() == [2, 0, 1, 3, 4]
    assert asked == [(0, 5), (5, 5)]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_permutations(n: int) -> None:
    assert sorted(permutation(bytes(32), n)) == list(range(n))


@pytest.mark.parametrize(
    ("ids", "count", "size", "k", "kind", "reason"),
    [
        ([1, 3, 2], 3, 16, 2, 1, Reason.BAD_ROLL),
        ([1, 2, 2], 3, 16, 2, 1, Reason.BAD_ROLL),
        ([0, 1, 2], 3, 16, 2, 1, Reason.BAD_ROLL),
        ([1, 2, 3], 2, 16, 2, 1, Reason.BAD_ROLL),
        ([1, 2, 3], 3, 15, 2, 1, Reason.BAD_ROLL),
        ([1, 2, 3, 4, 5], 5, 16, 3, 1, Reason.CONFIG),
        ([1, 2, 3, 4, 5], 5, 16, 0, 1, Reason.CONFIG),
        ([1, 2, 3, 4, 5], 5, 16, 2, 2, Reason.CONFIG),
    ],
)
def test_graphs_that_are_refused(
    ids: list[int], count: int, size: int, k: int, kind: int, reason: Reason
) -> None:
    with pytest.raises(SecureSumError) as refused:
        neighbours(ids, [bytes(size)] * count, SESSION, k, kind)
    assert refused.value.reason == reason


@pytest.mark.parametrize(("n", "kind"), [(9, Graph.COMPLETE), (9, Graph.RING)])
def test_who_is_no_neighbour_is_no_holder(n: int, kind: Graph) -> None:
    ids = range(1, n + 1)
    found = neighbours(ids, nonces_of(ids), SESSION, 2, kind)
    for owner, client in ((1, 1), (1, 99), (99, 1)):
        with pytest.raises(KeyError):
            found.holder(owner, client)


# --- (k, t) -------------------------------------------------------------------------------------------------


@cache
def log2_choose(n: int) -> npt.NDArray[np.float64]:
    """log₂ C(n, i) for i = 0 … n."""
    i = np.arange(n + 1)
    return (special.gammaln(n + 1) - special.gammaln(i + 1) - special.gammaln(n - i + 1)) / math.log(2)


@cache
def log2_tails(n: int, marked: int, draws: int) -> npt.NDArray[np.float64]:
    """log₂ P[X > x] for x = −1 … draws, by sums of logarithms from the far end."""
    x = np.arange(max(0, draws - n + marked), min(marked, draws) + 1)
    terms = log2_choose(marked)[x] + log2_choose(n - marked)[draws - x] - log2_choose(n)[draws]
    tails = np.full(draws + 2, -np.inf)
    tails[: x[0] + 1] = 0.0
    tails[x[0] : x[-1] + 1] = np.logaddexp2.accumulate(terms[::-1])[::-1]  # P[X > x − 1] stands at x
    return tails


def oracle_least_t(n: int, k: int, threat: Threat, corrupt: int, dropped: int) -> int | None:
    """The least t that k neighbours on a ring of n allow, rule by rule as they are written down."""
    tail_bits = 41 if threat == PASSIVE else 80
    bad = corrupt + dropped
    if k <= bad:
        cut = math.log2(n * (n - k - 1) / 2) + log2_choose(bad)[k] - log2_choose(n)[k]
        if not cut < -tail_bits:
            return None
    tails = log2_tails(n, corrupt, k)[1:]
    c = int(np.flatnonzero(tails <= -tail_bits - math.log2(n))[0])
    allowed = [t for t in range(2, k + 1) if t > c and 2 * t > k]
    if threat == ACTIVE:
        if k < 0.03 * n:
            return None
        h = int(np.flatnonzero(log2_tails(n, corrupt, k // 2)[1:] <= -80 - math.log2(2 * n))[0])
        allowed = [t for t in allowed if 2 * t > k + c and t > k / 2 + h]
    # fewer than t of the k are left when more than k − t of them dropped
    left = log2_tails(n, dropped, k)[1:]
    allowed = [t for t in allowed if left[k - t] < -20 - math.log2(n)]
    return allowed[0] if allowed else None


TABLE = {
    (PASSIVE, 5, 5): [(12, 7), (24, 14), (30, 17), (32, 19), (34, 20)],
    (PASSIVE, 10, 10): [(22, 12), (36, 21), (48, 27), (50, 29), (54, 31)],
    (PASSIVE, 20, 20): [(40, 21), (74, 41), (98, 54), (114, 62), (122, 67)],
    (PASSIVE, 33, 33): [(68, 35), (162, 85), (286, 150), (368, 193), (422, 221)],
    (ACTIVE, 5, 5): [None, (58, 45), (98, 78), (110, 87), (300, 201)],
    (ACTIVE, 10, 10): [None, (114, 88), (178, 136), (210, 160), (300, 218)],
    (ACTIVE, 20, 10): [None, (162, 133), (264, 211), (324, 257), (356, 281)],
}
SIZES = (100, 300, 1000, 3000, 10_000)
ROWS = [
    (*row, n, cell)
    for row, cells in TABLE.items()
    for n, cell in zip(SIZES, cells, strict=True)
    if cell is not None
]


@pytest.mark.parametrize(("threat", "corrupt", "dropout", "n", "cell"), ROWS)
def test_the_table(threat: Threat, corrupt: int, dropout: int, n: int, cell: tuple[int, int]) -> None:
    shares = {"threat": threat, "corrupt_ppm": corrupt * 10_000, "dropout_ppm": dropout * 10_000}
    assert auto(n, **shares) == cell
    found = check(n, *cell, **shares)
    assert (found.corrupt, found.dropped) == (corrupt * n // 100, dropout * n // 100)
    # from the other calculation: this cell passes and no smaller k does
    counts = (threat, found.corrupt, found.dropped)
    assert oracle_least_t(n, cell[0], *counts) == cell[1]
    assert all(oracle_least_t(n, k, *counts) is None for k in range(2, cell[0], 2))
    # the numbers that are reported
    for value, expected in (
        (found.corrupt_log2, log2_tails(n, found.corrupt, cell[0])[found.c + 1]),
        (found.recovery_log2, log2_tails(n, found.dropped, cell[0])[cell[0] - cell[1] + 1]),
    ):
        assert value == pytest.approx(expected, abs=1e-6)
    assert not calculate(n, cell[0], cell[1] - 1, **shares).safe
    with pytest.raises(SecureSumError, match="WEAK_PARAMETERS"):
        check(n, cell[0] - 2, cell[1], **shares)


@pytest.mark.parametrize(("corrupt", "dropout"), [(5, 5), (10, 10), (20, 10)])
def test_a_hundred_clients_share_with_all(corrupt: int, dropout: int) -> None:
    """Against a lying server a hundred clients use the complete graph, with two-thirds."""
    found = check(100, 99, 67, threat=ACTIVE, corrupt_ppm=corrupt * 10_000, dropout_ppm=dropout * 10_000)
    assert (found.c, found.corrupt_log2, found.cut_log2) == (corrupt, -math.inf, -math.inf)
    assert found.recovery_log2 == -math.inf


@pytest.mark.parametrize("threat", Threat)
@pytest.mark.parametrize("n", [11, 40, 101])
def test_complete_graphs_are_counted_exactly(n: int, threat: Threat) -> None:
    k, step = n - 1, n // 10 + 1
    for corrupt, dropped, t in itertools.product(range(0, n, step), range(0, n, step), range(1, n + 1, 2)):
        # parts per million that come to these counts
        ppm = [-(-count * 10**6 // n) for count in (corrupt, dropped)]
        found = calculate(n, k, t, threat=threat, corrupt_ppm=ppm[0], dropout_ppm=ppm[1])
        assert (found.corrupt, found.dropped) == (corrupt, dropped)
        safe = 2 <= t <= k and 2 * t > k and t > corrupt and (threat == PASSIVE or 2 * t > k + corrupt)
        assert found.safe == (safe and k - dropped >= t)
        without = calculate(n, k, t, threat=threat, corrupt_ppm=ppm[0], dropout_ppm=ppm[1], recovery=False)
        assert without.safe == safe
        assert math.isnan(without.recovery_log2)


def test_tails_are_those_of_every_possible_draw() -> None:
    """Counted one by one: 5 marked of 13, 6 drawn."""
    draws = [sum(place < 5 for place in draw) for draw in itertools.combinations(range(13), 6)]
    for above in range(-1, 7):
        assert graph._tail(13, 5, 6, above) == sum(found > above for found in draws)
    for bits, times in ((1, 1), (1, 3), (3, 2), (6, 1), (60, 5)):
        least = min(c for c in range(7) if sum(found > c for found in draws) * times * 2**bits <= len(draws))
        assert graph._rarely_above(13, 5, 6, bits, times) == least


@given(
    st.integers(3, 80), st.sampled_from(Threat), st.integers(0, 500_000), st.integers(0, 500_000), st.data()
)
@settings(max_examples=80, deadline=None)
def test_least_is_found_by_trying_all(
    n: int, threat: Threat, corrupt_ppm: int, dropout_ppm: int, data: st.DataObject
) -> None:
    shares = {"threat": threat, "corrupt_ppm": corrupt_ppm, "dropout_ppm": dropout_ppm}
    passing = [
        (k, t)
        for k in (*range(2, n - 1, 2), n - 1)
        for t in range(k // 2 + 1, k + 1)
        if calculate(n, k, t, **shares).safe
    ]
    rings = [(k, t) for k, t in passing if k < n - 1]
    if rings:
        assert auto(n, **shares) == rings[0]
    elif passing:
        two_thirds = (n - 1, 2 * (n - 1) // 3 + 1)
        assert auto(n, **shares) == (two_thirds if two_thirds in passing else passing[0])
    else:
        with pytest.raises(SecureSumError, match="no k and t are safe"):
            auto(n, **shares)
    if not passing:
        return
    # a larger t is as safe, and recovers less often
    k, t = data.draw(st.sampled_from(passing))
    bigger = calculate(n, k, min(k, t + 1), **shares, recovery=False)
    assert bigger.safe


@pytest.mark.parametrize(("threat", "corrupt", "dropout"), [(PASSIVE, 0.4, 0.3), (ACTIVE, 0.25, 0.2)])
def test_the_quick_look_agrees_with_the_sums(
    threat: Threat, corrupt: float, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"threat": threat, "corrupt_ppm": int(corrupt * 1e6), "dropout_ppm": int(dropout * 1e6)}
    sizes = (150, 401, 900)
    quick = [auto(n, **shares) for n in sizes]
    monkeypatch.setattr(graph._Degree, "hopeless", False)
    assert [auto(n, **shares) for n in sizes] == quick


def test_several_sizes() -> None:
    """What is found for a range of cohorts is safe in each, and no smaller k is."""
    shares = {"threat": ACTIVE, "corrupt_ppm": 100_000, "dropout_ppm": 100_000}
    sizes = range(270, 301)
    k, t = auto(sizes, **shares)
    assert all(check(n, k, t, **shares).safe for n in sizes)
    assert k >= max(auto(n, **shares)[0] for n in sizes)
    for less in range(2, k, 2):
        assert not any(
            all(calculate(n, less, other, **shares).safe for n in sizes) for other in (t - 1, t, t + 1)
        )
    # from 20 to 24 clients, no ring: two-thirds of those who come
    assert auto(range(20, 25), threat=ACTIVE, corrupt_ppm=300_000, dropout_ppm=300_000) == (23, 16)


def test_threshold_below_all() -> None:
    """There are spare shares wherever clients may vanish: t < k, by as many as recovery needs."""
    for n in (10, 50, 100, 300, 1000):
        for threat in Threat:
            k, t = auto(n, threat=threat, corrupt_ppm=100_000, dropout_ppm=100_000)
            assert t < k
    with pytest.raises(SecureSumError, match="WEAK_PARAMETERS"):
        check(100, 99, 99, threat=PASSIVE, corrupt_ppm=0, dropout_ppm=10_000)


def test_what_is_refused_says_what_would_pass() -> None:
    with pytest.raises(SecureSumError) as refused:
        check(1000, 98, 70, threat=ACTIVE, corrupt_ppm=50_000, dropout_ppm=50_000)
    assert refused.value.reason == Reason.WEAK_PARAMETERS
    assert refused.value.allowed == "k = 98, t = 78"
    assert "t > k/2 + h, h = 28" in refused.value.rule
    assert "least that pass are k = 98 and t = 78" in refused.value.fix
    with pytest.raises(SecureSumError, match="assume fewer"):
        check(10, 9, 7, threat=ACTIVE, corrupt_ppm=500_000, dropout_ppm=500_000)


@pytest.mark.parametrize(
    ("n", "k", "t", "threat", "rule"),
    [
        (100, 12, 6, PASSIVE, "2t > k"),
        (100, 12, 13, PASSIVE, "t ≤ k"),
        (100, 13, 8, PASSIVE, "k is even"),
        (100, 10, 6, PASSIVE, "cut"),
        (100, 12, 12, PASSIVE, "fewer than t neighbours are left"),
        (10_000, 250, 201, ACTIVE, "3 %"),
        (1000, 98, 66, ACTIVE, "2t > k + c"),
        (300, 58, 44, ACTIVE, "t > k/2 + h"),
        (4, 3, 1, PASSIVE, "t ≥ 2"),
        (100, 99, 99, PASSIVE, "may vanish"),
    ],
)
def test_each_rule_is_named(n: int, k: int, t: int, threat: Threat, rule: str) -> None:
    found = calculate(n, k, t, threat=threat, corrupt_ppm=50_000, dropout_ppm=50_000)
    assert any(rule in fault for fault in found.faults)


@pytest.mark.parametrize(
    "numbers",
    [
        {"n": 1},
        {"n": 2**15 + 1},
        {"k": 0},
        {"corrupt_ppm": -1},
        {"corrupt_ppm": 10**6},
        {"dropout_ppm": 10**6},
        {"threat": 2},
    ],
)
def test_numbers_out_of_range(numbers: dict[str, int]) -> None:
    good = {"n": 100, "k": 12, "t": 7, "threat": 0, "corrupt_ppm": 50_000, "dropout_ppm": 50_000}
    assert calculate(**good).safe  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        calculate(**good | numbers)  # type: ignore[arg-type]
