"""Lesson 0. Values from users: numbers of any type, checks of options, and how an error message quotes a value."""

import math
import reprlib
from collections.abc import Collection
from numbers import Integral, Real

from mini_engine.base.errors import UserError

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


def checked_whole(
    name: str, value: object, least: int, most: int | None = None, note: str = "", param: str | None = None
) -> int:
    """Return a whole number from `least` to `most` as an int. UserError, about `param` or else `name`, for others.

    note: appended to the message, in brackets.
    """
    number = whole(value)
    if number is None or number < least or (most is not None and number > most):
        span = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise refusal(name, value, f"a whole number {span}", note, param)
    return number


def checked_real(
    name: str, value: object, least: float, most: float = math.inf, note: str = "", param: str | None = None
) -> float:
    """Return a number from `least` to `most`, not NaN, as a float; otherwise like `checked_whole`."""
    number = real(value)
    if number is None or not least <= number <= most:
        span = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise refusal(name, value, f"a number {span}", note, param)
    return number


def refusal(name: str, value: object, wanted: str, note: str, param: str | None) -> UserError:
    """Return the error for a value that is not `wanted`."""
    remark = f" ({note})" if note else ""
    return UserError(f"{name} is {shown(value)}; give {wanted}{remark}", param=param or name)


def check_switch(name: str, value: object, param: str | None = None) -> None:
    """Raise UserError, about `param` or else `name`, unless the value is True or False."""
    if type(value) is not bool:
        raise UserError(f"{name} is {shown(value)}; give True or False", param=param or name)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise UserError unless the value is one of these words."""
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name} is {shown(value)}; choose one of {', '.join(choices)}", param=name)
