"""Devices are enrolled once for all tests here: their folders are held by this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from mycelia.client.identity import DeviceIdentity
from tests.aggregator.connections import World


class People(NamedTuple):
    """An operator's world, and the devices in it by id."""

    world: World
    devices: dict[int, DeviceIdentity]

    def first(self, count: int) -> list[DeviceIdentity]:
        return [self.devices[client] for client in range(1, count + 1)]


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> People:
    world, folder = World(), tmp_path_factory.mktemp("people")
    return People(world, {n: world.enrol_folder(n, folder / f"id{n}") for n in range(1, 11)})
