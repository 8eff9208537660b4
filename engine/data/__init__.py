"""Data: examples in memory, the sources they come from, and data sets by name."""

from mycelia.engine.data.examples import Dataset, Examples
from mycelia.engine.data.idx import parse_idx, read_idx
from mycelia.engine.data.raw import standardise
from mycelia.engine.data.sources import BUILTIN, KINDS, load
from mycelia.engine.data.split import holdout
from mycelia.engine.data.torch_source import from_torch

__all__ = [
    "BUILTIN",
    "KINDS",
    "Dataset",
    "Examples",
    "from_torch",
    "holdout",
    "load",
    "parse_idx",
    "read_idx",
    "standardise",
]
