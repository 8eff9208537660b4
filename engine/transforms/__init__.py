"""Transforms of a Program; each returns a new callable or Program and never changes the one it is given."""
