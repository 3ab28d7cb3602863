"""Lesson 7. The command `serve`: OpenAI's routes on this machine. SIGTERM or Ctrl-C drains, then ends."""

import argparse
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mini_engine.cli.arguments import add_engine_options, add_scheduler_options, load_llm, scheduler_config
from mini_engine.cli.parser import at_least, whole_number
from mini_engine.errors import EngineDead, UserError

if TYPE_CHECKING:
    from mini_engine.server.config import ServerConfig

NEEDED = "serve needs the extra 'server': pip install -e '.[server]', or make setup ARGS=\"--extras server\""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    add_engine_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=whole_number(0), default=8000, metavar="N", help="default: 8000; 0: a free one")
    parser.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: its folder's name)")
    parser.add_argument(
        "--api-key", default=os.environ.get("MINI_ENGINE_API_KEY"), metavar="KEY", help="default: $MINI_ENGINE_API_KEY"
    )
    parser.add_argument(
        "--max-waiting", type=whole_number(1), default=256, metavar="N", help="more get 429 (default: 256)"
    )
    parser.add_argument("--max-body-bytes", type=whole_number(1), default=2**20, metavar="N", help="default: 1048576")
    parser.add_argument(
        "--header-seconds",
        type=whole_number(1),
        default=10,
        metavar="N",
        help="for a request's headers to arrive (default: 10)",
    )
    parser.add_argument(
        "--body-seconds", type=whole_number(1), default=60, metavar="N", help="for a body to arrive (default: 60)"
    )
    parser.add_argument(
        "--max-connections", type=whole_number(1), default=1024, metavar="N", help="more get 503 (default: 1024)"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages from here use the server (CORS); repeatable, * is any",
    )
    add_scheduler_options(parser)
    parser.add_argument(
        "--grace-seconds", type=whole_number(1), default=30, metavar="N", help="from SIGTERM to the end (default: 30)"
    )
    add_replica_options(parser)


def add_replica_options(parser: argparse.ArgumentParser) -> None:
    """The options for several engines behind one server (lesson 13)."""
    parser.add_argument(
        "--replicas",
        type=whole_number(1, 64),
        default=1,
        metavar="N",
        help="engines, each in a process of its own; SIGHUP replaces them one by one (default: 1, in this process)",
    )
    parser.add_argument(
        "--router",
        choices=["score", "round-robin", "default"],
        default="score",
        help="which replica answers: by known prefix and load, in turns, or as Ray Serve does (default: score)",
    )
    parser.add_argument(
        "--beta", type=at_least(0), default=0.3, metavar="X", help="what load costs in the score (default: 0.3)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns 0 once everything has drained or been cut off in time.

    Raises:
        UserError: an option is invalid. EngineDead: the engine could not go on.
    """
    try:
        from mini_engine.server.app import create_app
        from mini_engine.server.background import DrainingServer, listen, url_of
        from mini_engine.server.metrics import Metrics
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mini_engine"):
            raise
        raise UserError(f"{NEEDED} ({error.name} is missing)") from None
    from mini_engine.engine.worker import EngineWorker

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = server_config(args)
    if args.replicas > 1:
        if args.tensor_parallel_size > 1:
            asked = f"--replicas {args.replicas} with --tp {args.tensor_parallel_size}"
            raise UserError(f"{asked}: a replica is one process here; leave one of the two out")
        from mini_engine.replicas import serve as replicas

        return replicas.run(args, config)
    with listen(args.host, args.port) as listener:
        llm, metrics = load_llm(args, scheduler_config=scheduler_config(args)), Metrics()
        with llm, EngineWorker(llm.engine, llm.tokenizer, config.max_waiting, metrics) as worker:
            metrics.watch(worker)
            app = create_app(worker, config, metrics)
            gc.collect()
            gc.freeze()  # later collections search what requests leave, not all of torch: 0.1 s without a token
            print(f"serving {config.model_name} at {url_of(listener)}/v1 (Ctrl-C ends it)", flush=True)
            DrainingServer(app, config.grace_seconds).run([listener])
            if worker.fault:
                raise EngineDead(worker.fault)
    return 0


def server_config(args: argparse.Namespace) -> "ServerConfig":
    """Return the server's limits and names, from the options."""
    from mini_engine.server.config import ServerConfig

    name = args.model_name or (Path(args.model).name if args.model else "pocket")
    return ServerConfig(
        name,
        args.api_key,
        args.max_body_bytes,
        args.header_seconds,
        args.body_seconds,
        args.max_connections,
        tuple(args.allow_origin),
        max_waiting=args.max_waiting,
        grace_seconds=args.grace_seconds,
    )
