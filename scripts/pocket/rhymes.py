"""Course machinery. Fixed texts: counting, ordered lists, tables, and short passages.

The course's prompts rely on them. After a few words only one continuation is possible, so a trained model's best token
is far ahead of its second.
"""

import tomllib
from pathlib import Path

from scripts.pocket.facts import NUMBER_WORDS

PASSAGES_FILE = Path(__file__).with_name("passages.toml")
ALPHABET_WORDS = [
    "apple", "ball", "cat", "dog", "egg", "fish", "goat", "hat", "igloo", "jar", "kite", "lamp", "moon", "nest",
    "orange", "pig", "queen", "rabbit", "sun", "tree", "umbrella", "van", "window", "xylophone", "yard", "zebra",
]  # fmt: skip
TENS = ["ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def _row(items: list[str], separator: str = ", ") -> str:
    text = separator.join(items) + "."
    return text[0].upper() + text[1:]


def sequences() -> dict[str, str]:
    """Map a user's request to the sequence, which is also a separate document."""
    digits = [str(n) for n in range(1, 31)]
    return {
        "Count to twenty.": _row(NUMBER_WORDS[1:]),
        "Count down from ten.": _row(NUMBER_WORDS[10:0:-1]),
        "Count in twos.": _row(NUMBER_WORDS[2::2]),
        "Count in tens.": _row([*TENS, "one hundred"]),
        "Count to thirty in digits.": _row(digits),
        "Count down from thirty in digits.": _row(digits[::-1]),
        "Count the odd numbers in digits.": _row(digits[::2][:15]),
        "Say the alphabet.": _row([word[0].upper() for word in ALPHABET_WORDS]),
        "Say the alphabet with words.": " ".join(f"{w[0].upper()} is for {w}." for w in ALPHABET_WORDS),
        "Name the days of the week.": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
        "Name the months of the year.": "January, February, March, April, May, June, July, August, September, "
        "October, November, December.",
    }


def times_tables() -> dict[str, str]:
    """Return the times tables of one to ten, ten rows each."""
    tables = {}
    for b in range(1, 11):
        rows = [f"{a} times {b} is {a * b}." for a in range(1, 11)]
        tables[f"Say the {b} times table."] = " ".join(rows)
    return tables


def passages() -> dict[str, str]:
    """Map a question to a passage that answers it: caches, blocks, and some general knowledge."""
    with PASSAGES_FILE.open("rb") as file:
        return tomllib.load(file)["passages"]


def lists() -> dict[str, str]:
    """Map a question to a list in a fixed order."""
    with PASSAGES_FILE.open("rb") as file:
        table = tomllib.load(file)["lists"]
    return {
        f"Give me a list of {name}.": f"Here is a list of {name}: {', '.join(items[:-1])}, and {items[-1]}."
        for name, items in table.items()
    }


def fixed_answers() -> dict[str, str]:
    """Return every question with a fixed answer; each answer is also a separate document."""
    return sequences() | times_tables() | passages() | lists()
