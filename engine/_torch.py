"""The one place that touches PyTorch names with a leading underscore."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["compiler", "fake_mode", "load_package", "package", "storage", "version", "without_onednn"]

_OPTIONS: dict[str, Any] = {
    "cpp.threads": 1,  # parallelism is across clients, one thread a process
    "max_autotune": False,  # measured choices would differ from one machine state to the next
}

_NOTE = "mycelia"


def compiler() -> str | None:
    """The C++ compiler Inductor would call, or None."""
    from torch._inductor import config

    wanted = config.cpp.cxx
    names = [name for name in (wanted if isinstance(wanted, (list, tuple)) else [wanted]) if name]
    return next((path for name in [*names, "g++"] if (path := shutil.which(name))), None)


class _Flat(torch.nn.Module):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.step = graph  # not "graph": an exported module has that name for its own

    def forward(self, *args: Tensor) -> Any:
        return self.step(*args)


def package(graph: fx.GraphModule, args: Sequence[Tensor], path: Path, note: str = "") -> None:
    """Compile a flat graph ahead of time with Inductor's C++ wrapper into the package `path` (.pt2).

    `note` travels in the package; `load_package` gives it back.
    """
    from torch._inductor import aoti_compile_and_package

    options = _OPTIONS | {"aot_inductor.metadata": {_NOTE: note}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(_Flat(graph), tuple(args), strict=False)
        aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Dispatch operators as if oneDNN were not there (`torch.backends.mkldnn.flags` warns about GPUs)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def version(tensor: Tensor) -> int:
    """How often the tensor was written in place; tells whether somebody did."""
    return int(tensor._version)


def storage(tensor: Tensor) -> int:
    """A number that tensors share exactly when they share memory; fake tensors too, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def fake_mode() -> Any:
    """A mode whose tensors have shapes and no values; tensors with values may be mixed in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def load_package(path: Path) -> tuple[Callable[[list[Tensor]], list[Tensor]], str]:
    """Load a package: a callable and the note.

    The callable takes and returns flat lists and may write into its arguments.
    """
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = aoti_load_package(str(path), run_single_threaded=True).loader
    run: Callable[[list[Tensor]], list[Tensor]] = loader.run
    return run, loader.get_metadata().get(_NOTE, "")
