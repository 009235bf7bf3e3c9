"""Speculative decoding as a service: engines, servers and their command line. docs/architecture.md has the map.

Imports point downwards in this order: cli, serving, gateway, workers, engine, speculation, scheduling, backends; then
sampling, text and observe; last the modules of this folder, which import none of these packages.
"""

VERSION = "0.2.0"
"""Version of the package, the same as in pyproject.toml."""
