"""Course machinery. What a path of a smoke script runs: prompts, a model, an engine, and what happened in its steps."""

import argparse
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from scripts.smoke.arguments import blocks_for, load_model_of
from scripts.smoke.run import Outcome
from scripts.smoke.steps import steps_of

from mini_engine.assembly.build import build_engine
from mini_engine.engine.engine import Engine, StepResult
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.stats import Summary


class Opened:
    """What a script's paths share: each thing is opened on first use, and `stack` closes it when the script ends."""

    def __init__(self, stack: ExitStack | None = None) -> None:
        self.stack = stack or ExitStack()
        self.things: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made under this name."""
        if name not in self.things:
            self.things[name] = make()
        return self.things[name]


class Trial:
    """One path's run. A lesson says in a class of its own how it makes engines, and what else it checks.

    Attributes:
        room: how often all prompts and answers fit into the pool. layout: the pool's, for the report.
        namespace, session: of the requests that are added next. requests: all that were added.
        summary: of the steps since the last `add`.
    """

    room = 2
    layout = "block-tensor"
    namespace: Hashable = None
    session: Hashable = None

    def __init__(
        self, name: str, args: argparse.Namespace, prompts: list[list[int]], opened: Opened, model: Any = None
    ) -> None:
        self.name, self.args, self.prompts, self.opened = name, args, prompts, opened
        if model is not None:
            self.model = model
        self.requests: list[Request] = []
        self.summary = Summary()

    @cached_property
    def model(self) -> Any:
        """A model of this path's own: fast layers take over its weights."""
        return load_model_of(self.args)

    def options(self, chunk: int = 512, tight: bool = False, **options: Any) -> dict[str, Any]:
        """Return the options of an engine: these, and the usual ones.

        Args:
            chunk: the most tokens of a prompt in a step.
            tight: whether the pool is too small for all answers, so that requests are preempted.
        """
        needs, size = blocks_for(self.prompts, self.args), self.args.block_size
        num_blocks = max(*needs, sum(len(ids) // size + 1 for ids in self.prompts)) if tight else self.room * sum(needs)
        watermark = 0.0 if tight else SchedulerConfig.watermark
        limits = SchedulerConfig(4, max_num_batched_tokens=512, chunked_prefill_size=chunk, watermark=watermark)
        usual = {"num_blocks": 1 + num_blocks, "block_size": size, "scheduler_config": limits, "backend": "reference"}
        return usual | {"kernel": getattr(self.args, "kernel", "auto")} | options

    def one_process(self, capture: Any = None, **options: Any) -> Engine:
        """Return a new engine in this process. capture: how its decode steps are captured."""
        return build_engine(self.model, capture=capture, **self.options(**options))

    def engine(self, **options: Any) -> Engine:
        """Return the lesson's engine with these options."""
        return self.one_process(**options)

    def add(self, engine: Engine, prompts: Sequence[list[int]] | None = None, **params: Any) -> list[Request]:
        """Add a request for each prompt, by default for the path's own. params: of sampling."""
        params = {"temperature": 0, "max_tokens": self.args.max_new_tokens} | params
        added = []
        for ids in self.prompts if prompts is None else prompts:
            name = f"request {len(self.requests)} of {self.name}"
            chosen = SamplingParams(**params)
            added.append(engine.add_request(name, ids, chosen, namespace=self.namespace, session=self.session))
            self.requests.append(added[-1])
        self.summary = Summary()
        return added

    def steps(self, engine: Engine, preempt: bool = False) -> Iterator[StepResult]:
        """Run steps until every request has ended. A path may act between them. preempt: as in `steps_of`."""
        for result in steps_of(engine, preempt):
            self.summary.add_step(result.stats)
            yield result

    def run_out(self, engine: Engine, preempt: bool = False) -> None:
        """Run steps until every request has ended."""
        for _ in self.steps(engine, preempt):
            pass

    def ask(self, engine: Engine, prompts: Sequence[list[int]] | None = None, preempt: bool = False) -> list[Request]:
        """Answer all prompts together; return their requests."""
        requests = self.add(engine, prompts)
        self.run_out(engine, preempt)
        return requests

    def ask_in_turn(self, engine: Engine) -> list[Request]:
        """Answer one prompt after another; return their requests. `summary` is then of all."""
        summary, requests = Summary(), []
        for ids in self.prompts:
            requests += self.add(engine, [ids])
            self.summary = summary
            self.run_out(engine)
        return requests

    def outcome(self, engine: Engine, requests: Sequence[Request]) -> Outcome:
        """Return the requests' answers, and faults: errors and lost blocks. The engine's prefix cache is emptied."""
        faults = [f"{request.id} ended with an error: {request.error}" for request in self.requests if request.error]
        kv = {"layout": self.layout, "bytes": engine.runner.pool.bytes}
        return Outcome([request.output_ids for request in requests], kv, faults + lost_blocks(engine))


def lost_blocks(engine: Engine) -> list[str]:
    """Return the leaks in the blocks of an engine whose requests have ended. Its prefix cache is emptied."""
    manager = engine.scheduler.manager
    held = manager.blocks_by_state.held
    lost = [f"{held} blocks are still held"] if held else []
    manager.coordinator.clear()
    if manager.allocator.num_free != manager.num_usable_blocks:
        lost.append(f"{manager.num_usable_blocks - manager.allocator.num_free} blocks belong to nothing")
    return lost
