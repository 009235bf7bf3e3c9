"""Speculative decoding as a service. docs/architecture.md is the map of these packages.

Imports point downwards: cli, serving, gateway, workers, engine, speculation, scheduling, backends, sampling
and text and observe, then the modules of this folder, which import nothing above them.
"""

VERSION = "0.2.0"
"""Version of the package, the same as in pyproject.toml."""
