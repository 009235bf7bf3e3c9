"""Servers die, freeze and lose links during answers; the client gets the right answer, or a clear error."""
