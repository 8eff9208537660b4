"""Attacks on inputs: one family a file."""
