"""Course machinery. Shared by the conformance suite: ranks that are threads, and a prefill worker in this very process.

What they say to each other is what processes say, packed as for a pipe; nothing but the start and the end of processes
is left to the tests at night, which have real ones.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mini_engine.assembly.build import build_engine, build_worker, over_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.distributed.tensor_parallel.follow import follow_plans
from mini_engine.distributed.tensor_parallel.layers import with_layers
from mini_engine.distributed.tensor_parallel.messages import packed
from mini_engine.engine.engine import Engine
from mini_engine.handover.opening import worker_config
from mini_engine.handover.prefill import Worker
from mini_engine.handover.protocol import Filled
from mini_engine.handover.stage import State
from tests.families.engines import OPTIONS, limits_of, loaded
from tests.families.rows import Model
from tests.l18.ranks import Pipe, Sums, part
from tests.l19.parts import Memory as Buffers

# ---------------------------------------------------------------- ranks


class RanksInThreads:
    """What `Ranks` does, for two ranks: this thread is rank 0."""

    num_ranks, fault = 2, ""

    def __init__(self, model: Model, backend: str) -> None:
        sums = Sums(2)
        self.model, other = (with_layers(part(model.path, rank, 2), backend, sums.of(rank)) for rank in range(2))
        self.pipe, self.replies, self.faults = Pipe(), Pipe(), []
        self.thread = threading.Thread(target=self._follow, args=(other,), daemon=True)
        self.thread.start()

    def _follow(self, model: Any) -> None:
        try:
            follow_plans(model, self.pipe, self.replies)  # type: ignore[arg-type]
        except EOFError:
            pass
        except Exception as error:
            self.faults.append(error)
            raise

    def tell(self, message: Any) -> None:
        self.pipe.send_bytes(packed(message))

    def tell_each(self, messages: Sequence[Any]) -> None:
        [message] = messages
        self.tell(message)

    def ask(self, message: Any, num_bytes: int) -> list[bytes]:
        self.tell(message)
        reply = self.replies.recv_bytes()
        assert len(reply) == num_bytes
        return [reply]

    @contextmanager
    def running(self, step: Any) -> Iterator[None]:
        self.tell(step)
        yield

    def close(self) -> None:
        self.pipe.send_bytes(None)
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.faults, self.faults


@contextmanager
def ranks_of(model: Model, backend: str = "reference") -> Iterator[Any]:
    """Yield two ranks that have joined."""
    ranks = RanksInThreads(model, backend)
    try:
        yield ranks
    finally:
        ranks.close()


def engine_over(ranks: Any, model: Model, limits: Any = None, capture: Any = None, **options: Any) -> Engine:
    """Return an engine over ranks, threads or processes, which know the model by its whole weights."""
    config = config_of(model, limits, options)
    return over_ranks(ranks, config, identity_of(loaded(model), config), capture)


def config_of(model: Model, limits: Any, options: dict[str, Any]) -> EngineConfig:
    always: dict[str, Any] = {"backend": "reference", "kv_dtype": model.kv_dtype}
    return EngineConfig.of(OPTIONS | always | {"scheduler_config": limits or limits_of()} | options)


# ---------------------------------------------------------------- a prefill worker


class WorkerHere:
    """What `PrefillWorkers` does, for one worker: `step` lets it compute a chunk."""

    num_losses = num_away = 0

    def __init__(self, model: Model, config: EngineConfig, num_bytes: int) -> None:
        self.block: Any = Buffers(num_bytes)
        self.built = build_worker(str(model.path), worker_config(config), "float32", "cpu", self.block, self.note)
        self.worker = Worker(self.built.engine, self.built.connector, None)  # type: ignore[arg-type]

    def meet(self, layout: Any, transfers: Any) -> None:
        assert layout == self.built.layout, "both ends copy the same bytes"
        self.transfers = transfers
        transfers.wait = lambda seconds: self.step()

    def choose(self, tokens: Any, namespace: Any) -> int:
        return 1

    def send(self, sender: int, message: Any) -> None:
        self.worker.hear(message)

    def note(self, message: Any) -> None:
        if isinstance(message, Filled):
            self.transfers.fill(1, message.id, message.num_buffers)
        else:
            self.transfers.end(1, message.id, message.error)

    def step(self) -> None:
        engine = self.built.engine
        for request in engine.step().finished if engine.has_unfinished else ():
            self.worker.end(int(request.id), request.error or "")

    def close(self) -> None:
        pass

    def check_nothing_is_held(self) -> None:
        while self.built.engine.has_unfinished:
            self.step()
        assert {*self.transfers.buffers.states} == {State.FREE} and not self.transfers.of_id
        assert not self.built.engine.scheduler.manager.tables


def engine_with_worker(
    model: Model, limits: Any = None, num_bytes: int = 2**22, backend: str = "reference", **options: Any
) -> tuple[Engine, WorkerHere]:
    """Return an engine and the worker in this process that computes its prompts."""
    asked = {"backend": backend, "prefill_workers": 1, "handover_min_tokens": 0}
    config = config_of(model, limits, asked | options)
    worker = WorkerHere(model, config, num_bytes)
    return build_engine(loaded(model), config, workers=worker), worker
