"""Lesson 13. `serve --replicas N`: lesson 7's server in front of N engines.

SIGTERM or Ctrl-C drains, then ends. SIGHUP replaces all replicas, one after another, and loses no request.
"""

import argparse
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import ModuleType

from mini_engine.base.errors import UserError
from mini_engine.cli.arguments import tokenizer_of
from mini_engine.distributed.replicas.cluster import Cluster
from mini_engine.distributed.replicas.service import ReplicaMetrics, ReplicaService
from mini_engine.server.app import ServerApp
from mini_engine.server.background import DrainingServer
from mini_engine.server.listening import url_of
from mini_engine.server.server_config import ServerConfig
from mini_engine.text.tokenizer import Tokenizer

NEEDED = (
    "several replicas need the extra 'distributed': pip install \"kv-course[distributed]\"; "
    'in a clone, pip install -e ".[distributed]" or make setup ARGS="--extras distributed"'
)

log = logging.getLogger(__name__)


def run(args: argparse.Namespace, config: ServerConfig, listener: socket.socket) -> int:
    """Serve until a signal arrives. Returns 0 once everything has drained or been cut off in time."""
    fleets = needs_ray()
    waiting = -(-config.max_waiting // args.replicas)
    fleet_config = fleets.FleetConfig(args.replicas, waiting, args.router, args.beta, config.grace_seconds)
    tokenizer = tokenizer_of(args.model)
    with fleets.ray_running(args.replicas), noting_sigterm() as asked_to_end:
        fleet = fleets.Fleet(args, fleet_config)
        app = fleet_app(fleet, tokenizer, config)
        app.prepare()
        with restarting(fleet):
            if asked_to_end():
                return 0
            name, count = config.model_name, args.replicas
            print(f"serving {name} from {count} replicas at {url_of(listener)}/v1 (Ctrl-C ends it)", flush=True)
            DrainingServer(app, config.grace_seconds).run([listener])
    return 0


def needs_ray() -> ModuleType:
    """Return the module `fleet`; UserError if Ray is not installed."""
    try:
        from mini_engine.distributed.replicas import fleet
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mini_engine"):
            raise
        raise UserError(f"{NEEDED} ({error.name} is missing)") from None
    return fleet


def fleet_app(fleet, tokenizer: Tokenizer, config: ServerConfig) -> ServerApp:
    """Return lesson 7's app over a fleet."""
    cluster = Cluster(tokenizer, fleet.limits(), fleet.config.max_waiting, fleet.ask)
    metrics = ReplicaMetrics(fleet.scrape)
    return ServerApp(ReplicaService(cluster, config, metrics, fleet.config.num_replicas, fleet.num_alive))


@contextmanager
def noting_sigterm() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM set a flag that the yielded function reads, until the server has its own handler.

    Ray's handler would end the program at any point, for example while another thread holds a lock.
    """
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def restarting(fleet) -> Iterator[None]:
    """Replace all replicas whenever SIGHUP arrives. Windows has no such signal."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    with ThreadPoolExecutor(1, "restart") as thread:
        before = signal.signal(signal.SIGHUP, lambda number, frame: thread.submit(restart, fleet))
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)


def restart(fleet) -> None:
    """Replace all replicas, and report it on stdout; a failure is logged."""
    try:
        fleet.deploy()
    except Exception:
        log.exception("the replicas could not be replaced; running ones continue")
    else:
        with suppress(OSError):  # the output's disk may be full
            print(f"replaced {fleet.config.num_replicas} replicas", flush=True)
