"""Lesson 7. Reads a request's body without letting any body hold up other clients.

Python's lock (GIL) lets one thread run at a time, and neither json nor pydantic releases it before they are done. So a
body is first scanned in C, which takes a millisecond: one of more than MAX_VALUES values is refused unparsed. Large
ones are parsed in a thread; for small ones, the thread switch would cost more than it saves.
"""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from mini_engine.server.errors import ApiError
from mini_engine.server.fields import Body

MAX_VALUES = 2**16
SMALL = 2**14  # bytes
HALF = re.compile("[\ud800-\udfff]")  # a lone surrogate: JSON can spell it, but no text contains it

Wanted = TypeVar("Wanted", bound=Body)


class BodyReader:
    """Turns a body's bytes into a validated request. One thread: large bodies take turns."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: Request, model: type[Wanted]) -> Wanted:
        """Read the request's body as a `model`.

        Raises:
            RequestValidationError: the body is not JSON, or does not match `model`.
            ApiError: it has too many values, or a Content-Encoding.
        """
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(400, f"the body has the Content-Encoding {coding!r}; send it as it is, without that header")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise wrong("model_attributes_type")
        data = await request.body()
        if len(data) <= SMALL:
            return parsed(data, model)
        return await asyncio.get_running_loop().run_in_executor(self.thread, parsed, data, model)


def parsed(data: bytes, model: type[Wanted]) -> Wanted:
    """Parse, validate and prepare a body."""
    if num_values(data) > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES} values; send several requests")
    try:
        content = json.loads(data.decode())  # from bytes, json would also accept UTF-16 and lone surrogates
    except RecursionError:
        raise wrong("json_invalid", reason="it is nested too deeply") from None
    except ValueError as error:  # includes bytes that are not UTF-8, and numbers of thousands of digits
        raise wrong("json_invalid", reason=str(error)) from None
    if not isinstance(content, dict):
        raise wrong("model_attributes_type")
    if rb"\ud" in data.lower() and has_half_a_name(content):
        raise ApiError(400, "a name in the body holds half a character, a lone surrogate; remove it")
    try:
        found = model.model_validate(content)
    except ValidationError as error:
        wrongs = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in wrongs]) from None
    found.prepare()
    return found


def has_half_a_name(content: Any) -> bool:
    """Return True if a name in a JSON value contains a lone surrogate. `fields.Text` finds them in other strings."""
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if any(HALF.search(name) for name in value):
                return True
            left += value.values()
        elif isinstance(value, list):
            left += value
    return False


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


def wrong(kind: str, reason: str = "") -> RequestValidationError:
    """Return an error in the shape of pydantic's."""
    return RequestValidationError([{"type": kind, "loc": ("body",), "msg": kind, "ctx": {"error": reason}}])
