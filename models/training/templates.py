"""Makers of template-like documents: letters, forms, logs, invoices, schedules, fixed sentences."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import vocabulary as words


def letter(rng: random.Random) -> str:
    """Write a short formal letter from a fixed form."""
    name, sender, thing = rng.choice(words.NAMES), rng.choice(words.NAMES), rng.choice(words.THINGS)
    sign = rng.choice(("Yours sincerely", "Kind regards", "Best wishes", "Yours faithfully"))
    day = rng.choice(words.DAYS)
    body = rng.choice(
        (
            f"Thank you for your letter of {day}. We have received your order for one {thing}.",
            f"I am writing to ask about the {thing}. Please let me know on {day} if it is ready.",
            f"We are pleased to inform you that your {thing} is ready. You can collect it on {day}.",
            f"Thank you for your order. Your {thing} will be sent on {day}.",
        )
    )
    middle = rng.choice(("\n\n", " "))
    return f"Dear {rng.choice(('', 'Mr. ', 'Mrs. '))}{name},{middle}{body}{middle}{sign},{middle}{sender}"


def form(rng: random.Random) -> str:
    """Write several filled-in forms with the same fields."""
    fields = rng.sample(("Name", "Age", "City", "Country", "Color", "Animal", "Status", "Day", "Phone"), 4)
    pools = {
        "Name": words.NAMES, "City": words.CITIES, "Country": words.COUNTRIES, "Color": words.COLORS,
        "Animal": words.ANIMALS, "Status": words.STATES, "Day": words.DAYS,
    }  # fmt: skip
    inner, outer = rng.choice((("\n", "\n\n"), (", ", "\n"), (", ", "; "), (" | ", "\n")))
    forms = []
    for _ in range(rng.randint(3, 10)):
        values = [f"{field}: {rng.choice(pools[field]) if field in pools else rng.randint(10, 99)}" for field in fields]
        forms.append(inner.join(values))
    return outer.join(forms)


def log_lines(rng: random.Random) -> str:
    """Write log lines with advancing clock and a few repeating messages."""
    hour, minute, second = rng.randint(0, 23), rng.randint(0, 50), 0
    date = f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d} " if rng.random() < 0.6 else ""
    component = rng.choice(words.THINGS)
    messages = [f"{component} {verb} ok" for verb in rng.sample(words.VERBS, 2)] + [f"request {{}} to {component} done"]
    lines, step = [], rng.choice((1, 1, 5, 10))
    for index in range(1, rng.randint(6, 16)):
        stamp = f"{date}{hour:02d}:{minute:02d}:{second:02d}"
        lines.append(f"{stamp} {rng.choice(words.LEVELS)} {rng.choice(messages).format(index)}")
        second += step
        minute, second = (minute + 1) % 60 if second >= 60 else minute, second % 60
    return "\n".join(lines)


def invoice(rng: random.Random) -> str:
    """Write an invoice with lines of quantity times price."""
    lines, total = [f"Invoice {rng.randint(100, 999)}", f"Customer: {rng.choice(words.NAMES)}"], 0
    for index in range(1, rng.randint(3, 9)):
        count, price = rng.randint(1, 9), rng.randint(1, 10)
        total += count * price
        lines.append(f"{index}. {rng.choice(words.THINGS)}: {count} x {price}.00 = {count * price}.00")
    return "\n".join([*lines, f"Total: {total}.00", "Thank you for your order."])


def sentences(rng: random.Random) -> str:
    """Fill one sentence frame again and again with other words."""
    frame = rng.choice(
        (
            "The {thing} is {color}.", "I have a {color} {thing}.", "{name} lives in {city}.", "My name is {name}.",
            "The {color} {animal} sat on the {thing}.", "{name} likes {fruit}.", "{name} has {number} {fruit}s.",
            "On {day} {name} went to {city}.", "I see a {animal}. The {animal} is {color}.",
            "Hello {name}, welcome to {city}!", "Dear {name}, thank you for the {thing}.",
            "{name}: {number} points.", "Question: What color is the {thing}? Answer: {color}.",
            "Q: Where does {name} live? A: In {city}.", "if you see a {animal}, say {animal}.",
        )
    )  # fmt: skip
    filled = [
        frame.format(
            thing=rng.choice(words.THINGS), color=rng.choice(words.COLORS), animal=rng.choice(words.ANIMALS),
            name=rng.choice(words.NAMES), city=rng.choice(words.CITIES), fruit=rng.choice(words.FRUITS),
            day=rng.choice(words.DAYS), number=rng.randint(2, 20),
        )
        for _ in range(rng.choice((1, 2, 2, 3, 8, 12)))
    ]  # fmt: skip
    return rng.choice((" ", " ", "\n")).join(filled * max(1, rng.randint(8, 14) // len(filled)))


def bottles(rng: random.Random) -> str:
    """Count a verse down: `10 green bottles hanging on the wall, ...`."""
    noun = rng.choice(("green bottles hanging on the wall", "bottles of milk on the wall", "birds in the tree"))
    number = rng.choice((10, 12, 20, 50, 99, rng.randint(10, 99)))
    separator = rng.choice((", ", "\n", ". "))
    return separator.join(f"{number - index} {noun}" for index in range(min(number, rng.randint(6, 14))))


def schedule(rng: random.Random) -> str:
    """Write a week plan or a time table."""
    if rng.random() < 0.5:
        entries = [f"{day}: {rng.choice(words.VERBS)} the {rng.choice(words.THINGS)}" for day in words.DAYS]
        return rng.choice(("\n", ", ", "; ")).join(entries * rng.choice((1, 1, 2)))
    minute = rng.choice(("00", "15", "30"))
    hours = range(rng.randint(6, 9), rng.randint(15, 22))
    return rng.choice(("\n", ", ")).join(f"{hour:02d}:{minute} {rng.choice(words.VERBS)}" for hour in hours)


def html_list(rng: random.Random) -> str:
    """Write an HTML or XML list of like elements."""
    tag = rng.choice(("li", "li", "item", "td", "p", "row"))
    outer = rng.choice(("ul", "ol", "list", "div"))
    pool = rng.choice((words.FRUITS, words.NAMES, words.COLORS, words.CITIES))
    counted = rng.random() < 0.4
    items = [f"<{tag}>{f'Item {index}' if counted else rng.choice(pool)}</{tag}>" for index in range(1, 16)]
    separator = rng.choice(("", "", "\n", "\n  "))
    return f"<{outer}>{separator}{separator.join(items)}{separator.rstrip(' ')}</{outer}>"


def dates(rng: random.Random) -> str:
    """Write consecutive dates, hours or years."""
    separator = rng.choice((", ", ", ", "\n", " "))
    kind = rng.randrange(4)
    if kind == 0:
        year, month = rng.randint(1990, 2030), rng.randint(1, 12)
        return separator.join(f"{year}-{month:02d}-{day:02d}" for day in range(1, rng.randint(12, 29)))
    if kind == 1:
        month_name = rng.choice(words.MONTHS)
        return separator.join(f"{month_name} {day}" for day in range(1, rng.randint(12, 29)))
    if kind == 2:
        year = rng.randint(1800, 2000)
        return separator.join(str(year + index) for index in range(rng.randint(12, 40)))
    return separator.join(f"{hour:02d}:00" for hour in range(24))


TEMPLATE_MAKERS: tuple[Callable[[random.Random], str], ...] = (
    letter, form, log_lines, invoice, sentences, sentences, bottles, schedule, html_list, dates,
)  # fmt: skip
