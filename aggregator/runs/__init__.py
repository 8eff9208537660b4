"""Runs: rounds one after the other, over devices that come and go."""
