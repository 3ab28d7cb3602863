"""Lesson 7. Large JSON texts. json holds Python's lock (GIL) until it is done, so no other thread runs meanwhile.

A prompt's log probabilities can be megabytes. They are written in a thread, in pieces, and between two pieces the event
loop gets its turn. A client's text is scanned before it is read: counting its values takes C a millisecond.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from mini_engine.server.errors import ApiError

LARGE = 4096  # log probabilities; fewer take a few milliseconds
PIECE = 256  # entries of a list

MAX_VALUES = 2**16  # of a client's JSON text

JsonObject = dict[str, Any]


def to_json(data: Any) -> str:
    """Return compact JSON with non-ASCII letters unescaped. Line breaks inside a string become \\n.

    Raises:
        ApiError: 500, a number is NaN or infinite, which JSON cannot represent.
    """
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ApiError(500, "the model's log probabilities are not finite numbers; are its weights broken?") from None


def to_json_in_pieces(data: Any) -> str:
    """Return the same without holding Python's lock for long, for data with few long strings."""
    if isinstance(data, dict):
        return "{" + ",".join(f"{to_json(key)}:{to_json_in_pieces(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list) and len(data) > PIECE:
        pieces = (to_json(data[at : at + PIECE])[1:-1] for at in range(0, len(data), PIECE))
        return "[" + ",".join(pieces) + "]"
    if isinstance(data, list):
        return "[" + ",".join(map(to_json_in_pieces, data)) + "]"
    return to_json(data)


async def written(num_logprobs: int, make: Callable[[], Any]) -> str:
    """Make a part of a response with `num_logprobs` log probabilities and write it, large ones off the event loop."""
    if num_logprobs <= LARGE:
        return to_json(make())
    return await asyncio.to_thread(lambda: to_json_in_pieces(make()))


def num_values(data: bytes) -> int:
    """Return the approximate number of values in a JSON text; beyond MAX_VALUES, any larger number.

    Each value but the first follows a comma or begins a list or an object. Those marks do not count inside a string, so
    the strings are cut out, without a loop in Python. There are at most two for each value: a key and a string.
    """
    if (most := count_marks(data)) <= MAX_VALUES:
        return most
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if (least := unescaped.count(b'"') // 4) > MAX_VALUES:
        return least
    return count_marks(b"".join(unescaped.split(b'"')[::2]))


def count_marks(data: bytes) -> int:
    """Return the number of characters after which a value begins."""
    return sum(map(data.count, (b",", b"[", b"{")))
