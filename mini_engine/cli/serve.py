"""Lesson 7. The command `serve`: OpenAI's routes on this machine. SIGTERM, SIGHUP or Ctrl-C drains, then ends.

With replicas (lesson 13) or prefill workers (lesson 19), SIGHUP replaces them one by one instead.
"""

import argparse
import gc
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mini_engine.base.errors import EngineDead, needing
from mini_engine.cli.arguments import (
    STEP_OPTIONS,
    add_engine_options,
    add_fields,
    add_template_option,
    load_llm,
    model_names,
    scheduler_config,
)
from mini_engine.cli.parser import at_least, whole_number
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.server.server_config import ServerConfig
from mini_engine.text.prompts import checked_variables

if TYPE_CHECKING:
    from mini_engine.engine.engine import Engine
    from mini_engine.server.background import DrainingServer

LOCAL = ("localhost", "127.0.0.1", "::1")
log = logging.getLogger(__name__)

LIMITS = {  # how much clients can queue, send and hold open
    "max_waiting": "answers; more get 429",
    "max_body_bytes": "of one request",
    "header_seconds": "time for a request's headers to arrive",
    "body_seconds": "time for a body to arrive",
    "write_seconds": "close a connection whose client reads less than 16 KiB in this time",
    "heartbeat_seconds": "send a comment in a stream whenever it has been silent for this long",
    "max_connections": "open at once",
    "grace_seconds": "to drain after SIGTERM",
    "step_seconds": "/health returns 503 once a step takes longer",
}

NEEDED = (
    "serve needs the extra 'server': pip install 'kv-course[server]'; "
    "in a clone, pip install -e '.[server]' or make setup ARGS=\"--extras server\""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    add_engine_options(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    add("--port", type=whole_number(0, 65535), default=8000, metavar="N", help="default: 8000; 0: a free one")
    add("--model-name", metavar="NAME", help="the model's name in the API (default: its folder's name, or the hub id)")
    add("--vllm-metrics", action="store_true", help="add vLLM's metric names to /metrics, for dashboards made for it")
    what = "repeatable; clients with different keys share no prefixes (default: $MINI_ENGINE_API_KEY, as KEY,KEY,…)"
    add("--api-key", action="append", metavar="KEY", help=what)
    for name, text in LIMITS.items():
        default, flag = getattr(ServerConfig, name), f"--{name.replace('_', '-')}"
        text = f"{text} (default: {'never' if default is None else default})"
        add(flag, type=whole_number(1), default=default, metavar="N", help=text)
    what = "let web pages from this origin use the server (CORS); repeatable, * is any"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=what)
    what = "a name to allow in the Host header, for example behind a proxy; repeatable"
    add("--allow-host", action="append", default=[], metavar="NAME", help=what)
    add_template_option(parser)
    add_fields(parser, SchedulerConfig, STEP_OPTIONS)
    add_replica_options(parser)


def add_replica_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for several engines behind one server (lesson 13)."""
    add = parser.add_argument
    what = "engines, each in its own process; SIGHUP replaces them one by one (default: 1, in this process)"
    add("--replicas", type=whole_number(1, 64), default=1, metavar="N", help=what)
    what = "how a replica is chosen: by known prefix and load, in turn, or as Ray Serve does (default: score)"
    add("--router", choices=["score", "round-robin", "default"], default="score", help=what)
    add("--beta", type=at_least(0), default=0.3, metavar="X", help="weight of load in the score (default: 0.3)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns 0 once everything has drained or been cut off in time.

    Raises:
        UserError: an option is invalid. EngineDead: the engine cannot run any more steps.
    """
    from mini_engine.server.listening import listen

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = server_config(args)
    with listen(args.host, args.port) as listener:  # a bad address is reported before torch is imported
        if not is_loopback(args.host) and not config.api_keys:
            log.warning("%s can be reached from other machines, so anyone may use the model; set --api-key", args.host)
        needing("mini_engine.server.app", NEEDED)
        if args.replicas > 1:
            from mini_engine.distributed.replicas import front_server

            return front_server.run(args, config, listener)
        return serve_one(args, config, listener)


def serve_one(args: argparse.Namespace, config: ServerConfig, listener: socket.socket) -> int:
    """Serve from one engine in this process."""
    from mini_engine.engine.worker import EngineWorker
    from mini_engine.server.app import create_app
    from mini_engine.server.background import DrainingServer
    from mini_engine.server.hardening.ending import end_in_time
    from mini_engine.server.listening import url_of
    from mini_engine.server.metrics import Metrics

    metrics = Metrics(config.model_name if args.vllm_metrics else None)
    llm = load_llm(args, scheduler_config=scheduler_config(args))
    with llm, EngineWorker(llm.engine, llm.tokenizer, config.max_waiting, metrics, config.step_seconds) as worker:
        metrics.watch(worker)
        app = create_app(worker, config, metrics)
        app.prepare()
        gc.collect()
        gc.freeze()  # later collections skip torch's objects; searching them would stall all answers for 0.1 s
        count = args.prefill_workers
        workers = f" with {count} prefill worker{'s' * (count > 1)}" if count else ""
        print(f"serving {config.model_name}{workers} at {url_of(listener)}/v1 (Ctrl-C ends it)", flush=True)
        server = DrainingServer(app, config.grace_seconds)
        with handling_hangup(server, llm.engine, args.prefill_workers):
            server.run([listener])
        end_in_time(worker, server.seconds_left)
        if worker.fault:
            raise EngineDead(worker.fault)
    return 0


def handling_hangup(server: "DrainingServer", engine: "Engine", num_workers: int) -> AbstractContextManager[object]:
    """Return a context in which SIGHUP replaces the prefill workers, or drains if there are none."""
    if num_workers:
        from mini_engine.distributed.restart import replacing_on_hangup
        from mini_engine.handover.opening import workers_of

        return replacing_on_hangup(workers_of(engine).replace_all, "all prefill workers")
    from mini_engine.server.background import draining_on_hangup

    return draining_on_hangup(server)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str, others: Sequence[str]) -> tuple[str, ...]:
    """Return the names allowed in the Host header: any name if other machines can reach the server."""
    return (*LOCAL, host, *others) if is_loopback(host) else tuple(others)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the server's limits and names from the options."""
    name, *aliases = model_names(args.model, args.model_name)
    return ServerConfig(
        model_name=name,
        aliases=tuple(aliases),
        api_keys=api_keys(args),
        allow_origins=tuple(args.allow_origin),
        allow_hosts=allowed_hosts(args.host, args.allow_host),
        chat_template_kwargs=checked_variables(args.chat_template_kwargs),
        **{name: getattr(args, name) for name in LIMITS},
    )


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys from the options, otherwise from the environment. An empty key is kept; it is refused later."""
    if args.api_key:
        return tuple(args.api_key)
    return tuple(os.environ["MINI_ENGINE_API_KEY"].split(",")) if "MINI_ENGINE_API_KEY" in os.environ else ()
