"""Lesson 7. A real server for the tests, on a free port of this machine, around a small random model."""

import argparse
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from mini_engine.cli import serve
from mini_engine.cli.parser import OneLineParser
from mini_engine.server.hardening.guard import GuardedProtocol
from tests.shared.service import Service, Unwritten


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
def server(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Service]:
    """A server for all tests of a file, with the file's SERVER: its options, or what makes them of a folder."""
    options = getattr(request.module, "SERVER", {})
    with Service(**options(tmp_path_factory.mktemp("server")) if callable(options) else options) as service:
        yield service


@pytest.fixture(scope="module")
def openai():
    """OpenAI's library; imported here, since that takes half a second."""
    return pytest.importorskip("openai", reason="needs the openai client")


@pytest.fixture(scope="module")
def client(server, openai):
    """OpenAI's client of the file's server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def added(server, monkeypatch) -> list[tuple[Any, ...]]:
    """What the engine of the file's server is given from now on: id, prompt, parameters, priority, and so on."""
    found, add = [], server.engine.add_request
    monkeypatch.setattr(server.engine, "add_request", lambda *given: found.append(given) or add(*given))
    return found


@pytest.fixture
def options() -> Callable[..., argparse.Namespace]:
    """The command's options as they are parsed."""
    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    return lambda *arguments: parser.parse_args(arguments)


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
