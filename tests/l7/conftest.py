"""Lesson 7. A real server for the tests, on a free port of this machine, around a small random model."""

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from tests.l7.service import WATCHED, Service


class Unwritten(logging.Handler):
    """Remembers the unwritten tasks that the server ran into, in whatever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[NotImplementedError] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exception of a log record, and at those behind it."""
        error = record.exc_info[1] if record.exc_info else None
        while error is not None:
            if isinstance(error, NotImplementedError):
                self.met.append(error)
            error = error.__cause__ or error.__context__


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that fails because the server ran into an unwritten task says which."""
    unwritten = Unwritten()
    for name in WATCHED:
        logging.getLogger(name).addHandler(unwritten)
    try:
        return (yield)
    except BaseException as error:
        if unwritten.met:
            raise NotImplementedError(str(unwritten.met[0])) from error
        raise
    finally:
        for name in WATCHED:
            logging.getLogger(name).removeHandler(unwritten)


@pytest.fixture
def service() -> Iterator[Service]:
    """A server with the usual limits."""
    with Service() as service:
        yield service
