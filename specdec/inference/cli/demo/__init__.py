"""Demonstrations, shown by `specdec demo` with the bundled models and real servers.

Owns what is shown and in which order. Does not know models: servers are started by their command line, and asked by
their API. Start reading: `speed.py`.
"""
