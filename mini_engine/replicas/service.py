"""Lesson 13. What lesson 7's routes do otherwise with replicas: grammars travel, and health and metrics are of all."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from mini_engine.engine.grammar import Grammar
from mini_engine.replicas.cluster import Cluster
from mini_engine.replicas.wire import FormGrammar
from mini_engine.server.app import Service
from mini_engine.server.config import ServerConfig
from mini_engine.server.output_forms import OutputForm


class ReplicaMetrics(Collector):
    """The metrics of all replicas, each sample with the label `replica`.

    Args:
        ask: returns each replica's name and metrics, as text.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[tuple[str, bytes]]]]) -> None:
        self.ask = ask
        self.families: dict[str, Metric] = {}

    async def scrape(self) -> bytes:
        """Ask all replicas. The exposition format, version 0.0.4."""
        self.families = {}
        for name, text in sorted(await self.ask()):
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
        """What a registry asks for."""
        return self.families.values()


class ReplicaService(Service):
    """The service of lesson 7 over a cluster.

    Args:
        num_alive: returns how many replicas take requests.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ServerConfig,
        metrics: ReplicaMetrics,
        num_replicas: int,
        num_alive: Callable[[], Awaitable[int]],
    ) -> None:
        super().__init__(cluster, config, metrics)
        self.num_replicas, self.num_alive = num_replicas, num_alive

    async def grammar_of(self, form: OutputForm) -> Grammar:
        """The form itself: the replica compiles it."""
        return FormGrammar(form)

    async def health(self) -> JSONResponse:
        """Report how many replicas are alive; 503 if none is."""
        alive = await self.num_alive()
        status = "ok" if alive else "no replica is alive; one is being started"
        return JSONResponse({"status": status, "replicas": self.num_replicas, "alive": alive}, 200 if alive else 503)
