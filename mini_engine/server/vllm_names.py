"""Lesson 7. The same metrics under vLLM's names, for dashboards made for vLLM (`--vllm-metrics`).

Only metrics with the same meaning. vLLM counts prompt and new tokens as they are computed, this engine when their
request has ended: the totals agree once all requests have.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from mini_engine.engine.request import FinishReason

OURS, THEIRS = "mini_engine_", "vllm:"
NAMES = (
    ("requests_running", "num_requests_running"),
    ("requests_waiting", "num_requests_waiting"),
    ("preemptions", "num_preemptions"),
    ("prompt_tokens", "prompt_tokens"),
    ("new_tokens", "generation_tokens"),
    ("requests", "request_success"),
    ("draft_tokens", "spec_decode_num_draft_tokens"),
    ("accepted_draft_tokens", "spec_decode_num_accepted_tokens"),
    ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    ("time_between_tokens_seconds", "inter_token_latency_seconds"),
    ("request_queue_seconds", "request_queue_time_seconds"),
    ("request_prefill_seconds", "request_prefill_time_seconds"),
    ("request_decode_seconds", "request_decode_time_seconds"),
    ("request_seconds", "e2e_request_latency_seconds"),
    ("request_prompt_tokens", "request_prompt_tokens"),
    ("request_new_tokens", "request_generation_tokens"),
    ("prompt_tokens", "prefix_cache_queries"),
    ("cached_prompt_tokens", "prefix_cache_hits"),
)
LABELS = {"finish_reason": "finished_reason"}
REASONS = {("finished_reason", FinishReason.GRAMMAR.value): FinishReason.ERROR.value}  # vLLM has no such reason


class VllmNames(Collector):
    """A registry's metrics once more, with vLLM's names and labels.

    Args:
        model_name: the label that vLLM's dashboards filter by.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this."""
        for family in self.registry.collect():
            name = family.name.removeprefix(OURS)
            yield from (self.renamed(family, THEIRS + theirs) for ours, theirs in NAMES if ours == name)
            if name == "blocks":
                yield self.usage(family)

    def renamed(self, family: Metric, name: str) -> Metric:
        """Return a copy of a family under another name. Samples whose labels become the same are added up."""
        totals: defaultdict[Any, float] = defaultdict(float)
        for sample in family.samples:
            if not sample.name.endswith("_created"):  # a time, which cannot be added up
                labels = tuple(self.relabelled(sample).items())
                totals[name + sample.name.removeprefix(family.name), labels] += sample.value
        found = Metric(name, family.documentation, family.type)
        for (sample_name, labels), value in totals.items():
            found.add_sample(sample_name, dict(labels), value)
        return found

    def relabelled(self, sample: Sample) -> dict[str, str]:
        """Return a sample's labels with vLLM's names."""
        found = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        return self.labels | {label: REASONS.get((label, value), value) for label, value in found.items()}

    def usage(self, blocks: Metric) -> Metric:
        """Return the share of the pool that requests hold; blocks that are only cached can be evicted at any time."""
        numbers = {sample.labels["state"]: sample.value for sample in blocks.samples}
        name = THEIRS + "kv_cache_usage_perc"
        found = GaugeMetricFamily(name, "Held blocks / blocks of the pool, from 0 to 1.", labels=[*self.labels])
        found.add_metric([*self.labels.values()], numbers["held"] / sum(numbers.values()))
        return found
