"""Library (`LLM`, `Client` and their asynchronous twins), and the command `specdec`.

Each name is imported at its first use. `inference`, `grpc_comm` and `comparison` at the root of the repository are
links to folders of this package. Import them as `specdec.inference` and so on, never by the names of the links, which
would load each module a second time.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# gRPC reads it when it is imported. Its lines have a form of their own, and name no peer; errors reach us without them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from specdec import errors
    from specdec.inference import VERSION as __version__
    from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
    from specdec.inference.workers.completing.results import Comparison, Result
    from specdec.library import LLM, AsyncClient, AsyncLLM, Client

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_TARGET",
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "Comparison",
    "Result",
    "__version__",
    "errors",
]


if not TYPE_CHECKING:  # a checker would take every name for one of the library

    def __getattr__(name: str) -> Any:
        """Return the object of this package with the name `name`, whose module is imported at the first use.

        Raises:
            AttributeError: the name is not in `__all__`.
        """
        if name == "__version__":
            from specdec.inference import VERSION

            return VERSION
        if name == "errors":
            return import_module("specdec.errors")
        if name not in __all__:
            raise AttributeError(f"module specdec has no attribute {name}")
        from specdec import library

        return getattr(library, name)


def __dir__() -> list[str]:
    """Return the names that this package offers, whether their modules are imported already or not."""
    return [*__all__, "__doc__"]


def main() -> int:
    """Run what the command line names, such as a server, a client or a measurement; return the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["compare"], ["study"], ["diff"], ["law"]):
        from specdec.comparison.app import main as measure

        return measure(arguments[1:] if arguments[0] == "compare" else arguments)
    from specdec.inference.cli.app import end_soon
    from specdec.inference.cli.app import main as run

    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    names_role = bool(arguments) and not arguments[0].startswith("-")
    code = run(["--role", *arguments] if names_role else arguments)
    end_soon(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
