"""Course machinery. A small tensor as text, as torch prints it."""

import math
from typing import Any

from scripts.live.small.strided import BOOL, FLOAT, Dtype, bool_, float32, int64


def shown(nested: Any, numbers: list[Any], dtype: Dtype) -> str:
    """Return `tensor(...)`, with a dtype where the numbers do not tell it."""
    texts = written(numbers, dtype)
    finite = [text for number, text in texts.items() if number is not None and abs(number) != math.inf]
    width = max(map(len, finite), default=0) if isinstance(nested, list) else 0
    body = joined(nested, {number: text.rjust(width) for number, text in texts.items()}, 1)
    tells = dtype in (float32, int64, bool_) and (numbers or dtype is float32)
    return f"tensor({body})" if tells else f"tensor({body}, dtype={dtype!r})"


def written(numbers: list[Any], dtype: Dtype) -> dict[Any, str]:
    """Return each number as text, all with as many digits; NaN is under None."""
    if dtype.kind != FLOAT:
        return {number: str(bool(number) if dtype.kind == BOOL else number) for number in numbers}
    finite = [abs(number) for number in numbers if abs(number) < math.inf and number]
    small, large = min(finite, default=1.0), max(finite, default=1.0)
    if all(number == int(number) for number in finite):
        form = "{:.4e}" if large / small > 1000 or large > 1e8 else "{:.0f}."
    else:
        form = "{:.4e}" if large / small > 1000 or large > 1e8 or small < 1e-4 else "{:.4f}"
    return {key(number): form.format(number) if abs(number) < math.inf else str(number) for number in numbers}


def key(number: Any) -> Any:
    return None if number != number else number


def joined(nested: Any, texts: dict[Any, str], depth: int) -> str:
    if not isinstance(nested, list):
        return texts[key(nested)]
    if nested and isinstance(nested[0], list):
        return "[" + (",\n" + " " * depth).join(joined(row, texts, depth + 1) for row in nested) + "]"
    return "[" + ", ".join(texts[key(number)] for number in nested) + "]"
