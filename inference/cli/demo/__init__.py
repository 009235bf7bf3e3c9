"""Scenes of `specdec demo`, on the bundled models and real servers.

Knows servers by their command line and their API. Start reading at `speed.py`.
"""
