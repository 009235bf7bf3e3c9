"""Entry of `python -m specdec`, which does the same as the command `specdec`."""

from __future__ import annotations

import sys

from specdec import main

sys.exit(main())
