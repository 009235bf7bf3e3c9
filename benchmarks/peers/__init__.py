"""Our decoding against that of other programs: `make bench-peers`, or `python -m benchmarks.peers`."""
