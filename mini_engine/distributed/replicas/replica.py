"""Lesson 13. A replica: one engine in its own process. Ray Serve creates it and calls its methods."""

from argparse import Namespace
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, NamedTuple

from prometheus_client import ProcessCollector

from mini_engine.base.errors import UserError
from mini_engine.cli.arguments import load_llm, model_names, scheduler_config
from mini_engine.distributed.replicas.wire import FormGrammar
from mini_engine.engine.answer import TextDelta
from mini_engine.engine.jobs import Job
from mini_engine.engine.worker import EngineStopped, EngineWorker, ModelLimits, QueueFull
from mini_engine.grammars.compiler import GrammarCompiler
from mini_engine.server.metrics import Metrics

REPORTS = 256  # the number of latest prompts in a report


class Report(NamedTuple):
    """A replica's cache hit for one prompt. number: counts its reports. num_found: blocks that were in its cache."""

    number: int
    keys: Sequence[bytes]
    num_found: int


class Replica:
    """An engine and its thread.

    Args:
        args: the options of `serve`.
        max_waiting: the most requests that may wait here.
        name: this replica's name in metrics; None asks Ray Serve for its rank.
    """

    def __init__(self, args: Namespace, max_waiting: int, name: str | None = None) -> None:
        self.name = rank() if name is None else name
        self.reports: deque[Report] = deque(maxlen=REPORTS)
        self.num_reports = 0
        self.metrics = Metrics(model_names(args.model, args.model_name)[0] if args.vllm_metrics else None)
        ProcessCollector("mini_engine_replica", registry=self.metrics.registry)
        self.refusal: UserError | None = None
        try:
            llm = load_llm(args, scheduler_config=scheduler_config(args))
        except UserError as error:  # a restart would not help; `limits` tells the operator
            self.refusal = error
            return
        self.worker = EngineWorker(llm.engine, llm.tokenizer, max_waiting, self.metrics, args.step_seconds)
        self.metrics.watch(self.worker)
        self.worker.__enter__()
        limits = self.worker.limits
        self.grammars = GrammarCompiler(llm.tokenizer, limits.vocab_size, limits.eos_token_ids)

    def limits(self) -> ModelLimits | UserError:
        """Return the limits of model and pool, or the reason there is no engine."""
        return self.refusal or self.worker.limits

    async def answer(
        self, jobs: Sequence[Job], keys: Sequence[bytes]
    ) -> AsyncGenerator[tuple[int, TextDelta] | UserError | QueueFull | EngineStopped | None, None]:
        """Answer jobs together. Closing the generator, or cancelling its task, aborts them.

        Args:
            keys: of the first prompt's blocks, for the report to the router.

        Yields:
            None once all jobs are accepted, then (index of a job, delta); or one error, and none was accepted.
        """
        try:
            answers = await self.worker.submit(await self.compiled(jobs))
        except (UserError, QueueFull, EngineStopped) as error:
            yield error
            return
        with closing(answers):
            yield None
            reported = False
            async with aclosing(answers.__aiter__()) as deltas:
                async for index, delta in deltas:
                    if index == 0 and delta.token_ids and not reported:
                        reported = True
                        self.report(keys, delta.num_cached_tokens // self.worker.limits.block_size)
                    yield index, delta

    async def close_session(self, session: Hashable, namespace: Hashable) -> bool:
        """Forget a session, as EngineWorker does. A replica without an engine has none."""
        try:
            return self.refusal is None and await self.worker.close_session(session, namespace)
        except EngineStopped:
            return False

    async def compiled(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with their grammars compiled, each distinct one once."""
        forms = {id(job.params.grammar): job.params.grammar for job in jobs}
        made = {
            key: await self.grammars.compile(grammar.form) if isinstance(grammar, FormGrammar) else grammar
            for key, grammar in forms.items()
        }
        return [job._replace(params=replace(job.params, grammar=made[id(job.params.grammar)])) for job in jobs]

    def report(self, keys: Sequence[bytes], num_found: int) -> None:
        """Record the cache hit of a prompt, for the router."""
        self.num_reports += 1
        self.reports.append(Report(self.num_reports, keys, num_found))

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the latest reports; Ray Serve polls this and passes it to the router."""
        return {"reports": list(self.reports)}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the constants that the router needs; Ray Serve asks once."""
        return {"num_blocks": 1 if self.refusal else self.worker.limits.num_blocks}

    def check_health(self) -> None:
        """Raise if the engine thread has ended or a step is stuck; Ray Serve then starts another replica."""
        if self.refusal is not None:
            return
        if trouble := self.worker.stuck if self.worker.is_alive else "the engine thread has ended":
            raise EngineStopped(trouble)

    def scrape(self) -> tuple[str, bytes]:
        """Return this replica's name and metrics."""
        return self.name, self.metrics.text()

    def __del__(self) -> None:
        if hasattr(self, "worker"):
            self.worker.close()


def rank() -> str:
    """Return this replica's rank in Ray Serve, from 0 on; its successor gets the same one."""
    from ray import serve  # pyright: ignore[reportMissingImports]

    return str(serve.get_replica_context().rank.rank)
