"""Course machinery. Every option of an engine, checked once. `LLM`, the commands and lesson 18's ranks create it."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from mini_engine.base.errors import UserError
from mini_engine.base.values import check_choice, check_switch, checked_whole, shown
from mini_engine.engine.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from mini_engine.speculation.options import Speculation

CHOICES = {
    "backend": ("auto", "packed", "torch", "fused", "reference"),
    "kv_dtype": ("auto", "int8", "int4"),
    "eviction_policy": ("lru", "lfu", "fifo", "slru", "tlru"),
    "kv_events_format": ("map", "array"),
}
LEAST = {
    "kv_bytes": 1,
    "num_blocks": 2,  # block 0 is the null block
    "block_size": 1,
    "kv_host_bytes": 0,
    "kv_disk_bytes": 0,
    "tensor_parallel_size": 1,
    "prefill_workers": 0,
    "handover_bytes": 1,
    "handover_min_tokens": 0,
    "max_track_slots": 0,
    "checkpoint_interval": 1,
    "tlru_threshold": 0,
    "tlru_next_prompt_estimate": 0,
}
NEEDS = {
    "kv_disk_bytes": "kv_cache_dir",
    "kv_cache_key_file": "kv_cache_dir",
    "handover_bytes": "prefill_workers",
    "handover_min_tokens": "prefill_workers",
    "tlru_next_prompt_estimate": "tlru_threshold",
    "kv_events_replay": "kv_events",
}
SWITCHES = ("enable_prefix_caching", "enable_sessions", "longest_prefix_first", "kv_always")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options from which an engine for a model is built. None: chosen to fit.

    backend: the code that runs the layers: on a CPU "packed" or "torch" (lesson 9), on a GPU "fused" (lesson 10),
        anywhere "reference" (lesson 0's own layers). "auto" is the first of these that works.
    cuda_graphs: replay captured decode steps (lesson 10). None: where device, kernel and pool allow it and the capture
        succeeds. True: the same, but refuse a device or a pool that cannot be captured. False: never.
    kv_bytes: memory of the pool; by default 80% of a GPU's free memory, 1 GiB on a CPU.
    num_blocks: size of the pool in blocks, the null block included; takes precedence over kv_bytes.
    block_size: slots in a block (lesson 3).
    kernel: the attention kernel: "auto", or a name that lesson 3's `load_kernel` knows.
    scheduler_config: the limits of a step (lesson 5).
    enable_prefix_caching: share prefixes between requests (lesson 8).
    eviction_policy: which cached prefix goes first (lessons 8 and 20). "tlru" needs tlru_threshold, the tokens that a
        turn may compute without being late, and takes tlru_next_prompt_estimate, those that a turn adds.
    enable_sessions: evict what a session's next turn needs after everything else (lesson 20).
    longest_prefix_first: admit waiting requests whose prefixes are cached first (lesson 20).
    kv_events, kv_events_replay: ZeroMQ endpoints, such as "tcp://127.0.0.1:5557", at which others follow what the
        prefix cache holds, and get again what they have missed (lesson 20). Events contain the tokens of all prompts.
        kv_events_format: "array" for subscribers of vLLM before its version 0.24.
    max_track_slots, checkpoint_interval: how many checkpoints of states a hybrid keeps, and how many tokens apart
        (lesson 11).
    kv_dtype: "int8" stores K and V as int8 with a scale for each token and head (lesson 17): about twice the tokens in
        the same memory, and answers that are close to those of "auto", the model's own dtype, but not the same. "int4"
        rotates K and V and stores 4 bits, with a scale and a minimum for each 32 numbers: three times the tokens,
        less accurate.
    kv_cache_dir, kv_host_bytes, kv_disk_bytes: keep evicted prefixes in host memory and in this directory (lesson 12).
        With none of them there are no tiers; with any of them, prefix caching must be on.
    kv_cache_key_file: a file of at least 32 bytes, the key that seals records in the directory; a record sealed with
        another key is not trusted.
    kv_always: load KV whenever a tier has it, not only where a measurement at the start says that loading is faster.
    tensor_parallel_size: processes that share the model's heads (lesson 18).
    prefill_workers: processes that compute prompts and hand their K and V over to this one (lesson 19).
    handover_bytes: shared memory for K and V in transit; a prompt that needs more is handed over in part. By default
        256 MiB.
    handover_min_tokens: prompts with fewer tokens to hand over are computed in this process; by default 64.
    speculate: guess up to this many tokens for each request and step, and verify them together (lesson 14); a
        `Speculation` sets more. None guesses nothing.

    Raises:
        UserError: a value is of the wrong type or out of range, or two options exclude each other; `param` names it.
    """

    backend: str = "auto"
    cuda_graphs: bool | None = None
    kv_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    kernel: str = "auto"
    scheduler_config: SchedulerConfig | None = None
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    tlru_threshold: int | None = None
    tlru_next_prompt_estimate: int | None = None
    enable_sessions: bool = False
    longest_prefix_first: bool = False
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_format: str = "map"
    max_track_slots: int | None = None
    checkpoint_interval: int | None = None
    kv_dtype: str = "auto"
    kv_cache_dir: str | os.PathLike[str] | None = None
    kv_host_bytes: int | None = None
    kv_disk_bytes: int | None = None
    kv_cache_key_file: str | os.PathLike[str] | None = None
    kv_always: bool = False
    tensor_parallel_size: int = 1
    prefill_workers: int = 0
    handover_bytes: int | None = None
    handover_min_tokens: int | None = None
    speculate: "int | Speculation | None" = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Return the config with these options. UserError if a name is not an option's."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                advice = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"
                raise UserError(f"there is no option {shown(name)}; {advice}", param=name)
        return cls(**options)

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            self._check_whole(name, least)
        for name in SWITCHES:
            check_switch(name, getattr(self, name))
        if self.cuda_graphs not in (None, True, False):
            raise UserError(f"cuda_graphs is {shown(self.cuda_graphs)}; give True, False or None", param="cuda_graphs")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.scheduler_config is not None and not isinstance(self.scheduler_config, SchedulerConfig):
            wrong = shown(self.scheduler_config)
            raise UserError(f"scheduler_config is {wrong}; give a SchedulerConfig", param="scheduler_config")
        self._check_together()
        if self.speculate is not None:
            from mini_engine.speculation.options import Speculation

            object.__setattr__(self, "speculate", Speculation.of(self.speculate))

    def _check_whole(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if name.endswith("_bytes") and isinstance(value, float) and value.is_integer():
            value = int(value)  # 2e9, for example
        object.__setattr__(self, name, checked_whole(name, value, least))  # the only way to set a frozen field

    def _check_together(self) -> None:
        for name, what in (("kv_cache_dir", "directory"), ("kv_cache_key_file", "file")):
            path = getattr(self, name)
            if path is not None and (path == "" or not isinstance(path, str | os.PathLike)):
                raise UserError(f"{name} is {shown(path)}; name a {what}", param=name)
        for name in ("kv_events", "kv_events_replay"):
            place = getattr(self, name)
            if place is not None and (place == "" or not isinstance(place, str)):
                raise UserError(f"{name} is {shown(place)}; give an endpoint, such as tcp://127.0.0.1:5557", param=name)
        for name, needed in NEEDS.items():
            value = getattr(self, name)
            if value is not None and not getattr(self, needed):
                why = f"{name} is {shown(str(value))}, but {needed} is {getattr(self, needed)}"
                raise UserError(f"{why}; give both or neither", param=name)
        if (self.eviction_policy == "tlru") != (self.tlru_threshold is not None):
            why = f"eviction_policy is {self.eviction_policy!r} and tlru_threshold {self.tlru_threshold}"
            raise UserError(f"{why}; tlru needs one, in tokens, and the others take none", param="tlru_threshold")
        if self.has_tiers and not self.enable_prefix_caching:
            raise UserError(
                "tiers keep the prefixes of lesson 8's tree, and prefix caching is off; turn it on, or leave out "
                "kv_cache_dir, kv_host_bytes and kv_disk_bytes",
                param="enable_prefix_caching",
            )

        if self.kv_events is not None and not self.enable_prefix_caching:
            raise UserError(
                "kv_events tells what the prefix cache holds, and prefix caching is off; turn it on, or leave it out",
                param="enable_prefix_caching",
            )

    @property
    def max_num_seqs(self) -> int:
        """The number of requests that may run at once."""
        return (self.scheduler_config or SchedulerConfig()).max_num_seqs

    @property
    def max_drafts(self) -> int:
        """The most tokens that are guessed in a step, for all requests (lesson 14)."""
        if self.speculate is None:
            return 0
        speculation = cast("Speculation", self.speculate)  # `__post_init__` makes one of a number
        return min(speculation.max_rows, self.max_num_seqs * speculation.max_drafts)

    @property
    def most_in_step(self) -> int:
        """The most tokens that a step computes of one request: a chunk of its prompt, or a token and its drafts."""
        limits = self.scheduler_config or SchedulerConfig()
        chunk = min(limits.chunked_prefill_size, limits.max_num_batched_tokens)
        return max(chunk, min(1 + self.max_drafts, limits.max_num_batched_tokens))

    @property
    def has_tiers(self) -> bool:
        """True if evicted prefixes are kept in host memory or on a disk (lesson 12)."""
        return self.kv_cache_dir is not None or self.kv_host_bytes is not None

    @property
    def needs_identity(self) -> bool:
        """True if KV is exchanged with other processes or kept for later runs, which must have the same model."""
        return self.has_tiers or self.prefill_workers > 0
