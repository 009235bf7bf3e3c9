"""Servers die, freeze and lose their links in the middle of answers; a client has the right one, or a clear error."""
