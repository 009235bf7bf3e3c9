"""Measurement: starts the servers, delays the links between them, sends the requests, and keeps the answers.

Does not know: how figures are computed or shown.
Start reading: `topologies.py`, then `measurement.py`.
"""
