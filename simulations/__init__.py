"""Whole federations on one machine: populations, partitions, backends and scenarios."""
