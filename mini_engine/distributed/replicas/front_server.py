"""Lesson 13. `serve --replicas N`: lesson 7's server in front of N engines.

SIGTERM or Ctrl-C drains, then ends. SIGHUP replaces all replicas, one after another, and loses no request.
"""

import argparse
import signal
import socket

from mini_engine.base.errors import UserError, needing
from mini_engine.base.signals import noting
from mini_engine.cli.arguments import tokenizer_of
from mini_engine.distributed.replicas.cluster import Cluster
from mini_engine.distributed.replicas.service import ReplicaMetrics, ReplicaService
from mini_engine.distributed.restart import replacing_on_hangup
from mini_engine.server.app import ServerApp
from mini_engine.server.background import DrainingServer
from mini_engine.server.listening import url_of
from mini_engine.server.server_config import ServerConfig

NEEDED = (
    "several replicas need the extra 'distributed': pip install \"kv-course[distributed]\"; "
    'in a clone, pip install -e ".[distributed]" or make setup ARGS="--extras distributed"'
)


def run(args: argparse.Namespace, config: ServerConfig, listener: socket.socket) -> int:
    """Serve until a signal arrives. Returns 0 once everything has drained or been cut off in time.

    Raises:
        UserError: a library is missing, or an option does not work with replicas.
    """
    if args.kv_events is not None:
        why = f"{args.replicas} replicas cannot publish at one endpoint; leave out --kv-events, or --replicas"
        raise UserError(f"kv_events is {args.kv_events!r}, and {why}", param="kv_events")
    fleets = needing("mini_engine.distributed.replicas.fleet", NEEDED)
    waiting = -(-config.max_waiting // args.replicas)
    fleet_config = fleets.FleetConfig(args.replicas, waiting, args.router, args.beta, config.grace_seconds)
    tokenizer = tokenizer_of(args.model)
    # until the server has its own handler: Ray's would end the program at any point, while a thread holds a lock, say
    with fleets.ray_running(args.replicas), noting(signal.SIGTERM) as asked_to_end:
        fleet = fleets.Fleet(args, fleet_config)
        cluster = Cluster(tokenizer, fleet.limits(), waiting, fleet.ask, fleet.close_session)
        metrics = ReplicaMetrics(fleet.scrape)
        app = ServerApp(ReplicaService(cluster, config, metrics.scrape, args.replicas, fleet.num_alive))
        app.prepare()
        with replacing_on_hangup(fleet.deploy, f"{args.replicas} replicas") as restart:
            if asked_to_end():
                return 0
            name, count = config.model_name, args.replicas
            print(f"serving {name} from {count} replicas at {url_of(listener)}/v1 (Ctrl-C ends it)", flush=True)
            DrainingServer(app, config.grace_seconds).run([listener])
        restart.running.acquire()  # one that is under way ends before Ray does
    return 0
