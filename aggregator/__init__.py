"""The server side of a federation: the round machine, selection and robust rules."""
