"""Mask streams against published vectors and single blocks of the cipher; packing against long integers."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg import masks
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.masks import (
    BLOCK_BYTES,
    Stream,
    Words,
    add_packed,
    add_streams,
    pack,
    packed_size,
    unpack,
    word_type,
)

KEYS = [bytes([i, i ^ 0x5A]) * 16 for i in range(1, 12)]
WIDTHS = range(8, 65)


def oracle(key: bytes, bits: int, start: int, count: int) -> list[int]:
    """Residues from single encryptions of the counter."""
    size = 4 if bits <= 32 else 8
    first, last = start * size // 16, ((start + count) * size + 15) // 16
    counters = b"".join(counter.to_bytes(16, "big") for counter in range(first, last))
    stream = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)
    return [
        int.from_bytes(stream[place * size - 16 * first :][:size], "little") % 2**bits
        for place in range(start, start + count)
    ]


def sample(bits: int, count: int, seed: int = 0) -> Words:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**bits - 1, count, np.uint64, endpoint=True).astype(word_type(bits))


def modulo(values: npt.NDArray[np.object_], bits: int) -> list[int]:
    return [int(value) % 2**bits for value in values]


# --- streams ------------------------------------------------------------------------------------------------


def test_counter_mode_vectors() -> None:
    # NIST SP 800-38A, F.5.5 and F.5.6: CTR-AES256, read where the counter stands at their initial value
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    expected = bytes(one ^ other for one, other in zip(plain, cipher, strict=True))
    assert Stream(key, 32).words(4 * counter, 16).astype("<u4").tobytes() == expected
    assert Stream(key, 64).words(2 * counter, 8).astype("<u8").tobytes() == expected


def test_the_frozen_words() -> None:
    key = bytes.fromhex("1912ad427da2effe8c027a692515d2797b3ae6d41e8bc465bbaa82b303d6faeb")
    stream = Stream(key, 32)
    found = [f"{int(stream.words(place, 1)[0]):08x}" for place in (0, 1, 65535, 65536)]
    assert found == ["fa81f582", "ffaee069", "fbb6e85f", "be3f211a"]
    whole = stream.words(0, 65537)
    assert [f"{int(whole[place]):08x}" for place in (0, 1, 65535, 65536)] == found


@given(st.sampled_from(KEYS), st.sampled_from(WIDTHS), st.integers(0, 2**40), st.integers(0, 70))
@settings(max_examples=100, deadline=None)
def test_any_part_of_a_stream(key: bytes, bits: int, start: int, count: int) -> None:
    words = Stream(key, bits).words(start, count)
    assert words.dtype == word_type(bits)
    assert words.tolist() == oracle(key, bits, start, count)


@pytest.mark.parametrize("bits", [8, 27, 32, 33, 64])
def test_blocks_are_the_whole(bits: int) -> None:
    size = BLOCK_BYTES // word_type(bits).itemsize
    count = 2 * size + 1001
    signs = [1, -1, 1]
    before = sample(bits, count)
    whole = before.copy()
    add_streams(whole, KEYS[:3], signs, bits)
    # what one key gives, from places on either side of each boundary
    for first in (0, size - 3, size, 2 * size - 1, count - 5):
        words = [np.array(oracle(key, bits, first, 5), object) for key in KEYS[:3]]
        total = before[first : first + 5].astype(object) + words[0] - words[1] + words[2]
        assert whole[first : first + 5].tolist() == modulo(total, bits)
    for cuts in ([size], [1, 2, 3], [size - 1, size + 1, 2 * size], [7, 70_000, 70_001]):
        parts = before.copy()
        for first, last in zip([0, *cuts], [*cuts, count], strict=True):
            add_streams(parts[first:last], KEYS[:3], signs, bits, first)
        np.testing.assert_array_equal(parts, whole)


@given(
    st.sampled_from(WIDTHS), st.integers(0, 300), st.lists(st.sampled_from([1, -1]), max_size=11), st.data()
)
@settings(max_examples=60, deadline=None)
def test_sums_of_streams(bits: int, count: int, signs: list[int], data: st.DataObject) -> None:
    total = sample(bits, count, seed=len(signs))
    start = data.draw(st.integers(0, 50))
    expected = total.astype(object)
    for key, sign in zip(KEYS, signs, strict=False):
        expected = expected + sign * np.array(oracle(key, bits, start, count), object)
    add_streams(total, KEYS[: len(signs)], signs, bits, start)
    assert total.tolist() == modulo(expected, bits)
    # and taken off again in another order
    add_streams(total, KEYS[: len(signs)][::-1], [-sign for sign in signs][::-1], bits, start)
    assert total.tolist() == sample(bits, count, seed=len(signs)).tolist()


def test_more_keys_than_contexts_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    signs = [1, -1, -1, 1, 1, -1, 1, 1, 1, -1, 1]
    expected, found = np.zeros(70_000, np.uint32), np.zeros(70_000, np.uint32)
    add_streams(expected, KEYS, signs, 30)
    monkeypatch.setattr(masks, "_CONTEXTS", 4)
    add_streams(found, KEYS, signs, 30)
    np.testing.assert_array_equal(found, expected)


def test_nothing_of_the_vectors_size_is_made() -> None:
    total = np.zeros(1 << 22, np.uint32)
    add_streams(total[:1], KEYS, [1] * 11, 27)
    tracemalloc.start()
    try:
        add_streams(total, KEYS, [1] * 11, 27)
        assert tracemalloc.get_traced_memory()[1] < 2 * BLOCK_BYTES
        packed = memoryview(bytes(packed_size(total.size, 27)))
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        add_packed(total, packed, 27)
        assert tracemalloc.get_traced_memory()[1] - held < 8 * BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_mask_key_keeps_256_bits() -> None:
    """Every bit of the key changes the mask, and no shorter key is taken."""
    drawn = {Stream(KEYS[0], 32).words(0, 8).tobytes()}
    for bit in range(256):
        changed = (int.from_bytes(KEYS[0], "big") ^ 1 << bit).to_bytes(32, "big")
        drawn.add(Stream(changed, 32).words(0, 8).tobytes())
    assert len(drawn) == 257
    for size in (0, 4, 16, 24, 31, 33):
        with pytest.raises(ConfigError, match=f"key of {size} bytes"):
            Stream(bytes(size), 32)
        with pytest.raises(ConfigError, match=f"key of {size} bytes"):
            add_streams(np.zeros(1, np.uint32), [bytes(size)], [1], 32)


def shares_of_the_ring(values: Words, bits: int) -> npt.NDArray[np.int64]:
    """How often residues fall into each of 256 equal parts."""
    return np.bincount((values >> values.dtype.type(bits - 8)).astype(np.int64), minlength=256)


@pytest.mark.parametrize("bits", [8, 9, 27, 32, 33, 64])
def test_masks_uniform_in_whole_ring(bits: int) -> None:
    words = Stream(KEYS[2], bits).words(0, 200_000)
    high, low = shares_of_the_ring(words, bits), np.bincount((words & words.dtype.type(255)).astype(np.int64))
    assert stats.chisquare(high).pvalue > 1e-4
    assert stats.chisquare(low).pvalue > 1e-4
    if bits == 8:
        assert (int(words.min()), int(words.max())) == (0, 255)


@pytest.mark.parametrize("bits", [8, 24, 32, 40])
def test_masked_vectors_tell_nothing(bits: int) -> None:
    """A masked vector is uniform whatever was masked; two masked alike differ by what was masked, exactly."""
    dtype = word_type(bits)
    for value in (0, 1, 2 ** (bits - 1), 2**bits - 1):
        masked = np.full(100_000, value, dtype)
        add_streams(masked, KEYS[3:5], [1, -1], bits)
        assert stats.chisquare(shares_of_the_ring(masked, bits)).pvalue > 1e-4
        add_streams(masked, KEYS[3:5], [-1, 1], bits)
        assert (masked == value).all()


def test_mask_is_a_vector_and_fresh() -> None:
    """One word for each element, never one for all; another key is another mask."""
    first, second = (Stream(key, 32).words(0, 10_000) for key in KEYS[:2])
    assert len(np.unique(first)) > 9_950  # of 10,000 out of 2³², about 0.01 twice
    assert (first != second).mean() > 0.999
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05


def test_no_prg_word_is_an_error() -> None:
    """Every word counts: 0 and all ones are masks like others, and come as often as others."""
    words = Stream(KEYS[5], 8).words(0, 256_000)
    counts = np.bincount(words, minlength=256)
    assert stats.binomtest(int(counts[0]), 256_000, 1 / 256).pvalue > 1e-4
    assert stats.binomtest(int(counts[255]), 256_000, 1 / 256).pvalue > 1e-4
    assert words.tolist()[:1000] == oracle(KEYS[5], 8, 0, 1000)


def test_failed_call_does_not_desync() -> None:
    """There is no running state: after a call that failed, both ends of a pair still cancel."""
    stream = Stream(KEYS[6], 32)
    total = np.zeros(1000, np.uint32)
    add_streams(total, [KEYS[6]], [1], 32)
    with pytest.raises(ConfigError):
        add_streams(total, [KEYS[6], b"short"], [-1, 1], 32)
    with pytest.raises(ConfigError):
        add_streams(total[::2], [KEYS[6]], [1], 32)
    stream.words(17, 100)
    add_streams(total, [KEYS[6]], [-1], 32)
    assert not total.any()
    assert KEYS[6].hex() not in repr(stream)
    assert repr(KEYS[6]) not in repr(stream)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: word_type(7), "7 bits"),
        (lambda: word_type(65), "65 bits"),
        (lambda: Stream(bytes(32), 0), "0 bits"),
        (lambda: add_streams(np.zeros(4, np.uint64), [], [], 32), "uint32"),
        (lambda: add_streams(np.zeros(4, np.uint32), [], [], 33), "uint64"),
        (lambda: add_streams(np.zeros(4, np.int32), [], [], 32), "uint32"),  # type: ignore[arg-type]
        (lambda: add_streams(np.zeros((2, 2), np.uint32), [], [], 32), "contiguous"),
        (lambda: add_streams(np.zeros(4, np.uint32), KEYS[:2], [1], 32), "one sign for each"),
        (lambda: add_streams(np.zeros(4, np.uint32), KEYS[:2], [1, 0], 32), r"\+1 or -1"),
        (lambda: add_streams(np.zeros(4, np.uint32), KEYS[:1], [1], 32, -1), "count from 0"),
        (lambda: pack(np.zeros(4, np.uint64), 32), "uint32"),
        (lambda: unpack(b"", 0, 7), "7 bits"),
        (lambda: add_packed(np.zeros(4, np.float32), bytes(16), 32), "uint32"),  # type: ignore[arg-type]
    ],
)
def test_refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        call()


# --- packing ------------------------------------------------------------------------------------------------


def long_integer(values: Words, bits: int) -> bytes:
    number = sum(int(value) % 2**bits << place * bits for place, value in enumerate(values))
    return number.to_bytes((len(values) * bits + 7) // 8, "little")


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("part", [8, 1 << 16])
def test_packing_is_that_of_a_long_integer(bits: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_PACKED", part)  # a part of 8 elements puts boundaries everywhere
    for count in (0, 1, 2, 7, 8, 9, 16, 23, 65):
        values = sample(bits, count, seed=count)
        values[:1] = 2**bits - 1
        packed = pack(values, bits)
        assert packed == long_integer(values, bits)
        assert len(packed) == packed_size(count, bits)
        unpacked = unpack(packed, count, bits)
        assert unpacked.dtype == word_type(bits)
        np.testing.assert_array_equal(unpacked, values)
        total = sample(bits, count, seed=99)
        expected = modulo(total.astype(object) + values.astype(object), bits)
        add_packed(total, memoryview(packed), bits)
        assert total.tolist() == expected


@pytest.mark.parametrize("bits", [8, 24, 27, 32, 40, 51, 64])
def test_packed_in_parts(bits: int) -> None:
    values = sample(bits, 150_001)
    packed = pack(values, bits)
    np.testing.assert_array_equal(unpack(bytearray(packed), values.size, bits), values)
    assert b"".join(pack(values[first : first + 8000], bits) for first in range(0, 150_001, 8000)) == packed


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_is_modulo(bits: int) -> None:
    """Bits above the residue do not spill into its neighbour."""
    dtype = word_type(bits)
    full = np.full(9, np.iinfo(dtype).max, dtype)
    assert pack(full, bits) == long_integer(full, bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_padding_bits_are_zero(bits: int) -> None:
    for count in range(1, 9):
        unused = -count * bits % 8
        packed = pack(sample(bits, count), bits)
        assert packed[-1] >> 8 - unused == 0
        for bit in range(8 - unused, 8):
            damaged = packed[:-1] + bytes([packed[-1] | 1 << bit])
            total = sample(bits, count)
            for call in (lambda: unpack(damaged, count, bits), lambda: add_packed(total, damaged, bits)):  # noqa: B023
                with pytest.raises(SecureSumError, match="padding") as refused:
                    call()
                assert refused.value.reason == Reason.BAD_UPLOAD
            assert total.tolist() == sample(bits, count).tolist()


@pytest.mark.parametrize("bits", [8, 24, 27, 32, 64])
def test_other_lengths(bits: int) -> None:
    packed = pack(sample(bits, 100), bits)
    for damaged in (packed[:-1], packed + b"\0", b"", packed * 2):
        total = sample(bits, 100)
        with pytest.raises(SecureSumError, match="BAD_UPLOAD") as refused:
            add_packed(total, damaged, bits)
        assert (refused.value.have, refused.value.need) == (len(damaged), len(packed))
        assert total.tolist() == sample(bits, 100).tolist()
