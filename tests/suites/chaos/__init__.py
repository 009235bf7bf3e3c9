"""Servers die, freeze and lose their links in the middle of answers; what a client has then is right, or says so."""
