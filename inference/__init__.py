"""Speculative decoding: models, sampling, verification, engines and the workers that serve them."""

VERSION = "0.1.0"
"""As in pyproject.toml."""
