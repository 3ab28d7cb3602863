"""Course machinery. The cells of "What works with what": features of an engine, on one of the course's models.

`matrix_run` runs a cell, `matrix_judges` has its expected answers. The page has each feature alone and with each other
one; `matrix_covering` has cells of more features.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from scripts.pages.matrix_prompts import Asked

KINDS = ("Qwen3", "hybrid", "windows", "latents", "all kinds")  # a model for each kind of layers
OTHERS = ("Llama", "Gemma 3", "Qwen3-MoE", "DeepSeek-V2")  # of the same kinds: their cells run at night only
MODELS = (*KINDS, *OTHERS)
EVERY = 32  # numbers of prompts repeat after this many; some of them have params


@dataclass(frozen=True, eq=False)
class Feature:
    """One thing that an engine can do, or a setting that changes how it does everything else.

    options: fields of EngineConfig. limits: fields of SchedulerConfig. params: fields of SamplingParams; "grammar"
        stands for a JSON schema. numbers: of each EVERY prompts, those that have them; the others go without.
        needs_folder: its tier keeps files. restarts: another engine answers the second round.
        is_padded: decode steps run as lesson 10 captures them, padded to one of a few sizes; no GPU is needed for that.
        hands_over: K and V of prompts must come from a worker, and no worker may be lost.
        is_crowd: many prompts that begin alike are asked instead of a few.
        has_turns: each prompt is the second turn of a session, and half of what the first ones left has been evicted.
    """

    name: str
    lesson: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    numbers: Container[int] = range(4)
    needs_folder: bool = False
    restarts: bool = False
    is_padded: bool = False
    hands_over: bool = False
    is_crowd: bool = False
    has_turns: bool = False

    @property
    def starts_processes(self) -> bool:
        """True if an engine with this feature is more than one process."""
        return bool({"tensor_parallel_size", "prefill_workers"} & self.options.keys())


FEATURES = (
    Feature(
        "small chunks",
        "l5_scheduler",
        limits={"max_num_seqs": 8, "chunked_prefill_size": 7, "max_num_batched_tokens": 16},
    ),
    Feature("a tiny pool", "l5_scheduler", {"num_blocks": 12, "block_size": 8, "max_track_slots": 2}),
    Feature("grammar", "l7_server", params={"grammar": True}, numbers=(1, 3)),
    Feature("logprobs", "l4_sampler", params={"logprobs": 2}),
    Feature("prompt logprobs", "l4_sampler", params={"prompt_logprobs": 1}, numbers=(2, 3)),
    Feature("no prefix caching", "l8_radix", {"enable_prefix_caching": False}),
    Feature("a crowd that shares", "l8_radix", params={"logprobs": 2}, numbers=range(1, EVERY, 2), is_crowd=True),
    Feature("reference layers", "l0_the_loop", {"backend": "reference"}),
    Feature("torch layers", "l9_speed", {"backend": "torch"}),
    Feature("padded steps", "l10_device", is_padded=True),
    Feature("int8", "l17_bits", {"kv_dtype": "int8"}),
    Feature("int4", "l17_bits", {"kv_dtype": "int4"}),
    Feature("host tier", "l12_tiers", {"kv_host_bytes": 2**24, "kv_always": True}),
    Feature("disk tier", "l12_tiers", {"kv_host_bytes": 2**18, "kv_always": True}, needs_folder=True),
    Feature("restart", "l12_tiers", {"kv_host_bytes": 2**18, "kv_always": True}, needs_folder=True, restarts=True),
    Feature("two ranks", "l18_ranks", {"tensor_parallel_size": 2}),
    Feature("speculation", "l14_speculation", {"speculate": 4}),
    Feature(
        "hand-over",
        "l19_handover",
        {"prefill_workers": 1, "handover_min_tokens": 0, "block_size": 8},  # each prompt fills a block of 8
        hands_over=True,
    ),
    Feature(
        "agents",
        "l20_agents",
        {"enable_sessions": True, "longest_prefix_first": True, "block_size": 8},  # a first turn fills a block of 8
        has_turns=True,
    ),
)
TIERS = ("host tier", "disk tier", "restart")
# pairs that exclude each other; tiers and sessions need prefix caching
EITHER = {
    ("reference layers", "torch layers"),
    ("int8", "int4"),
    *combinations(TIERS, 2),
    *(("no prefix caching", other) for other in (*TIERS, "agents")),
}


@dataclass(frozen=True)
class Cell:
    """Features together. They are in the order of FEATURES."""

    model: str
    features: tuple[Feature, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The features' names."""
        return tuple(feature.name for feature in self.features)

    @property
    def key(self) -> str:
        """The cell's key in the file of results."""
        return f"{self.model}: {' × '.join(self.names)}"

    @property
    def asked(self) -> Asked:
        """The prompts for its engine."""
        return Asked(self.model, self.has("is_crowd"))

    def has(self, what: str) -> bool:
        """Return True if one of the features has this attribute."""
        return any(getattr(feature, what) for feature in self.features)

    def merged(self, what: str) -> dict[str, Any]:
        """The features' options or limits together."""
        together: dict[str, Any] = {}
        for feature in self.features:
            together |= getattr(feature, what)
        return together

    def params_for(self, number: int) -> dict[str, Any]:
        """The params of the prompt with this number."""
        together: dict[str, Any] = {}
        for feature in self.features:
            together |= feature.params if number % EVERY in feature.numbers else {}
        return together


def are_allowed(features: Sequence[Feature]) -> bool:
    """Return True if no two of the features exclude each other."""
    return not any((a.name, b.name) in EITHER or (b.name, a.name) in EITHER for a, b in combinations(features, 2))


def cells() -> Iterator[Cell]:
    """Yield every feature alone and every pair that is allowed, for each model."""
    for model in MODELS:
        for features in (*combinations(FEATURES, 1), *combinations(FEATURES, 2)):
            if are_allowed(features):
                yield Cell(model, features)
