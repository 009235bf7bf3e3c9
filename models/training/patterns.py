"""Makers of simple, regular code: getters, enums, literals, small functions, assertions."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import vocabulary as words

OPERATIONS = (("add", "+"), ("subtract", "-"), ("multiply", "*"), ("divide", "/"), ("modulo", "%"), ("power", "**"))


def binary_functions(rng: random.Random) -> str:
    """Write small functions of two arguments: `def add(a, b): return a + b`."""
    left, right = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    chosen = list(OPERATIONS) if rng.random() < 0.6 else rng.sample(OPERATIONS, 5)
    inline = rng.random() < 0.25
    body = " return " if inline else "\n    return "
    gap = "\n" if inline else "\n\n" if rng.random() < 0.5 else "\n\n\n"
    return gap.join(f"def {name}({left}, {right}):{body}{left} {sign} {right}" for name, sign in chosen)


def getters(rng: random.Random) -> str:
    """Write a class with getters and perhaps setters for several fields."""
    fields = rng.sample(words.FIELDS, rng.randint(3, 6))
    lines = [f"class {rng.choice(words.THINGS).capitalize()}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    setters = rng.random() < 0.4
    prefix = rng.choice(("get_", "get_", "read_"))
    for field in fields:
        lines += ["", f"    def {prefix}{field}(self):", f"        return self.{field}"]
        if setters:
            lines += ["", f"    def set_{field}(self, {field}):", f"        self.{field} = {field}"]
    return "\n".join(lines)


def enumeration(rng: random.Random) -> str:
    """Write an enumeration or a run of numbered constants."""
    pool = rng.choice((words.COLORS, words.DAYS, words.MONTHS, words.ANIMALS, words.FRUITS))
    members = [word.upper() for word in pool[: rng.randint(5, 12)]]
    start = rng.choice((0, 1, 1))
    if rng.random() < 0.5:
        head = f"class {rng.choice(('Color', 'Kind', 'Day', 'Level', 'State'))}(Enum):\n    "
        return head + "\n    ".join(f"{member} = {start + index}" for index, member in enumerate(members))
    return rng.choice(("\n", "; ", ", ")).join(f"{member} = {start + index}" for index, member in enumerate(members))


def literal(rng: random.Random) -> str:
    """Write a list or dictionary literal with a regular pattern."""
    name = rng.choice(("values", "items", "data", "table", "names", "numbers", "config", "colors"))
    pool = rng.choice((words.COLORS, words.NAMES, words.FRUITS, words.CITIES))
    count, kind = rng.randint(8, 24), rng.randrange(5)
    chosen = [rng.choice(pool) for _ in range(count)]
    if kind == 0:
        return f"{name} = [{', '.join(str(index) for index in range(1, count))}]"
    if kind == 1:
        return f"{name} = {chosen!r}"
    if kind == 2:
        return f"{name} = {{{', '.join(f'{word!r}: {index}' for index, word in enumerate(chosen, 1))}}}"
    if kind == 3:
        return f"{name} = {{\n" + "".join(f"    {word!r}: {index},\n" for index, word in enumerate(chosen, 1)) + "}"
    return f"{name} = [{', '.join(f'({index}, {index * index})' for index in range(1, count))}]"


def assignments(rng: random.Random) -> str:
    """Write numbered assignments, prints, calls or self-assignments."""
    word = rng.choice(words.FIELDS + words.THINGS)
    form = rng.choice(
        (
            "{w}{i} = {i}", "{w}_{i} = {t}", "print({i})", "print('{w} {i}')", "{w}[{i}] = {t}", "x = x + {i}",
            "assert {w}({i}) == {t}", "{w}.append({i})", "a{i} = b{i} + c{i}", "int {w}{i} = {i};",
        )
    )  # fmt: skip
    separator = rng.choice(("\n", "\n", "; "))
    return separator.join(form.format(w=word, i=index, t=10 * index) for index in range(1, rng.randint(8, 24)))


def branches(rng: random.Random) -> str:
    """Write an if/elif chain or a dispatch function."""
    pool = rng.choice((words.COLORS, words.ANIMALS, words.FRUITS, words.DAYS))
    chosen = rng.sample(pool, min(len(pool), rng.randint(4, 7)))
    name = rng.choice(("name", "value", "key", "kind", "color"))
    lines = [f"def {rng.choice(words.VERBS)}_{name}({name}):"]
    for index, word in enumerate(chosen):
        lines += [f"    {'if' if index == 0 else 'elif'} {name} == '{word}':", f"        return {index + 1}"]
    return "\n".join([*lines, "    else:", "        return 0"])


def loops(rng: random.Random) -> str:
    """Write several small loop functions that differ only in names."""
    functions = []
    for noun in rng.sample(words.THINGS, rng.randint(2, 4)):
        functions.append(
            f"def {rng.choice(('count', 'list', 'print'))}_{noun}s({noun}s):\n"
            f"    result = []\n    for {noun} in {noun}s:\n        result.append({noun})\n    return result"
        )
    return "\n\n".join(functions)


def imports(rng: random.Random) -> str:
    """Write import lines of well-known modules."""
    modules = ["os", "sys", "re", "json", "math", "time", "random", "string", "socket", "struct", "types", "logging"]
    chosen = sorted(rng.sample(modules, rng.randint(4, 9)))
    return "\n".join(f"import {module}" for module in chosen) + "\n\n" + binary_functions(rng)


CODE_MAKERS: tuple[Callable[[random.Random], str], ...] = (
    binary_functions, binary_functions, getters, enumeration, literal, assignments, branches, loops, imports,
)  # fmt: skip
