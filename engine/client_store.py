"""What clients keep between rounds, on disk, by client and round."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mycelia.engine.errors import DataError
from mycelia.engine.types import Tensors

__all__ = ["ClientStore"]


class ClientStore:
    """One safetensors file per client and round in which it took part.

    A state is looked up as of a round: what a round wrote is not seen by that round itself, so that a round
    done again after a crash starts from the same states. Two files per client are kept.

    Args:
        folder: made when the first state is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, client: int, round: int) -> Tensors | None:
        """The client's newest state from before `round`, or None.

        Raises:
            DataError: the file is damaged.
        """
        found = max((r for r in self._rounds(client) if r < round), default=None)
        if found is None:
            return None
        path = self._path(client, found)
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}", who=f"client {client}") from error

    def put(self, client: int, round: int, state: Tensors) -> None:
        """Keep the state this round leaves, whole or not at all."""
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, scratch)
        os.replace(scratch, path)
        for old in sorted(r for r in self._rounds(client) if r < round)[:-1]:
            self._path(client, old).unlink(missing_ok=True)

    def forget(self, client: int, round: int) -> None:
        """Drop what one client's round wrote: its update did not count."""
        self._path(client, round).unlink(missing_ok=True)

    def forget_from(self, round: int) -> None:
        """Drop what rounds from this one on wrote: a resumed run does them again."""
        for path in self.folder.glob("*/*.safetensors"):
            if int(path.stem) >= round:
                path.unlink()

    def _path(self, client: int, round: int) -> Path:
        return self.folder / str(client) / f"{round}.safetensors"

    def _rounds(self, client: int) -> list[int]:
        try:
            return [int(entry.name.split(".")[0]) for entry in os.scandir(self.folder / str(client))
                    if entry.name.endswith(".safetensors")]  # fmt: skip
        except FileNotFoundError:
            return []
