"""What a role is: a value of --role, its flags, and what it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Role:
    """One value of --role.

    Attributes:
        add_flags: adds the role's flags to its parser; imports nothing that is slow.
        run: from parsed flags to an exit code; imports what it needs.
    """

    name: str
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]
