"""Lesson 13. Starts Ray on this machine, keeps replicas running in it, and sends them jobs.

One machine only: nothing listens beyond 127.0.0.1, and all files are in a temporary folder. Ray's own HTTP proxy is not
started: lesson 7's server is in front, with its limits on bodies, headers and connections, and its drain.
"""

# pyright: reportMissingImports=false

import argparse
import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine: listen on 127.0.0.1 only, not on all interfaces
    "RAY_AUTH_MODE": "token",  # and other users of this machine cannot connect
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # replicas see the GPUs that this process sees
}
os.environ |= SETTINGS  # Ray reads these on import, and so do its processes

import ray
from ray import serve
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError
from ray.serve.config import ProxyLocation, RequestRouterConfig

from mini_engine.base.errors import UserError
from mini_engine.distributed.replicas.cluster import Item
from mini_engine.distributed.replicas.replica import Replica
from mini_engine.distributed.routing.retry import ReplicaLost
from mini_engine.engine.jobs import Job
from mini_engine.engine.worker import ModelLimits

HOST = "127.0.0.1"
SOON = 0.1  # seconds between two checks of whether a replica that is to end still has requests
STATS_SECONDS = 0.5  # between two reports of a replica to the router
SCRAPE_SECONDS = 5.0
START_SECONDS = 60.0  # for a running replica to report its limits
STORE_BYTES = 2**27  # Ray's shared memory, by default a third of the machine's; messages here are small


class FleetConfig(NamedTuple):
    """The operator's options. router: "score", "round-robin", or "default", which is Ray Serve's own."""

    num_replicas: int
    max_waiting: int
    router: str = "score"
    beta: float = 0.3
    grace_seconds: float = 30.0

    @property
    def name(self) -> str:
        """The fleet's name in Ray Serve. It includes the router: under the same name, Ray would keep the old router."""
        return f"mini-engine-{self.router}-{self.beta:g}"

    def routing(self) -> RequestRouterConfig:
        """Return Ray Serve's settings for the router."""
        if self.router == "default":
            return RequestRouterConfig()
        settings: dict[str, Any] = {
            "request_router_class": "mini_engine.distributed.replicas.router:PolicyRouter",
            "request_router_kwargs": {"policy": self.router, "beta": self.beta},
            "request_routing_stats_period_s": STATS_SECONDS,
        }
        return RequestRouterConfig(**settings)


class Fleet:
    """All replicas.

    Args:
        args: the options of `serve`, for each replica's engine.
    """

    def __init__(self, args: argparse.Namespace, config: FleetConfig) -> None:
        self.args, self.config = args, config
        self.handle: Any = None
        self.deploy()

    def deploy(self) -> None:
        """Start all replicas; if they run already, replace them one by one, each after it has drained."""
        replica = serve.deployment(
            name="engine",
            num_replicas=self.config.num_replicas,
            max_ongoing_requests=2**20,  # the engine's own queue is the limit
            max_surge_percent=-(-100 // self.config.num_replicas),
            graceful_shutdown_timeout_s=self.config.grace_seconds,
            graceful_shutdown_wait_loop_s=SOON,
            health_check_period_s=1,
            request_router_config=self.config.routing(),
            ray_actor_options={"num_cpus": 0},  # Ray need not count CPUs: threads are divided among replicas
        )(Replica)
        app = replica.bind(self.args, self.config.max_waiting)
        handle = serve.run(app, name=self.config.name, route_prefix=None).options(stream=True)
        self.handle = self.handle or handle  # keep the first one's router

    def close(self) -> None:
        """End all replicas."""
        serve.delete(self.config.name)

    def limits(self) -> ModelLimits:
        """Return each replica's limits. UserError if no replica can build its engine."""
        limits = self.handle.options(stream=False).broadcast("limits").results(timeout_s=START_SECONDS)[0]
        if isinstance(limits, UserError):
            raise limits
        return limits

    async def ask(self, jobs: Sequence[Job], keys: Sequence[bytes]) -> AsyncGenerator[Item, None]:
        """Send jobs to a replica; yield its items. ReplicaLost if it ends; closing the generator aborts the jobs."""
        response = self.handle.answer.remote(jobs, keys)
        try:
            async for item in response:
                yield item
        except RayActorError:
            raise ReplicaLost("the replica that was answering has ended") from None
        finally:
            response.cancel()

    async def close_session(self, session: Hashable, namespace: Hashable) -> bool:
        """Forget a session at every replica. True if one of them had it; one that has ended had none.

        If a replica does not respond in time, that is no error: its sessions expire by themselves.
        """
        asked = self.handle.options(stream=False).broadcast("close_session", session, namespace)
        with suppress(TimeoutError):
            return True in await asked.results_async(timeout_s=SCRAPE_SECONDS, return_exceptions=True)
        return False

    async def scrape(self) -> list[tuple[str, bytes]]:
        """Return each replica's name and metrics; replicas that do not respond are left out."""
        asked = self.handle.options(stream=False).broadcast("scrape")
        found = await asked.results_async(timeout_s=SCRAPE_SECONDS, return_exceptions=True)
        return [one for one in found if not isinstance(one, BaseException)]

    async def num_alive(self) -> int:
        """Return the number of replicas that take requests."""
        status = await asyncio.to_thread(serve.status)
        deployments = status.applications[self.config.name].deployments.values()
        return sum(count for one in deployments for state, count in one.replica_states.items() if state == "RUNNING")


@contextmanager
def ray_running(num_replicas: int) -> Iterator[None]:
    """Run Ray's processes on this machine within the `with` block, with its files in a temporary folder.

    Each replica gets its share of the CPU's cores as threads, unless OMP_NUM_THREADS says otherwise.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_replicas)))  # for the replicas
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with short_folder() as folder:
        try:
            ray.init(
                num_cpus=num_replicas + 1,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _node_ip_address=HOST,
                _temp_dir=folder,
            )
            ray_worker._worker_logs_enabled = False  # Ray reports its own normal end as failed tasks
            serve.start(proxy_location=ProxyLocation.Disabled, logging_config={"log_level": "ERROR"})
            yield
        finally:
            if ray.is_initialized():  # otherwise `shutdown` would start Ray again
                serve.shutdown()
            ray.shutdown()


def num_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def short_folder() -> Iterator[str]:
    """Create a folder and delete it at the end. Its name is short: the paths of Ray's sockets in it have a limit."""
    folder = tempfile.mkdtemp(prefix="mini-ray-", dir="/tmp" if Path("/tmp").is_dir() else None)
    try:
        yield folder
    finally:
        for _ in range(50):  # Ray's last processes still write files as they end
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
            time.sleep(0.1)
