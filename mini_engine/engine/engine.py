"""Lesson 5. The engine: requests come, steps run, tokens go out, whatever happens to one of them.

    schedule -> run the model -> choose tokens -> update

An engine belongs to one thread. Other threads hand their wishes to that one, which adds and aborts between two steps.
An abort from within a step (the model or the sampler calls back) is honoured when the step ends.
"""

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.config import Qwen3Config
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import sample
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Scheduler, SchedulerConfig
from mini_engine.engine.stats import StepStats
from mini_engine.errors import UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import KvCacheManager, blocks_in_budget
from mini_engine.model.qwen3 import Qwen3ForCausalLM

CPU_KV_BYTES = 2**30
GPU_SHARE = 0.8

log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What a step gave: request id to new token; the requests it ended, with their reasons; figures."""

    new_tokens: dict[str, Sampled]
    finished: list[Request]
    stats: StepStats


def one_at_a_time(step: Callable[["Engine"], StepResult]) -> Callable[["Engine"], StepResult]:
    """Let `step` refuse to begin while it runs: two at once would write over each other's KV."""

    @functools.wraps(step)
    def guarded(engine: "Engine") -> StepResult:
        if not engine.stepping.acquire(blocking=False):
            raise RuntimeError("a step runs already, and an engine belongs to one thread; EngineWorker serves several")
        try:
            return step(engine)
        finally:
            engine.stepping.release()

    return guarded


class Engine:
    """Serves requests in steps. `Engine.for_model(model)` builds one; tests put together their own.

    Args:
        config: the model's, by which prompts are checked.
        runner: chunks to logits `[R, vocab_size]`, a row for each chunk that samples.
    """

    def __init__(self, config: Qwen3Config, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.stepping = threading.Lock()

    @classmethod
    def for_model(
        cls,
        model: Qwen3ForCausalLM,
        *,
        kv_bytes: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        kernel: str = "auto",
        scheduler_config: SchedulerConfig | None = None,
        manager: Callable[..., KvCacheManager] = KvCacheManager,
    ) -> "Engine":
        """An engine with a pool of its own.

        Args:
            kv_bytes: memory for the pool; None takes `default_kv_bytes`.
            num_blocks: blocks of the pool instead, the null block included.
            kernel: a name that `load_kernel` knows.
            manager: makes the KV manager: num_blocks, block_size, copy.
        """
        if num_blocks is None:
            budget = default_kv_bytes(model.device) if kv_bytes is None else kv_bytes
            num_blocks = blocks_in_budget(budget, model.config.kv_bytes_per_token(model.dtype), block_size)
        attend = load_kernel(kernel, model.device, model.dtype)
        pool = KvPool(model.config, num_blocks, block_size, attend, model.dtype, model.device)
        kv = manager(num_blocks, block_size, pool.copy_blocks)
        return cls(model.config, Scheduler(kv, scheduler_config), ModelRunner(model, pool))

    @property
    def has_unfinished(self) -> bool:
        """Somebody waits or runs."""
        return bool(self.scheduler.requests)

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        namespace: Hashable = None,
    ) -> Request:
        """Let a prompt wait for its turn. Look at the request as it goes; change nothing in it.

        Args:
            priority: with the policy "priority", smaller numbers go first.
            namespace: it shares prefixes with requests of the same namespace only (lesson 8).

        Raises:
            UserError: the prompt is empty, too long for the model or for the whole pool, or has ids outside the
                vocabulary; the params ask for what the model cannot do; the id is in use; the priority is no whole
                number or the namespace cannot be hashed. Nothing was changed.
        """
        check_place(priority, namespace)
        self.config.check_prompt(prompt_ids, params.max_tokens)
        params.check_fits(self.config.vocab_size, self.config.eos_token_ids)
        stop_ids = params.stop_ids(self.config.eos_token_ids)
        request = Request(request_id, list(prompt_ids), params, priority, stop_ids, namespace)
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, in whatever state, and give back its blocks. False if there is none by that id."""
        request = self.scheduler.requests.get(request_id)
        if request:
            self.scheduler.finish(request, reason)
        return request is not None

    @one_at_a_time
    def step(self) -> StepResult:
        """Run one step. If it fails, its requests end with an error, what they held is free, and the others go on."""
        scheduler = self.scheduler
        preempted = scheduler.num_preemptions
        chunks = scheduler.schedule()
        requests = [chunk.request for chunk in chunks]
        prefill = sum(chunk.stop - chunk.start for chunk in chunks if chunk.request.is_prefilling)
        total = sum(chunk.stop - chunk.start for chunk in chunks)
        try:
            new_tokens = scheduler.update(chunks, self._run(chunks))
        except Exception as error:
            log.exception("a step failed; the %d requests in it end with an error", len(requests))
            new_tokens = {}
            scheduler.fail(requests, error)
        finished = [request for request in requests if request.finish_reason not in (None, FinishReason.ABORT)]
        stats = StepStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            prefill_tokens=prefill,
            decode_tokens=total - prefill,
            num_preempted=scheduler.num_preemptions - preempted,
            blocks=scheduler.manager.blocks_by_state,
        )
        return StepResult(new_tokens, finished, stats)

    def _run(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """What the model and the sampler choose, a token for each chunk that samples."""
        if not chunks:
            return []
        return sample(self.runner.run(chunks), [chunk.request for chunk in chunks if chunk.samples])


def check_place(priority: int, namespace: Hashable) -> None:
    """Raise UserError for what queues and the tree of prefixes could not be ordered or searched by."""
    if not isinstance(priority, int):
        raise UserError(f"priority is {priority!r}; give a whole number, smaller ones go first")
    try:
        hash(namespace)
    except TypeError:
        raise UserError(f"namespace is {namespace!r}, which cannot be hashed; give a text, for instance") from None


def default_kv_bytes(device: torch.device) -> int:
    """What a pool may take unless told otherwise: most of what is free on a GPU, 1 GiB of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return CPU_KV_BYTES
