"""Lesson 0. Values from users: whole numbers of any type, and how an error message quotes a value."""

import math
import reprlib
from numbers import Integral, Real

MOST_CHARACTERS = 100


def shown(value: object) -> str:
    """Return `value` for an error message: one line, shortened if it is long, whatever its `__repr__` does."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    try:
        line = " ".join(short.repr(value).split())
    except Exception:  # a number of 5,000 digits has no repr
        return f"a value of type {type(value).__name__}"
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"


def whole(value: object) -> int | None:
    """Return a whole number of any type, NumPy's included, as an int; None for everything else, True and 1.0 too."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def real(value: object) -> float | None:
    """Return a number of any type, NumPy's included, as a float; None for everything else, True too."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a number of 400 digits: outside every range
        return math.nan
