"""Proof of this project's claims by one command, `make claims`, with thresholds that were set before."""
