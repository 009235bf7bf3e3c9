"""Compare target-only, fused and distributed speculative decoding: `python compare_architectures.py --help`."""

from __future__ import annotations

import sys

from specdec.comparison.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
