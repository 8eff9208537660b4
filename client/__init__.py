"""The device side of a federation: what a device does, its owner's policy, and its half of a secure sum."""

from mycelia.client.runner import Device

__all__ = ["Device"]
