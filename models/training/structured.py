"""Seeded generator of structured text: counting, repetition, records, tables and templates.

Each maker returns one document. Many documents are a single line, because prompts are a single line; a document
often opens with a bare pattern and no explanation, exactly as a prompt would.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable

from . import vocabulary as words
from .patterns import CODE_MAKERS
from .templates import TEMPLATE_MAKERS

Maker = Callable[[random.Random], str]

WORD_POOLS = (words.FRUITS, words.COLORS, words.ANIMALS, words.THINGS, words.NAMES, words.CITIES, words.VERBS)


def counting_list(rng: random.Random) -> str:
    """Count up or down on one line or line by line, with several steps and separators."""
    step = rng.choice((1, 1, 1, 1, 2, 2, 3, 5, 10, 10, 100, 4, -1, -1, -2, -5, -10))
    length = rng.randint(12, 60)
    start = rng.choice((0, 1, 1, 1, step, rng.randint(1, 30), rng.randint(1, 300)))
    if step < 0:
        start = abs(step) * rng.randint(length, 100) if rng.random() < 0.5 else rng.choice((10, 20, 50, 100))
        length = min(length, start // -step + 1)
    numbers = [str(start + step * index) for index in range(length)]
    separator = rng.choice((", ", ", ", ", ", " ", " ", "\n", "\n", "; ", " - ", ",", " -> "))
    opening = rng.choice(("", "", "", "", "Count: ", "Counting: ", "Numbers: ", "[", f"Count from {numbers[0]}: "))
    return opening + separator.join(numbers) + ("]" if opening == "[" else "")


def counting_labelled(rng: random.Random) -> str:
    """Number a word again and again: `Step 1, Step 2, ...` or `item_1 item_2 ...`."""
    label = rng.choice(
        (
            "Step",
            "Chapter",
            "Line",
            "Item",
            "Day",
            "Page",
            "Room",
            "Part",
            "Week",
            "Test",
            "Section",
            "Question",
            *words.THINGS[:8],
        )
    )
    form = rng.choice(("{0} {1}", "{0} {1}", "{0} {1}", "{0}_{1}", "{0}{1}", "{0} #{1}", "{0} {1}:", "{0} {1}."))
    separator = rng.choice((", ", ", ", "\n", "\n", " ", "; "))
    label = label.lower() if "_" in form or rng.random() < 0.3 else label
    start = rng.choice((1, 1, 1, 0, rng.randint(2, 50)))
    return separator.join(form.format(label, start + index) for index in range(rng.randint(8, 40)))


def counting_words(rng: random.Random) -> str:
    """Count in number words or ordinals, days, months or letters, cyclically."""
    pool = rng.choice((words.NUMBER_WORDS, words.NUMBER_WORDS[1:11], words.DAYS, words.MONTHS, words.ORDINALS))
    if rng.random() < 0.3:
        pool = [word.lower() for word in pool]
    start = rng.choice((0, 0, 0, rng.randrange(len(pool))))
    return rng.choice((", ", ", ", " ", "\n")).join(
        pool[(start + index) % len(pool)] for index in range(rng.randint(len(pool), 4 * len(pool)))
    )


def alphabet(rng: random.Random) -> str:
    """Recite the alphabet in upper or lower case, forward or backward, perhaps repeatedly."""
    letters = rng.choice((string.ascii_lowercase, string.ascii_uppercase))
    letters = letters[::-1] if rng.random() < 0.15 else letters
    if rng.random() < 0.3:
        unit = [upper + lower for upper, lower in zip(letters.upper(), letters.lower(), strict=True)]
    else:
        unit = list(letters)
    separator = rng.choice((", ", ", ", " ", " ", "\n", "-", ""))
    return separator.join(unit * rng.randint(1, 4))


def repeated_words(rng: random.Random) -> str:
    """Repeat a cycle of a few words on one line."""
    pool = rng.choice(WORD_POOLS)
    cycle = [rng.choice(pool) for _ in range(rng.randint(1, 6))]
    separator = rng.choice((" ", " ", " ", ", ", ", ", "\n", "; ", " | ", "-", " and "))
    return separator.join(cycle * (rng.randint(30, 90) // len(cycle)))


def repeated_phrase(rng: random.Random) -> str:
    """Repeat a phrase or a sentence, on one line or one per line."""
    if rng.random() < 0.3:
        phrase = " ".join(rng.choice(rng.choice(WORD_POOLS)) for _ in range(rng.randint(3, 9)))
    else:
        phrase = rng.choice(words.PHRASES + words.SENTENCES)
    if phrase[-1] != "." and rng.random() < 0.4:
        phrase = phrase[0].upper() + phrase[1:] + rng.choice((".", ".", "!", ","))
    return rng.choice((" ", " ", "\n", "\n", ", ")).join([phrase] * rng.randint(5, 16))


def random_copy(rng: random.Random) -> str:
    """Repeat a random string of letters or digits; it teaches copying of text that no model can know."""
    alphabet_ = rng.choice((string.ascii_lowercase, string.digits, string.ascii_uppercase, "01", "abc", "+-*", "xyz "))
    unit = "".join(rng.choice(alphabet_) for _ in range(rng.randint(2, 14)))
    return rng.choice((" ", "\n", ", ", "")).join([unit] * rng.randint(8, 24))


def _value(rng: random.Random, field: str) -> object:
    """Draw a plausible value for a record field."""
    pools: dict[str, list[str]] = {
        "name": words.NAMES, "user": words.NAMES, "city": words.CITIES, "color": words.COLORS,
        "status": words.STATES, "state": words.STATES, "title": words.THINGS, "type": words.ANIMALS,
        "key": words.FRUITS, "unit": words.FRUITS, "mode": words.VERBS, "path": words.THINGS, "host": words.THINGS,
    }  # fmt: skip
    if field in pools:
        return rng.choice(pools[field])
    if field == "enabled":
        return rng.random() < 0.5
    if field == "price":
        return round(rng.uniform(1, 99), 2)
    return rng.randint(1, 99)


def _column(rng: random.Random, field: str, count: int) -> list[object]:
    """Draw `count` values of one field: constant, rising, cycling through a few, or all random."""
    style = rng.random()
    if style < 0.25:
        return [_value(rng, field)] * count
    if style < 0.55:
        cycle = [_value(rng, field) for _ in range(rng.randint(2, 4))]
        return [cycle[index % len(cycle)] for index in range(count)]
    first = _value(rng, field)
    if style < 0.8 and type(first) is int:
        step = rng.choice((1, 1, 2, 5, 10))
        first = step if rng.random() < 0.5 else first
        return [first + step * index for index in range(count)]
    return [_value(rng, field) for _ in range(count)]


def json_records(rng: random.Random) -> str:
    """Write many JSON objects with the same keys: a one-line list, JSON lines, or an indented list."""
    fields = rng.sample(words.FIELDS, rng.randint(1, 4))
    fields = fields if rng.random() < 0.2 or "name" in fields else ["name", *fields[:3]]
    counted, count = rng.random() < 0.7, rng.randint(5, 22)
    start = rng.choice((1, 1, 1, 0, rng.randint(1, 200)))
    columns = {field: _column(rng, field, count) for field in fields}
    if counted:
        columns = {"id": [start + index for index in range(count)], **columns}
    records = [{field: columns[field][index] for field in columns} for index in range(count)]
    style = rng.random()
    if style < 0.45:
        return ", ".join(json.dumps(record) for record in records)
    if style < 0.6:
        return json.dumps(records)
    if style < 0.85:
        return "\n".join(json.dumps(record) for record in records)
    return json.dumps(records[:8], indent=rng.choice((2, 4)))


def json_object(rng: random.Random) -> str:
    """Write one JSON object or list with a regular pattern of keys or values."""
    count = rng.randint(8, 30)
    kind = rng.randrange(4)
    label = rng.choice(words.THINGS + words.FIELDS)
    if kind == 0:
        return json.dumps({f"{label}{index}": index for index in range(1, count)})
    if kind == 1:
        return json.dumps({f"{label}_{index}": rng.choice(words.COLORS) for index in range(1, count)})
    if kind == 2:
        return json.dumps({label: list(range(1, count)), "count": count - 1})
    fields = rng.sample(words.FIELDS, 6)
    return json.dumps({field: _value(rng, field) for field in fields}, indent=rng.choice((None, 2, 4)))


def _table_rows(rng: random.Random) -> tuple[list[str], list[list[str]]]:
    fields = ["id", "name", *rng.sample(words.FIELDS[1:], rng.randint(1, 3))]
    fields = fields[rng.choice((0, 0, 1)) :]
    count = rng.randint(6, 20)
    columns = [list(range(1, count + 1)) if field == "id" else _column(rng, field, count) for field in fields]
    return fields, [[str(column[index]) for column in columns] for index in range(count)]


def csv_table(rng: random.Random) -> str:
    """Write a table with comma, semicolon, tab or bar separators, header first."""
    fields, rows = _table_rows(rng)
    separator = rng.choice((",", ",", ",", ", ", ";", "\t", " | "))
    return "\n".join(separator.join(row) for row in [fields, *rows])


def csv_one_line(rng: random.Random) -> str:
    """Write table rows on one line, divided by semicolons or bars."""
    fields, rows = _table_rows(rng)
    inner, outer = rng.choice(((",", "; "), (", ", "; "), (",", " | "), (":", ", "), ("=", ", "), (" ", "; ")))
    return outer.join(inner.join(row) for row in ([fields] if rng.random() < 0.3 else []) + rows)


def markdown_table(rng: random.Random) -> str:
    """Write a markdown table."""
    fields, rows = _table_rows(rng)
    lines = [fields, ["---"] * len(fields), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullet_list(rng: random.Random) -> str:
    """Write a numbered or bulleted list of the form `1. Open the door`."""
    mark = rng.choice(("{}. ", "{}. ", "{}) ", "- ", "* ", "- [ ] "))
    verb = rng.choice(words.VERBS).capitalize()
    lines = []
    for index in range(rng.randint(6, 20)):
        verb = rng.choice(words.VERBS).capitalize() if rng.random() < 0.3 else verb
        lines.append(mark.format(index + 1) + f"{verb} the {rng.choice(words.THINGS)}")
    return rng.choice(("\n", "\n", " ", ", ")).join(lines)


def arithmetic(rng: random.Random) -> str:
    """Write a times table, sums with one fixed operand, squares, doublings or powers of two."""
    separator = rng.choice(("\n", "\n", ", ", ", ", "; "))
    number, count = rng.randint(1, 12), rng.randint(8, 20)
    kind = rng.randrange(6)
    if kind == 0:
        lines = [f"{number} x {index} = {number * index}" for index in range(1, count)]
    elif kind == 1:
        lines = [f"{index} + {number} = {index + number}" for index in range(1, count)]
    elif kind == 2:
        lines = [f"{number} * {index} = {number * index}" for index in range(1, count)]
    elif kind == 3:
        lines = [f"{index} + {index} = {2 * index}" for index in range(1, count)]
    elif kind == 4:
        lines = [f"{index} - 1 = {index - 1}" for index in range(count + 10, 10, -1)]
    else:
        lines = [f"{index} squared is {index * index}" for index in range(1, count)]
    return separator.join(lines)


def key_values(rng: random.Random) -> str:
    """Write key=value settings, ini sections, query strings or environment lines."""
    form = rng.choice(("{}={}", "{}={}", "{} = {}", "{}: {}", "export {}={}", "--{}={}", '{}="{}"'))
    separator = rng.choice(("\n", "\n", " ", ", ", "&", "; "))
    label = rng.choice(words.FIELDS + words.THINGS)
    counted, joint = rng.random() < 0.6, rng.choice(("_", ""))
    pairs = []
    for index in range(1, rng.randint(8, 26)):
        field = f"{label}{joint}{index}" if counted else rng.choice(words.FIELDS)
        pairs.append(form.format(field, index * 10 if counted else _value(rng, field)))
    return separator.join(pairs)


MAKERS: tuple[tuple[Maker, int], ...] = (
    (counting_list, 12), (counting_labelled, 6), (counting_words, 4), (alphabet, 4), (repeated_words, 9),
    (repeated_phrase, 8), (random_copy, 5), (json_records, 11), (json_object, 4), (csv_table, 5), (csv_one_line, 3),
    (markdown_table, 4), (bullet_list, 4), (arithmetic, 5), (key_values, 5),
    *((maker, 2) for maker in TEMPLATE_MAKERS), *((maker, 3) for maker in CODE_MAKERS),
)  # fmt: skip


def make_documents(count: int, seed: int) -> list[str]:
    """Return `count` structured documents; different seeds give disjoint random streams."""
    rng = random.Random(seed)
    makers = [maker for maker, _ in MAKERS]
    weights = [weight for _, weight in MAKERS]
    return [maker(rng) for maker in rng.choices(makers, weights, k=count)]
