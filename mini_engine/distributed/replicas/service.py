"""Lesson 13. Lesson 7's routes over replicas: sends grammars along, and merges health and metrics of all replicas."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from mini_engine.distributed.replicas.cluster import Cluster, ReplicaStopped
from mini_engine.distributed.replicas.wire import FormGrammar
from mini_engine.engine.grammar import Grammar
from mini_engine.engine.jobs import Answers
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.server.errors import RETRY, ApiError
from mini_engine.server.protocol import Sampling
from mini_engine.server.server_config import ServerConfig
from mini_engine.server.service import Service

ANSWER_SECONDS = 0.5  # the longest that a probe waits for a new answer
STALE_SECONDS = 30.0

log = logging.getLogger(__name__)


class ReplicaMetrics(Collector):
    """The metrics of all replicas, each sample with the label `replica`.

    Args:
        ask: returns each replica's name and metrics, as text.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[tuple[str, bytes]]]]) -> None:
        self.ask = ask
        self.families: dict[str, Metric] = {}

    async def scrape(self) -> bytes:
        """Ask all replicas and return the exposition format, version 0.0.4."""
        answers = sorted(await self.ask())
        self.families = {}  # no await from here on, so that another scrape cannot interfere
        for name, text in answers:
            self.add(name, text.decode())
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def add(self, replica: str, text: str) -> None:
        """Add one replica's metrics."""
        for family in text_string_to_metric_families(text):
            whole = self.families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels={"replica": replica} | sample.labels) for sample in family.samples]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this."""
        return self.families.values()


class LastKnown:
    """The latest result of a slow query, which runs in the background, one at a time.

    Args:
        ask: runs the query; an exception counts as no result.
    """

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        self.ask = ask
        self.asking: asyncio.Task[None] | None = None
        self.answer, self.since = 0, float("-inf")

    async def __call__(self) -> int | None:
        """Start the query and wait for it briefly. Return the new or the previous result; None if that is too old."""
        if self.asking is None or self.asking.done():
            self.asking = asyncio.create_task(self._ask())
        await asyncio.wait([self.asking], timeout=ANSWER_SECONDS)
        return self.answer if time.monotonic() - self.since < STALE_SECONDS else None

    async def _ask(self) -> None:
        try:
            self.answer = await self.ask()
        except Exception:
            log.exception("the state of the replicas is unknown")
        else:
            self.since = time.monotonic()


class ReplicaService(Service):
    """The service of lesson 7 over a cluster.

    Args:
        num_alive: returns the number of replicas that take requests.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ServerConfig,
        scrape: Callable[[], Awaitable[bytes]],
        num_replicas: int,
        num_alive: Callable[[], Awaitable[int]],
    ) -> None:
        super().__init__(cluster, config, scrape)
        self.num_replicas, self.num_alive = num_replicas, LastKnown(num_alive)

    async def submit(self, wanted: Sampling) -> Answers:
        """Submit to a replica. If none can take the jobs, the error says to retry: the server itself keeps running."""
        try:
            return await super().submit(wanted)
        except ReplicaStopped as error:
            raise ApiError(503, str(error), code="replica_stopped", headers=RETRY) from None

    async def grammar_of(self, form: OutputForm) -> Grammar:
        """Return the form itself; the replica compiles it."""
        return FormGrammar(await asyncio.to_thread(self.grammars.bounded, form))

    async def health(self) -> JSONResponse:
        """Report the last known number of live replicas; 503 if it is 0 or out of date."""
        alive = await self.num_alive()
        if alive is None:
            status = f"the replicas' state has been unknown for {STALE_SECONDS:g} seconds or more"
        else:
            status = "ok" if alive else "no replica is alive; one is being started"
        return JSONResponse({"status": status, "replicas": self.num_replicas, "alive": alive}, 200 if alive else 503)
