"""Speculative decoding: models, sampling, verification, engines and the workers that serve them."""
