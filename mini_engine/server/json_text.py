"""Lesson 7. Responses as JSON. json holds Python's lock while it writes a value, so large responses need care.

A prompt's log probabilities can be megabytes. They are written in a thread, in pieces, and between two pieces the event
loop gets its turn.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from mini_engine.server.errors import ApiError

LARGE = 4096  # log probabilities; fewer take a few milliseconds
PIECE = 256  # entries of a list

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
