"""Lesson 18. Shared by the tests of ranks: ranks that are processes, ranks that are threads, and none at all."""

import pickle
import queue
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mini_engine.assembly.build import over_ranks, start_ranks
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import reader_of
from mini_engine.distributed.tensor_parallel.collectives import TorchCollectives
from mini_engine.distributed.tensor_parallel.follow import follow_plans
from mini_engine.distributed.tensor_parallel.layers import with_layers
from mini_engine.distributed.tensor_parallel.messages import packed
from mini_engine.distributed.tensor_parallel.shard import RankCut
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR

PROMPTS = [[5, 9, 11, 30] * 6, [7], [5, 9, 11, 30] * 4 + [8], list(range(100, 140))]


def started(path=POCKET_DIR, num_ranks=2, dtype=torch.float32, **options):
    """Return ranks that have joined."""
    config = EngineConfig(tensor_parallel_size=num_ranks, **options)
    return start_ranks(path, config, dtype)[0]


def engine_over(ranks, capture=None, **options):
    """Return an engine over ranks that have joined."""
    return over_ranks(ranks, EngineConfig(**options), capture=capture)


def answers(engine, prompts=PROMPTS, **params):
    """Answer all prompts together; return their tokens."""
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True} | params)
    requests = [engine.add_request(str(i), ids, chosen) for i, ids in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    assert [request.error for request in requests] == [None] * len(prompts)
    return [request.output_ids for request in requests]


class Wire:
    """Ranks without processes: keeps what rank 0 sends. Its model is whole, so rank 0 alone computes all of it."""

    num_ranks = 1

    def __init__(self, model=None):
        self.model = model or load_model(POCKET_DIR)
        self.sent = []
        self.fault = ""
        self.is_closed = False

    def tell(self, message):
        self.sent.append(pickle.loads(packed(message)))  # a step may lie in buffers that the next one fills

    def tell_each(self, messages):
        assert not messages, "it is the only rank"

    def ask(self, message, num_bytes):
        self.tell(message)
        return []

    @contextmanager
    def running(self, step):
        self.tell(step)
        yield

    def close(self):
        self.is_closed = True


class Pipe:
    """One end to write to and one to read from. None is the end."""

    def __init__(self, *messages):
        self.messages = queue.SimpleQueue()
        for message in messages:
            self.send_bytes(packed(message))

    def send_bytes(self, message):
        self.messages.put(message)

    def recv_bytes(self):
        message = self.messages.get(timeout=60)
        if message is None:
            raise EOFError
        return message


def follow(messages, model):
    """Let another rank take these messages, as its pipe brings them."""
    pipe = Pipe(*messages)
    pipe.send_bytes(None)
    with pytest.raises(EOFError):
        follow_plans(model, pipe, Pipe())
    assert pipe.messages.empty()


class Sums:
    """Adds up over ranks that are threads of this process."""

    def __init__(self, num_ranks):
        self.parts = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=60)

    def of(self, rank):
        """Return the collectives of one rank."""
        return Thread(self, rank)


class Thread(TorchCollectives):
    """The collectives of one thread."""

    def __init__(self, sums, rank):
        super().__init__(rank, len(sums.parts))
        self.sums = sums

    def meet(self, x, use):
        """Bring x; return what `use` makes of the parts of all threads."""
        with self.traffic.counting(x):
            self.sums.parts[self.rank] = x.clone()
            self.sums.barrier.wait()
        made = use(self.sums.parts)
        self.sums.barrier.wait()
        return made

    def all_reduce(self, x):
        return x.copy_(self.meet(x, lambda parts: torch.stack(parts).sum(0)))

    def gather(self, x):
        """Return all threads' x to all of them: in tests each drives an engine of its own, and needs the logits."""
        return self.meet(x, lambda parts: torch.cat(parts, dim=1))


def part(path, rank, num_ranks, dtype=torch.float32):
    """Load a rank's share of a checkpoint, without its layers."""
    return reader_of(Path(path)).stored(Path(path)).load(dtype, cut=RankCut(rank, num_ranks))


def in_threads(path, num_ranks, backend, work, dtype=torch.float32):
    """Load each rank's part of a checkpoint, and call `work` with all of them at once; return their results."""
    sums, results = Sums(num_ranks), [None] * num_ranks
    parts = [with_layers(part(path, rank, num_ranks, dtype), backend, sums.of(rank)) for rank in range(num_ranks)]

    def run(rank):
        with torch.inference_mode():
            results[rank] = work(parts[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
