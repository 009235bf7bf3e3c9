"""`python -m specdec` is the command `specdec`."""

from __future__ import annotations

import sys

from specdec import main

sys.exit(main())
