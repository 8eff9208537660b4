"""The device side of a federation: the client's half of a secure sum."""
