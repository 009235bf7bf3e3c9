"""Measurement of this project's claims by one command, `make claims`, against thresholds that are set in advance."""
