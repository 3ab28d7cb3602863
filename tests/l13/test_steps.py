"""Lesson 13. The same steps in every rank, without processes: what rank 0 sends is all that the others need."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.parallel.build import SharedRunner, parallel_engine
from mini_engine.parallel.follow import follow_plans
from mini_engine.parallel.messages import Copy, PoolSize, packed
from mini_engine.pocket import POCKET_DIR
from mini_engine.weights import load_model

OPTIONS = {"num_blocks": 40, "block_size": 8}
PROMPTS = [[5, 9, 11, 30] * 4, [7], [5, 9, 11, 30] * 3 + [8]]


@cache
def pocket():
    return load_model(POCKET_DIR)


class Wire:
    """Ranks without processes: keeps what rank 0 sends. Its model is whole, so rank 0 alone computes all of it."""

    def __init__(self, model=None):
        self.model = model or pocket()
        self.config = self.model.config
        self.sent = []
        self.fault = ""

    def send(self, message):
        self.sent.append(message)

    def in_step(self):
        return nullcontext()


def answers(engine, **params):
    """Answer all prompts together; return their tokens."""
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True} | params)
    requests = [engine.add_request(str(i), ids, chosen) for i, ids in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.output_ids for request in requests]


class Pipe:
    """What another rank reads: messages as bytes, then the end."""

    def __init__(self, messages):
        self.left = [packed(message) for message in messages]

    def recv_bytes(self):
        if not self.left:
            raise EOFError
        return self.left.pop(0)


def follow(messages, model):
    """Let another rank take these messages, as its pipe brings them."""
    pipe = Pipe(messages)
    with pytest.raises(EOFError):
        follow_plans(model, model.config, pipe)
    assert not pipe.left


class Noting:
    """A model that notes what it is fed, and the pool that it writes to."""

    def __init__(self):
        self.model, self.config = pocket(), pocket().config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.fed, self.pools, self.modes = [], [], set()

    def __call__(self, token_ids, pool, meta, rows):
        self.fed.append(token_ids.tolist())
        self.modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        return self.model(token_ids, pool, meta, rows=rows)


def test_rank_0_gives_the_tokens_of_one_process():
    wire = Wire()
    assert answers(parallel_engine(wire, **OPTIONS)) == answers(Engine.for_model(pocket(), **OPTIONS))


def test_each_step_is_sent_once_and_before_rank_0_runs_it():
    order, model = [], Noting()

    class Told(Wire):
        def send(self, message):
            super().send(message)
            order.append("sent")

    class Ordered(Noting):
        def __call__(self, token_ids, *args, **more):
            order.append("run")
            return super().__call__(token_ids, *args, **more)

    wire = Told()
    engine = parallel_engine(wire, **OPTIONS)
    assert isinstance(wire.sent[0], PoolSize) and isinstance(engine.runner, SharedRunner)
    order.clear()
    engine.runner.model = model = Ordered()
    answers(engine)
    assert order == ["sent", "run"] * len(model.fed), "the others wait in receive, and rank 0 in its first all-reduce"
    assert [step.token_ids.tolist() for step in wire.sent[1:]] == model.fed


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 1.5, "seed": 3}])
def test_another_rank_feeds_what_rank_0_chose(params):
    wire, other = Wire(), Noting()
    engine = parallel_engine(wire, **OPTIONS)
    answers(engine, **params)
    follow(wire.sent, other)
    assert other.fed == [step.token_ids.tolist() for step in wire.sent[1:]], (
        "a rank that chooses for itself feeds other tokens, and adds up parts of two different texts"
    )
    slots = torch.cat([step.meta.slot_mapping for step in wire.sent[1:]])
    for mine, theirs in zip(engine.runner.pool.K, other.pools[0].K, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots])


def test_another_rank_makes_the_pool_that_it_is_told():
    wire, other = Wire(), Noting()
    for num_blocks in (40, 20):
        answers(parallel_engine(wire, num_blocks=num_blocks, block_size=8))
    follow(wire.sent, other)
    assert [pool.K[0].shape[0] for pool in other.pools] == [40, 20], "a new size means a new, empty pool"


def test_a_step_of_a_new_size_is_not_traced():
    wire, first, other = Wire(), Noting(), Noting()
    engine = parallel_engine(wire, **OPTIONS)
    engine.runner.model = first
    with torch.inference_mode():  # as in the server's thread
        answers(engine)
        follow(wire.sent, other)
    assert first.modes == other.modes == {(False, False)}, (
        "no gradients, and no inference_mode: with it, DTensor works out how to share `linear` at each new shape"
    )


def test_another_rank_copies_what_rank_0_copies():
    wire, other = Wire(), Noting()
    engine = parallel_engine(wire, **OPTIONS)
    answers(engine)
    steps = len(wire.sent)
    engine.runner.pool.copy_blocks([1], [39])
    assert wire.sent[steps:] == [Copy([1], [39])]
    follow(wire.sent, other)
    torch.testing.assert_close(other.pools[0].K[0][39], engine.runner.pool.K[0][1])


def test_another_rank_ends_when_rank_0_does():
    follow([], Noting())
