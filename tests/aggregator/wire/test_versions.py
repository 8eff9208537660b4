"""The version that both sides of a stream speak."""

import pytest

from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.versions import common_version


def test_versions_meet() -> None:
    assert common_version((1, 3), (2, 5)) == 3
    assert common_version((4, 9), (2, 5)) == 5
    for theirs in ((1, 1), (6, 9)):
        with pytest.raises(Problem, match=f"versions {theirs[0]} to {theirs[1]}, this one 2 to 5") as caught:
            common_version(theirs, (2, 5))
        assert caught.value.reason is Reason.VERSION
