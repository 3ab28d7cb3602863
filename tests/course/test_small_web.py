"""Course machinery. The few web classes of a page carry what FastAPI's and Starlette's do.

Protects readers who write lesson 7 in the page from verdicts that the real classes would not give.
"""

import asyncio

from scripts.live import small_web

import pytest
from fastapi import exceptions, responses
from starlette import datastructures
from starlette import exceptions as starlette_exceptions

CONTENT = {"error": {"message": "Zürich is full", "param": None}}
ERRORS = [(404,), (405, "no such method"), (429, "wait", {"Retry-After": "1"})]


@pytest.mark.parametrize("given", ERRORS, ids=str)
def test_an_exception_says_the_same(given):
    few, many = small_web.HTTPException(*given), starlette_exceptions.HTTPException(*given)
    for name in ("status_code", "detail", "headers"):
        assert getattr(few, name) == getattr(many, name)
    assert str(few) == str(many)


def test_a_validation_error_has_the_same_errors():
    errors = [{"type": "missing", "loc": ("body", "prompt"), "msg": "Field required"}]
    few, many = small_web.RequestValidationError(errors), exceptions.RequestValidationError(errors)
    assert few.errors() == many.errors()
    assert not isinstance(few, ValueError) and not isinstance(many, ValueError)


def sent(response) -> list[dict]:
    """Return what a response sends."""
    found = []

    async def send(message):
        found.append(message)

    asyncio.run(response({"type": "http"}, None, send))
    return found


def test_a_response_sends_the_same():
    given = (CONTENT, 503, {"Retry-After": "1", "Connection": "close"})
    (start, body), (their_start, their_body) = (
        sent(small_web.JSONResponse(*given)),
        sent(responses.JSONResponse(*given)),
    )
    assert body["body"] == their_body["body"]
    assert sorted(start.pop("headers")) == sorted(their_start.pop("headers"))
    assert start == their_start


def test_headers_are_found_in_whatever_case():
    scope = {"headers": [(b"authorization", b"Bearer key")]}
    for name in ("authorization", "Authorization", "cookie"):
        assert small_web.Headers(scope=scope).get(name, "") == datastructures.Headers(scope=scope).get(name, "")
