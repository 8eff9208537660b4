"""The noise source: named streams of cipher bits, and the uniform draws made of them."""

import importlib.metadata
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.noise import NoiseSource, Stream

SOURCE = NoiseSource.seeded(20240611)


def test_bits_are_those_of_the_cipher() -> None:
    # RFC 8439, appendix A.1, test vector 1: key, nonce and counter of zeros
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert Stream(bytes(32)).bytes(64).hex() == expected
    assert Stream(bytes(32)).words(1)[0] == int.from_bytes(bytes.fromhex(expected)[:8], "little")


def test_reads_go_on_where_the_last_one_ended() -> None:
    whole = SOURCE.bytes("noise", 0, "w", 300_000)
    stream = SOURCE.generator("noise", 0, "w")
    assert b"".join(stream.bytes(size) for size in (1, 63, 64, 65, 70_001, 229_806)) == whole


def test_names_are_streams() -> None:
    names = [
        *itertools.product(("noise", "noise1", "sampling"), (0, 1, 11), ("", "a", "1a")),
        ('noise", 1, "', 1, ""),
        ("noise", 1, '", 1, "'),
    ]
    drawn = {SOURCE.bytes(*name, 16) for name in names}
    assert len(drawn) == len(names)
    assert SOURCE.bytes("noise", 0, "a", 16) == SOURCE.bytes("noise", np.int64(0), "a", 16)
    assert SOURCE.bytes("noise", 0, "a", 16) != NoiseSource.seeded(1).bytes("noise", 0, "a", 16)
    with pytest.raises(ConfigError, match="count from 0"):
        SOURCE.generator("noise", -1)


def test_os_noise_without_extras() -> None:
    first, second = NoiseSource.os(), NoiseSource.os()
    assert first.key != second.key
    assert first.kind == "os"
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)
    seeded = NoiseSource.seeded(7)
    assert seeded.kind == "seeded"
    assert "not for release" in seeded.note
    assert "not for release" not in first.note
    for said in (seeded.note, repr(seeded), str(seeded)):
        assert "secure" not in said.lower()
    needed = importlib.metadata.requires("mycelia") or []
    assert any(line.startswith("cryptography") and "extra" not in line for line in needed)
    script = (
        "import sys; from mycelia.privacy.noise import NoiseSource, DiscreteGaussian;"
        "DiscreteGaussian().sample(3, 1.0, NoiseSource.os(), 'noise', 0);"
        "print([name for name in ('opacus', 'torchcsprng', 'Crypto', 'nacl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("root", [-1, 2**63])
def test_seeds_out_of_range(root: int) -> None:
    with pytest.raises(ConfigError, match="seed"):
        NoiseSource.seeded(root)


def test_random_is_uniform() -> None:
    drawn = SOURCE.generator("uniform", 0).random(200_000)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert 0 <= drawn.min() <= drawn.max() < 1
    assert (drawn * 2.0**53 == np.floor(drawn * 2.0**53)).all()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-3, 4), (10, 20), (-(2**63), 2**63)])
def test_integers_are_uniform(low: int, high: int) -> None:
    drawn = SOURCE.generator("integers", 0, f"{low} {high}").integers(low, high, 70_000)
    assert drawn.dtype == np.int64
    bins = min(high - low, 16)
    places = [(int(value) - low) * bins // (high - low) for value in drawn]
    counts = np.bincount(places, minlength=bins)
    assert len(counts) == bins
    if bins > 1:
        assert stats.chisquare(counts).pvalue > 1e-3


def test_integers_of_a_span_that_does_not_divide_the_words() -> None:
    # 2**64 mod 3 * 2**62 is 2**62: without rejection the first third would come twice as often
    drawn = SOURCE.generator("integers", 0).integers(-(2**63), 2**62, 30_000)
    thirds = (drawn.astype(object) + 2**63) // 2**62
    assert stats.chisquare(np.bincount(thirds.astype(int), minlength=3)).pvalue > 1e-3


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, 2**63 + 1), (-(2**63) - 1, 0)])
def test_integers_refuse_impossible_ranges(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="low < high"):
        SOURCE.generator("integers", 0).integers(low, high, 1)


def test_permutations_are_uniform() -> None:
    stream = SOURCE.generator("order", 0)
    found: dict[tuple[int, ...], int] = {}
    for _ in range(4800):
        order = tuple(stream.permutation(4).tolist())
        found[order] = found.get(order, 0) + 1
    assert set(found) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(found.values())).pvalue > 1e-3
    assert sorted(stream.permutation(1000)) == list(range(1000))
    assert stream.permutation(0).tolist() == []


def test_a_tie_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [np.array([5, 5, 1], np.uint64), np.array([7, 6, 1], np.uint64)]

    def words(self: Stream, count: int) -> npt.NDArray[np.uint64]:
        return answers.pop(0)

    monkeypatch.setattr(Stream, "words", words)
    assert SOURCE.generator("order", 0).permutation(3).tolist() == [2, 1, 0]


@pytest.mark.parametrize("source", [NoiseSource.os(), NoiseSource.seeded(3)], ids=["os", "seeded"])
def test_keys_are_saved_for_their_owner_alone(source: NoiseSource, tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    source.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert NoiseSource.load(path) == source
    assert [file.name for file in tmp_path.iterdir()] == ["noise.key"]
    NoiseSource.seeded(4).save(path)  # replaced whole
    assert NoiseSource.load(path) == NoiseSource.seeded(4)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640"):
        NoiseSource.load(path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kind": "os", "key": "00"}', '{"kind": "x", "key": 1}', "\udcff"]
)
def test_other_files_are_no_keys(content: str, tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o600)
    with pytest.raises(DataError, match="noise key"):
        NoiseSource.load(path)


def test_a_missing_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        NoiseSource.load(tmp_path / "noise.key")


def test_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(OSError, match="disk full"):
        SOURCE.save(tmp_path / "noise.key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_has_32_bytes_and_a_known_kind() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        NoiseSource("os", bytes(16))
    with pytest.raises(ConfigError, match="'csprng'"):
        NoiseSource("csprng", bytes(32))  # type: ignore[arg-type]
