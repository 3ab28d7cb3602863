"""Course machinery. Two ranks as threads of this process, for a recorder of their collectives."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from mini_engine.assembly.build import over_ranks
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.distributed.tensor_parallel.collectives import TorchCollectives
from mini_engine.distributed.tensor_parallel.follow import follow_plans
from mini_engine.distributed.tensor_parallel.layers import with_layers
from mini_engine.distributed.tensor_parallel.messages import Message, packed
from mini_engine.distributed.tensor_parallel.shard import RankCut
from mini_engine.engine.runner import Step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import DENSE

NUM_RANKS = 2
Meeting = dict[int, Tensor]  # a rank to its part


class Heard(TorchCollectives):
    """The collectives of a rank that is a thread; keeps each rank's part of each of them."""

    def __init__(self, rank: int, brought: list[Meeting], barrier: threading.Barrier) -> None:
        super().__init__(rank, NUM_RANKS)
        self.brought, self.barrier = brought, barrier

    def meet(self, x: Tensor) -> list[Tensor]:
        """Contribute x; return the parts of all ranks."""
        if self.rank == 0:
            self.brought.append({})
        self.barrier.wait()
        self.brought[-1][self.rank] = x.clone()
        self.barrier.wait()
        parts = [self.brought[-1][rank] for rank in range(NUM_RANKS)]
        self.barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.meet(x)).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        together = torch.cat(self.meet(x), dim=1)
        return together if self.rank == 0 else x


class OtherRank:
    """Rank 0's view of rank 1 as a thread: messages go through a queue, as bytes."""

    fault, num_ranks = "", NUM_RANKS

    def __init__(self, model: Any) -> None:
        self.model, self.queue = model, Queue[bytes | None]()

    def tell(self, message: Message) -> None:
        self.queue.put(packed(message))

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        self.tell(step)
        yield

    def recv_bytes(self) -> bytes:
        """Return the next message, in rank 1's thread. EOFError if there will be none."""
        message = self.queue.get()
        if message is None:
            raise EOFError
        return message


def answered(path: Path, prompt_ids: Sequence[int], max_tokens: int) -> tuple[list[list[Meeting]], list[int]]:
    """Answer a prompt over two ranks. Return the meetings of each step, and the answer."""
    brought, barrier = list[Meeting](), threading.Barrier(NUM_RANKS, timeout=60)
    stored = DENSE.stored(path)
    cuts = [stored.load(torch.float32, cut=RankCut(rank, NUM_RANKS)) for rank in range(NUM_RANKS)]
    models = [with_layers(cut, "torch", Heard(rank, brought, barrier)) for rank, cut in enumerate(cuts)]
    other: Any = OtherRank(models[0])

    def follow() -> None:
        with suppress(EOFError):
            follow_plans(models[1], other, other)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    engine, steps = over_ranks(other, EngineConfig(num_blocks=8, block_size=8, kernel="torch")), list[list[Meeting]]()
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = engine.add_request("A", prompt_ids, params)
    while engine.has_unfinished:
        begin = len(brought)
        engine.step()
        steps.append(brought[begin:])
    other.queue.put(None)
    thread.join()
    return steps, request.output_ids
