"""This project's decoding beside other programs': `make bench-peers`, or `python -m benchmarks.peers`."""
