"""Lesson 5. The engine: adds and aborts requests and runs steps. One failed request or step does not stop it.

    schedule -> run the model -> choose tokens -> update

An engine belongs to one thread. Other threads pass their requests to that thread, which adds and aborts between steps.
An abort from within a step (a callback from the model or the sampler) takes effect when the step ends.
"""

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from mini_engine.base.errors import EngineDead, UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.prompt_logprobs import take_prompt_rows
from mini_engine.engine.request import Ending, FinishReason, Request
from mini_engine.engine.runner import ModelRunner, Runner
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import sample
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Decoding, Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.stats import StepStats
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import KvCacheManager, blocks_in_budget
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.kinds import Full

CPU_KV_BYTES = 2**30
GPU_SHARE = 0.8

log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """The result of a step.

    new_tokens: request id to new token; where a request gained several, the newest.
    finished: the step's requests that have ended, with an answer or an error, in the order of its chunks. Aborted ones
        are left out: the caller of `abort` knows.
    """

    new_tokens: dict[str, Sampled]
    finished: list[Request]
    stats: StepStats


def one_at_a_time(step: Callable[["Engine"], StepResult]) -> Callable[["Engine"], StepResult]:
    """Make `step` raise RuntimeError while another one runs: concurrent steps would overwrite each other's KV.

    It raises EngineDead if an earlier clean-up failed. With that error, here or in the step, every request ends.
    """

    @functools.wraps(step)
    def guarded(engine: "Engine") -> StepResult:
        if not engine.stepping.acquire(blocking=False):
            raise RuntimeError("another step is running; an engine belongs to one thread, EngineWorker serves several")
        try:
            if fault := engine.scheduler.manager.fault:
                raise EngineDead(fault)
            return step(engine)
        except EngineDead as error:
            engine.scheduler.fail(list(engine.scheduler.requests.values()), error)
            raise
        finally:
            engine.stepping.release()

    return guarded


class Engine:
    """Serves requests in steps. `Engine.for_model(model)` builds one; tests assemble their own.

    Args:
        config: the model's configuration, used to check prompts.
        runner: turns chunks into logits `[R, vocab_size]`, the last `num_logits` rows of each chunk.
        decoding: how steps yield tokens; by default one for each chunk that samples.
    """

    def __init__(
        self,
        config: Qwen3Config,
        scheduler: Scheduler,
        runner: Runner,
        decoding: Decoding | None = None,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.decoding = decoding or Decoding()
        self.stepping = threading.Lock()

    @classmethod
    def for_model(
        cls,
        model: CausalLM,
        *,
        kv_bytes: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        kernel: str = "auto",
        scheduler_config: SchedulerConfig | None = None,
        manager: Callable[..., KvCacheManager] = KvCacheManager,
        runner: Callable[[CausalLM, KvPool], Runner] = ModelRunner,
        decoding: Decoding | None = None,
    ) -> "Engine":
        """Build an engine with its own pool.

        Args:
            kv_bytes: memory for the pool; by default `default_kv_bytes`.
            num_blocks: size of the pool in blocks, including the null block; takes precedence over kv_bytes.
            kernel: a name that `load_kernel` knows.
            manager: creates the KV manager from num_blocks, block_size and copy.
            runner: creates the step runner from the model and the pool.
            decoding: as for the engine; not to be shared between engines.

        Raises:
            UserError: some layers keep something else than K and V of every token.
        """
        if set(model.config.layers) != {Full()}:
            raise UserError(
                "some layers keep something else than K and V of every token; use LLM or build_engine, which have "
                "memories for them"
            )
        maker = PoolMaker(model.config, model.dtype, model.device)
        if num_blocks is None:
            budget = default_kv_bytes(model.device) if kv_bytes is None else kv_bytes
            num_blocks = blocks_in_budget(budget, maker.bytes_per_token, block_size)
        store = maker.make(num_blocks, block_size, kernel)
        kv = manager(num_blocks, block_size, maker.copier(store))
        return cls(model.config, Scheduler(kv, scheduler_config), runner(model, store), decoding)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of a request, prompt and answer together, that the model and the pool can take.

        The last token of an answer needs no slot: it is sampled but never fed.
        """
        manager = self.scheduler.manager
        return min(self.config.max_model_len, manager.num_usable_blocks * manager.block_size + 1)

    @property
    def has_unfinished(self) -> bool:
        """True if any request is waiting or running."""
        return bool(self.scheduler.requests)

    @property
    def fault(self) -> str:
        """The reason no step can run any more: a process has ended, or a clean-up failed. Empty while steps can run."""
        return self.runner.fault or self.scheduler.manager.fault

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        namespace: Hashable = None,
        session: Hashable = None,
    ) -> Request:
        """Put a prompt in the waiting queue and return its request. Callers may read the request but not modify it.

        Args:
            priority: with the policy "priority", smaller numbers go first.
            namespace: only requests of the same namespace may share KV.
            session: the conversation that it is a turn of; its cached KV may be kept for the next one.

        Raises:
            UserError: the prompt is empty, too long for the model or for the whole pool, or has ids outside the
                vocabulary; the params ask for something the model cannot do; the id is in use; the priority is not a
                whole number, or namespace or session are not hashable. Nothing was changed.
        """
        check_hints(priority, namespace, session)
        if not isinstance(params, SamplingParams):
            raise UserError(f"params is {shown(params)}; give SamplingParams", param="params")
        self.config.check_prompt(prompt_ids, params.max_tokens)
        params.check_fits(self.config.vocab_size, self.config.eos_token_ids)
        stop_ids = params.stop_ids(self.config.eos_token_ids)
        if params.prompt_logprobs is not None:
            # unique, even if the id is reused: tokens found in the cache have no logits. No next turn finds it either
            namespace, session = object(), None
        request = Request(request_id, list(prompt_ids), params, priority, stop_ids, namespace, session)
        self.scheduler.add(request)
        try:
            self.scheduler.manager.coordinator.request_added(request)
        except BaseException:
            self.abort(request_id)
            raise
        return request

    def close_session(self, session: Hashable, namespace: Hashable = None) -> bool:
        """Forget a conversation whose cached KV was kept for its next turn. Return False if it is unknown."""
        return self.scheduler.manager.coordinator.close_session(session, namespace)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, whatever its state, and free its blocks. Return False if no unfinished one has this id.

        It ends even if not everything it held can be released; `fault` then says so.
        """
        request = self.scheduler.requests.get(request_id)
        if request:
            self._end(request, Ending(reason))
        return request is not None

    def conclude(self, request: Request, ending: Ending) -> None:
        """End a request for the reason that its text's reader found: a stop string or its grammar. None is a no-op.

        If the engine has ended it at the same token because of max_tokens, the reader's reason wins. As with `abort`,
        it ends even if not everything it held can be released.
        """
        if request.is_finished:
            request.finish_reason, request.error = ending
        else:
            self._end(request, ending)

    def _end(self, request: Request, ending: Ending) -> None:
        if ending.reason is not None:
            with suppress(EngineDead):  # the request has ended, and the next step will say so
                self.scheduler.finish(request, ending.reason, ending.error)

    @one_at_a_time
    def step(self) -> StepResult:
        """Run one step. If it fails, its requests end with an error and their blocks are freed; other requests go on.

        A step fails if the model, the sampler or `update` raises an Exception. `scheduler.fail` ends its requests, and
        the exception is logged with its traceback. KeyboardInterrupt and SystemExit propagate.

        EngineDead propagates too, although it is an Exception: blocks could not be released, or a process of the model
        has ended, so this was the last step. `one_at_a_time` ends every request, and refuses later steps.

        Raises:
            EngineDead: neither this step nor any other can run; every request has ended with that error.
        """
        scheduler = self.scheduler
        preempted = scheduler.num_preemptions
        chunks = self.decoding.plan(scheduler)
        requests = [chunk.request for chunk in chunks]
        prompts = [chunk.stop - chunk.start for chunk in chunks if chunk.request.is_prefilling]
        prefill, decode = sum(prompts), len(chunks) - len(prompts)
        try:
            new_tokens = self.decoding.record(scheduler, chunks, self._run(chunks))
        except EngineDead:
            raise
        except Exception as error:
            log.exception("a step failed; the %d requests in it end with an error", len(requests))
            new_tokens = {}
            prefill = decode = 0
            scheduler.fail(requests, error)
        finished = [request for request in requests if request.finish_reason not in (None, FinishReason.ABORT)]
        stats = StepStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            prefill_tokens=prefill,
            decode_tokens=decode,
            num_preempted=scheduler.num_preemptions - preempted,
            blocks=scheduler.manager.blocks_by_state,
            num_drafted=self.decoding.num_drafted,
            num_accepted=self.decoding.num_accepted,
        )
        return StepResult(new_tokens, finished, stats)

    def _run(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Run the model and the sampler; return one token for each of `decoding.sample_rows`."""
        if not chunks:
            return []
        logits = self.runner.run(chunks)
        if any(chunk.request.needs_prompt_logprobs for chunk in chunks):
            logits = take_prompt_rows(logits, chunks, self.fail)
        sampled = sample(logits, self.decoding.sample_rows(chunks))
        self._end_broken(chunks, sampled)
        return sampled

    def _end_broken(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled]) -> None:
        """End the requests for which no token could be chosen. `update` skips them like aborted ones."""
        for request, row in self.decoding.standing(chunks, sampled):
            if row.error is not None:
                self.fail(request, row.error)

    def fail(self, request: Request, error: Exception) -> None:
        """End one request with its own error; others go on. A UserError: it asked for the impossible."""
        if isinstance(error, UserError):
            self._end(request, Ending(FinishReason.GRAMMAR, str(error)))
        elif not request.is_finished:
            log.error("request %s ends with an error", request.id, exc_info=error)
            self._end(request, Ending(FinishReason.ERROR, f"{type(error).__name__}: {error}"))


def check_hints(priority: int, namespace: Hashable, session: Hashable) -> None:
    """Raise UserError unless queues can be sorted by `priority`, and prefixes and sessions be looked up by the rest."""
    if not isinstance(priority, int):
        raise UserError(f"priority is {shown(priority)}; give a whole number; smaller ones go first")
    for name, value in (("namespace", namespace), ("session", session)):
        try:
            hash(value)
        except TypeError:
            raise UserError(f"{name} is {shown(value)}, which is not hashable; use a string, for example") from None


def default_kv_bytes(device: torch.device) -> int:
    """Return the default size of a pool in bytes: 80% of the free memory on a GPU, 1 GiB of main memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return CPU_KV_BYTES
