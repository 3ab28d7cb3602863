"""Lesson 7. A real server for the tests, on a free port of this machine, around a small random model."""

import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from mini_engine.server.hardening.guard import GuardedProtocol
from tests.l7.service import Service, Unwritten


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that fails because the server ran into an unwritten task says which."""
    with Unwritten() as unwritten:
        try:
            return (yield)
        except BaseException as error:
            if unwritten.met and not isinstance(error, NotImplementedError):
                raise unwritten.as_error() from error
            raise


@pytest.fixture
def service() -> Iterator[Service]:
    """A server with the usual limits."""
    with Service() as service:
        yield service


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    """The same, for all tests of a file."""
    with Service() as service:
        yield service


@pytest.fixture
def accepted(monkeypatch) -> list[GuardedProtocol]:
    """The connections that servers accept from now on."""
    found, made = [], GuardedProtocol.connection_made

    def noting(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so they fill early
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", noting)
    return found
