"""Lesson 7. The one call that puts the defence around the app: key, bodies, host names, log, request ids.

Each layer is a plain ASGI app around another one, so it also sees bodies that arrive in pieces.
"""

import re
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.base.values import shown
from mini_engine.server.errors import ApiError
from mini_engine.server.hardening.bodies import BodyLimit
from mini_engine.server.hardening.traffic import Traffic
from mini_engine.server.middleware import ApiKey, Middleware
from mini_engine.server.server_config import ServerConfig

CLOSED = (b"connection", b"close")
PORT = re.compile(r":[0-9]*$")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def harden(app: ASGIApp, config: ServerConfig) -> "Outermost":
    """Return `app` behind checks that refuse a request unparsed. It gets a request once that has arrived in full."""
    app = BodyLimit(app, config.max_body_bytes, config.body_seconds)
    app = ApiKey(app, config.api_keys)  # before the body is read
    if config.allow_hosts:
        app = HostCheck(app, config.allow_hosts)
    if config.allow_origins:
        app = CORSMiddleware(app, config.allow_origins, allow_methods=["*"], allow_headers=["*"])
    return Outermost(app)


class HostCheck(Middleware):
    """Refuses requests whose `Host` header names none of `hosts`.

    Web pages can reach a server that listens only on this machine: if a page's own name suddenly resolves to 127.0.0.1,
    the browser lets it read the responses (DNS rebinding). The header still has the page's name. (Starlette's
    TrustedHostMiddleware answers in plain text, and refuses HTTP/1.0 without a Host.)
    """

    paths = "/"

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        super().__init__(app)
        self.hosts = {f"[{host}]" if ":" in host else host.lower() for host in hosts}

    def check(self, scope: Scope) -> None:
        """Compare the name without its port."""
        given = Headers(scope=scope).get("host")
        if given is not None and PORT.sub("", given.strip().lower()) not in self.hosts:  # only HTTP/1.0 may omit it
            allowed = "use the server's address, or start it with --allow-host"
            raise ApiError(403, f"the Host {given[:100]!r} is not allowed; {allowed}", code="host_not_allowed")


class Outermost:
    """Completes every response's headers, and counts it.

    `x-request-id` is the client's, or a new one. `Connection: close` is added if the app has not read the request's
    body: otherwise HTTP obliges the server to read up to the next request, for as long as the client keeps sending.

    Attributes:
        traffic: counts responses, and logs refusals.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.traffic = app, Traffic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def receiving() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message["headers"] = [*given, CLOSED] if unread and CLOSED not in given else given
                self.traffic.answered(
                    message["status"], scope.get("client"), f"{scope['method']} {shown(scope['path'])}"
                )
            await send(message)

        await self.app(scope, receiving, sending)
