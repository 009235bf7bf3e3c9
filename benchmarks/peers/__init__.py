"""Comparison of this project's decoding with other programs': `make bench-peers`, or `python -m benchmarks.peers`."""
