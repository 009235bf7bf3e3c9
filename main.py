"""Speculative decoding as a service: `python main.py --role ROLE`; `--help` lists the roles."""

from __future__ import annotations

import sys

from specdec import main

if __name__ == "__main__":
    sys.exit(main())
