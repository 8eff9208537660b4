"""The mycelia command."""
