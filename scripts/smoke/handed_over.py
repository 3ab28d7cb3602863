"""Lesson 19. A path's run in its smoke script: engines with a worker, and what happened to their transfers."""

from collections import Counter
from collections.abc import Hashable, Iterator

from scripts.smoke.paths import CHUNK
from scripts.smoke.run import Outcome
from scripts.smoke.tiers import HOST
from scripts.smoke.trial import Trial

from mini_engine.assembly.build import open_engine
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.engine.engine import Engine, StepResult
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.stage import State
from mini_engine.kv.cache_coordinator import cache_of

ENOUGH = 16  # tokens for a worker to compute if tiers have the others


class HandedOver(Trial):
    """Paths with the same options share an engine and its worker, since a process takes seconds to start.

    Each path has its own namespace, so that neither side's prefix cache has the prompts of another path.

    Attributes:
        num_mixed: steps that ran while a prompt was in transit. num_partial: steps with one that had partly arrived.
    """

    room = 3
    layout = "block-tensor, handed over"
    num_mixed = num_partial = 0
    shared: Engine
    begun: Counter[str]
    added: Counter[str]

    @property
    def namespace(self) -> Hashable:
        return self.name

    def engine(self, small: bool = False, enable_prefix_caching: bool = True, **options) -> Engine:
        """Return the engine with these options. Both sides always cache prefixes.

        Args:
            small: a tier, guesses, and buffers for two blocks and their extras.
        """
        if small:
            receiving = receiving_of(self.engine())
            num_bytes = (2 + receiving.extras.num_buffers(0, 2)) * receiving.stage.buffer_bytes
            options |= {"speculate": 4, "handover_bytes": num_bytes, "handover_min_tokens": ENOUGH, **HOST}
        options = {"chunk": CHUNK, "backend": "auto", "handover_min_tokens": 0} | options
        self.shared = self.opened.once(str(sorted(options.items())), lambda: self.start(options))
        self.begun = events_of(self.shared)
        return self.shared

    def start(self, options: dict) -> Engine:
        """Return a new engine with a worker; the script's end closes it."""
        config = EngineConfig(prefill_workers=1, **self.options(**options))
        engine = open_engine(self.args.model, config, self.args.dtype, self.args.device)
        self.opened.stack.callback(engine.runner.close)
        self.opened.stack.callback(cache_of(engine.scheduler.manager).connector.shutdown)
        return engine

    def add(self, engine, prompts=None, **params) -> list:
        self.added = events_of(engine)
        return super().add(engine, prompts, **params)

    def since(self, event: str) -> int:
        """Return how often an event was counted in this path."""
        return events_of(self.shared)[event] - self.begun[event]

    @property
    def brought(self) -> int:
        """The number of tokens handed over since the last `add`."""
        return events_of(self.shared)["tokens"] - self.added["tokens"]

    def steps(self, engine: Engine, preempt: bool = False) -> Iterator[StepResult]:
        for result in super().steps(engine, preempt):
            asked = [one for one in receiving_of(engine).asked.values() if one and one.is_open]
            self.num_mixed += bool(asked) and result.stats.decode_tokens > 0
            self.num_partial += any(transfer.num_filled for transfer in asked)
            yield result

    def outcome(self, engine, requests) -> Outcome:
        """Add buffers that were not given back and lost workers to the faults."""
        done, transfers = super().outcome(engine, requests), receiving_of(engine).transfers
        while transfers.any_lent:
            transfers.wait(1)
        states = transfers.buffers.states
        if num_kept := len(states) - states.count(State.FREE):
            done.faults.append(f"{num_kept} buffers are not free")
        if self.since("losses"):
            done.faults.append("a prefill worker was lost")
        return done.exercising(self.since("transfers"), "nothing was handed over")


def receiving_of(engine: Engine) -> ReceivingConnector:
    """Return what an engine receives KV through, beside tiers if it has both."""
    connector = cache_of(engine.scheduler.manager).connector
    receiving = getattr(connector, "workers", connector)
    assert isinstance(receiving, ReceivingConnector)
    return receiving


def events_of(engine: Engine) -> Counter[str]:
    """Return how often each event was counted, over all paths of this engine."""
    return Counter(receiving_of(engine).stats[0].events)
