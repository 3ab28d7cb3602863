"""Lesson 7. The listening socket. Imports nothing heavy, so a port in use is reported at once."""

import socket

from mini_engine.base.errors import UserError

QUEUE = 1024  # connections that the system queues until they are accepted; beyond that, clients retry after 1 s


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. It and the sockets it accepts have Nagle's algorithm off. Port 0 picks a free one.

    Raises:
        UserError: the address cannot be used.
    """
    if not host:
        raise UserError("the host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all of this machine's")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=QUEUE)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: no host can have this name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only on sockets that it creates
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
