"""Lesson 7. Reads a request's body so that no body can hold up the other clients.

Python's lock lets one thread run at a time, and neither json nor pydantic gives it back before they are done. So a body
is first looked at in C, which takes a millisecond: one of more than MAX_VALUES values is refused unread. Large ones are
parsed in a thread; the small ones are not worth the way there.
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
HALF = re.compile("[\ud800-\udfff]")  # JSON can spell half of a character beyond U+FFFF; no text contains it

Wanted = TypeVar("Wanted", bound=Body)


class BodyReader:
    """Turns a body's bytes into a checked request. One thread: two large bodies take turns."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: Request, model: type[Wanted]) -> Wanted:
        """Read a request of this kind.

        Raises:
            RequestValidationError: the body is not JSON, or not what `model` describes.
            ApiError: it has too many values, or is encoded.
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
    """Parse, check and prepare a body."""
    if num_values(data) > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES} values; send several requests")
    try:
        content = json.loads(data.decode())  # from bytes, json would take UTF-16 and half characters, too
    except RecursionError:
        raise wrong("json_invalid", reason="it is nested too deeply") from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
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
    """Whether a name in a value from JSON is no text. In the values of parameters, `fields.Text` finds that."""
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
    """The number of values in a text of JSON, about; beyond MAX_VALUES, any number that is too large.

    Each value but the first follows a comma or begins a list or an object. Those marks do not count inside a string, so
    the strings are cut out, without a loop in Python. There are at most two for each value: a key and a text.
    """
    if (most := count_marks(data)) <= MAX_VALUES:
        return most
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if (least := unescaped.count(b'"') // 4) > MAX_VALUES:
        return least
    return count_marks(b"".join(unescaped.split(b'"')[::2]))


def count_marks(data: bytes) -> int:
    """The number of characters after which a value begins."""
    return sum(map(data.count, (b",", b"[", b"{")))


def wrong(kind: str, reason: str = "") -> RequestValidationError:
    """An error in the shape that pydantic's have."""
    return RequestValidationError([{"type": kind, "loc": ("body",), "msg": kind, "ctx": {"error": reason}}])
