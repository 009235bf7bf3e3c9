"""Library (`LLM`, `Client` and their asynchronous twins), and the `specdec` command.

The project's packages are imported at first use. If `import inference` would find another project's package of that
name, the command names its place and ends.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec import errors
    from specdec.inference import VERSION as __version__
    from specdec.inference.cli.prompts.results import Comparison, Result
    from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
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
    "main",
]


def __getattr__(name: str) -> Any:
    """Import the library when it is used first."""
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
    """Return the names that the library has, before they are imported."""
    return [*__all__, "__doc__"]


def main() -> int:
    """Run a role, a comparison, a study or a diff; return the exit code."""
    if (stranger := _stranger(find_spec("inference"))) is not None:
        ours = Path(__file__).resolve().parents[1] / "inference"
        print(
            f"error: `import inference` finds {stranger}, which is another package; ours is {ours}. "
            "Take the other one off PYTHONPATH, or uninstall it",
            file=sys.stderr,
        )
        return 2
    arguments = sys.argv[1:]
    if arguments[:1] in (["compare"], ["study"], ["diff"]):
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


def _stranger(spec: ModuleSpec | None) -> str | None:
    """Return the place of another project's package `inference`; None if Python finds ours, beside this package."""
    if spec is None:
        return "nothing"
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    ours = Path(__file__).resolve().parents[1] / "inference"
    if ours in places and (ours / "cli" / "app.py").is_file():
        return None
    return str(places[0] if places else spec.origin)


if __name__ == "__main__":
    sys.exit(main())
