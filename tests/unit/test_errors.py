"""The tree of errors in the module's docstring equals that of its classes."""

from __future__ import annotations

from specdec.inference import errors


def drawn(text: str) -> dict[str, str]:
    """Return the parent of each error class in the tree that the docstring draws."""
    parents: dict[str, str] = {}
    last: dict[int, str] = {}  # by indentation
    for line in (line for line in text.splitlines() if line.startswith(" ")):
        depth = len(line) - len(line.lstrip())
        for name in line.strip().partition(":")[0].split(", "):
            parents[name] = last.get(depth - 2, "Exception")
            last[depth] = name
    return parents


def test_the_tree_is_drawn_as_it_is() -> None:
    classes = {each for each in vars(errors).values() if isinstance(each, type)}
    assert drawn(errors.__doc__ or "") == {each.__name__: each.__mro__[1].__name__ for each in classes}
