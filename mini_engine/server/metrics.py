"""Lesson 7. Metrics for Prometheus, served at /metrics. Every metric belongs to one app."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mini_engine.engine.open_answer import Times
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.stats import StepStats
from mini_engine.engine.worker import EngineWorker, Observer
from mini_engine.kv.manager import KvCacheManager
from mini_engine.server.vllm_names import VllmNames

PREFIX = "mini_engine_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

POLICY = {  # what a policy may count (lesson 20)
    "sessions": (GaugeMetricFamily, "Sessions that are open."),
    "session_blocks": (GaugeMetricFamily, "Blocks of their own that sessions refer to."),
    "session_blocks_asked": (CounterMetricFamily, "Blocks of their own earlier texts that sessions' turns asked for."),
    "session_blocks_found": (CounterMetricFamily, "Of those, blocks that were still cached."),
    "session_blocks_evicted": (CounterMetricFamily, "Blocks evicted while a session referred to them."),
    "session_texts_left": (CounterMetricFamily, "Texts that a session's next turn did not continue."),
}


class Metrics(Observer):
    """Counts the engine thread's reports, and reads gauges from the engine when they are scraped.

    Args:
        vllm_model_name: the model's name, to add the metrics under vLLM's names; None adds none.
    """

    def __init__(self, vllm_model_name: str | None = None) -> None:
        self.registry = CollectorRegistry()
        self.shown = [self.registry]
        if vllm_model_name is not None:
            self.shown.append(CollectorRegistry())
            self.shown[-1].register(VllmNames(self.registry, vllm_model_name))
        tokens = self._make(Counter, "tokens", "Tokens computed by the model.", ["phase"])
        self.prefill_tokens, self.decode_tokens = tokens.labels("prefill"), tokens.labels("decode")
        self.steps = self._make(Counter, "steps", "Steps of the engine.")
        self.drafted = self._make(Counter, "draft_tokens", "Tokens guessed and verified (speculation).")
        self.accepted = self._make(Counter, "accepted_draft_tokens", "Of those, tokens that saved a step.")
        self.preemptions = self._make(Counter, "preemptions", "Times a request lost its blocks.")
        self.aborts = self._make(Counter, "aborts", "Requests whose client went away.")
        self.ends = self._make(Counter, "requests", "Requests that have ended, by reason.", ["finish_reason"])
        self.prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens of ended requests.")
        self.cached = self._make(Counter, "cached_prompt_tokens", "Of those, tokens found in the prefix cache.")
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.hit_rate = self._make(Gauge, "prefix_hit_rate", "Cached prompt tokens / prompt tokens, so far.")
        self.new_tokens = self._make(Counter, "new_tokens", "New tokens of ended requests.")
        self.first = self._times("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between = self._times("time_between_tokens_seconds", "From one token of a request to its next.")
        self.queued = self._times("request_queue_seconds", "From a request's arrival to the first step for it.")
        self.prefill = self._times("request_prefill_seconds", "From that step to a request's first token.")
        self.decode = self._times("request_decode_seconds", "From a request's first token to its end.")
        self.whole = self._times("request_seconds", "From a request's arrival to its end.")
        self.prompt_sizes = self._sizes("request_prompt_tokens", "Prompt tokens of a request that has ended.")
        self.answer_sizes = self._sizes("request_new_tokens", "New tokens of a request that has ended.")

    def _make(self, kind, name: str, text: str, labels=(), **options):
        return kind(PREFIX + name, text, labels, registry=self.registry, **options)

    def _times(self, name: str, text: str) -> Histogram:
        return self._make(Histogram, name, text, buckets=SECONDS)

    def _sizes(self, name: str, text: str) -> Histogram:
        return self._make(Histogram, name, text, buckets=SIZES)

    def watch(self, worker: EngineWorker) -> None:
        """Read the gauges from this worker, so they are right even if no step has run since."""
        manager = worker.engine.scheduler.manager
        waiting = self._make(Gauge, "requests_waiting", "Requests that wait for blocks or for a slot in the batch.")
        running = self._make(Gauge, "requests_running", "Requests that hold blocks.")
        waiting.set_function(lambda: worker.num_waiting)
        running.set_function(lambda: worker.num_running)
        blocks = self._make(Gauge, "blocks", "Blocks of the KV pool, by state.", ["state"])
        for state in manager.blocks_by_state._fields:
            blocks.labels(state).set_function(lambda state=state: getattr(manager.blocks_by_state, state))
        self.registry.register(TierMetrics(manager))
        self.registry.register(PolicyMetrics(manager))

    def stepped(self, stats: StepStats) -> None:
        """Count a step."""
        self.steps.inc()
        self.prefill_tokens.inc(stats.prefill_tokens)
        self.decode_tokens.inc(stats.decode_tokens)
        self.preemptions.inc(stats.num_preempted)
        self.drafted.inc(stats.num_drafted)
        self.accepted.inc(stats.num_accepted)

    def token(self, seconds: float, first: bool) -> None:
        """Record a wait for the first token, or between two tokens: different waits, so two histograms."""
        (self.first if first else self.between).observe(seconds)

    def timed(self, times: Times) -> None:
        """Record how an answer spent its time."""
        self.queued.observe(times.queued)
        self.prefill.observe(times.prefill)
        self.decode.observe(times.decode)
        self.whole.observe(times.whole)

    def ended(self, request: Request) -> None:
        """Count a finished request."""
        self.ends.labels(request.finish_reason).inc()
        self.prompt_tokens.inc(len(request.prompt_ids))
        self.cached.inc(request.num_cached_tokens)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_cached_tokens += request.num_cached_tokens
        self.hit_rate.set(self.num_cached_tokens / self.num_prompt_tokens)
        self.new_tokens.inc(len(request.output_ids))
        self.prompt_sizes.observe(len(request.prompt_ids))
        self.answer_sizes.observe(len(request.output_ids))
        if request.finish_reason == FinishReason.ABORT:
            self.aborts.inc()

    def text(self) -> bytes:
        """Return the exposition format, version 0.0.4."""
        return b"".join(map(generate_latest, self.shown))

    async def scrape(self) -> bytes:
        """Return the same, for the route."""
        return self.text()


class TierMetrics(Collector):
    """Reads the statistics of the connectors behind the pool when they are scraped.

    These are lesson 12's tiers and, as the tier "prefill", lesson 19's workers; without them there are no samples.
    """

    def __init__(self, manager: KvCacheManager) -> None:
        self.manager = manager

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this."""
        size = "Bytes of KV that a tier holds, or that prefill workers are sending."
        what = "Events in a tier, or in transfers from prefill workers."
        sizes = GaugeMetricFamily(PREFIX + "tier_bytes", size, labels=["tier"])
        events = CounterMetricFamily(PREFIX + "tier_events", what, labels=["tier", "event"])
        states = []
        for tier in self.manager.coordinator.stats:
            sizes.add_metric([tier.name], tier.num_bytes)
            for name, count in tier.events.items():
                events.add_metric([tier.name, name.replace(" ", "_")], count)
            for name, number in tier.state.items():
                text = f"The tier {tier.name}'s {name.replace('_', ' ')} now."
                states.append(GaugeMetricFamily(f"{PREFIX}{tier.name}_{name}", text, value=number))
        return [family for family in (sizes, events, *states) if family.samples]


class PolicyMetrics(Collector):
    """Reads what the prefix cache's policy counts when it is scraped; most count nothing."""

    def __init__(self, manager: KvCacheManager) -> None:
        self.manager = manager

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this."""
        counts = self.manager.coordinator.counts
        for name, (family, text) in POLICY.items():
            if name in counts:
                yield family(PREFIX + name, text, value=counts[name])
