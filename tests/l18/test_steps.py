"""Lesson 18. The same steps in every rank, without processes: what rank 0 sends is all that the others need."""

from functools import cache

import pytest
import torch

from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.distributed.tensor_parallel.messages import Call, PoolSize
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.families.qwen3_5 import FAMILY as QWEN3_5
from mini_engine.pocket import POCKET_DIR
from tests.l18.ranks import Wire, answers, engine_over, follow, part

OPTIONS = {"num_blocks": 40, "block_size": 8}


@cache
def pocket():
    return load_model(POCKET_DIR)


class Noting:
    """A model that notes what it is fed, and the pool that it writes to."""

    def __init__(self, model=None):
        self.model = model or pocket()
        self.config = self.model.config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.fed, self.pools = [], []

    def __call__(self, token_ids, pool, meta, rows):
        self.fed.append(token_ids.tolist())
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        return self.model(token_ids, pool, meta, rows=rows)


def test_the_memory_of_a_rank_holds_its_share_of_more_tokens():
    """`kv_bytes` is each rank's: with half of the key heads, a pool of the same bytes has twice the blocks."""
    budget, half = 2**20, part(POCKET_DIR, 0, 2)
    block_bytes = 8 * half.config.kv_bytes_per_token(torch.float32)
    assert 2 * block_bytes == 8 * pocket().config.kv_bytes_per_token(torch.float32)
    wire = Wire(half)
    pool = engine_over(wire, kv_bytes=budget, block_size=8).runner.pool
    assert pool.bytes <= budget, f"a pool of {pool.bytes} bytes, and {budget} were given"
    assert pool.bytes > budget - block_bytes, (
        f"only {pool.bytes} of {budget} bytes: were the heads of all ranks counted?"
    )
    (size,) = wire.sent
    assert size[1:] == (budget // block_bytes, 8, "auto"), "the other ranks make a pool of the same size"
    assert size.maker.config.k_shape == half.config.k_shape, "for as many heads"


def test_each_step_is_sent_once_and_before_rank_0_runs_it():
    order, model = [], Noting()

    class Told(Wire):
        def tell(self, message):
            super().tell(message)
            order.append("sent")

    class Ordered(Noting):
        def __call__(self, token_ids, *args, **more):
            order.append("run")
            return super().__call__(token_ids, *args, **more)

    wire = Told()
    engine = engine_over(wire, **OPTIONS)
    assert isinstance(wire.sent[0], PoolSize) and engine.runner.group is wire
    order.clear()
    engine.runner.model = model = Ordered()
    answers(engine)
    assert order == ["sent", "run"] * len(model.fed), "the others wait in receive, and rank 0 in its first all-reduce"
    assert [step.token_ids.tolist() for step in wire.sent[1:]] == model.fed


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 1.5, "seed": 3}])
def test_another_rank_feeds_what_rank_0_chose(params):
    wire, other = Wire(), Noting()
    engine = engine_over(wire, **OPTIONS)
    answers(engine, **params)
    follow(wire.sent, other)
    assert other.fed == [step.token_ids.tolist() for step in wire.sent[1:]], (
        "a rank that chooses for itself feeds other tokens, and adds up parts of two different texts"
    )
    slots = torch.cat([step.meta.slot_mapping for step in wire.sent[1:]])
    for mine, theirs in zip(engine.runner.pool.K, other.pools[0].K, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_another_rank_makes_the_pool_that_it_is_told(kv_dtype):
    wire, other = Wire(), Noting()
    own = []
    for num_blocks in (40, 20):
        engine = engine_over(wire, num_blocks=num_blocks, block_size=8, kv_dtype=kv_dtype)
        answers(engine)
        own.append(engine.runner.pool)
    follow(wire.sent, other)
    for theirs, ours in zip(other.pools, own, strict=True):
        assert type(theirs) is type(ours) and getattr(theirs, "rows", None) == getattr(ours, "rows", None)
        assert (theirs.K[0].shape, theirs.K[0].dtype) == (ours.K[0].shape, ours.K[0].dtype), "a new size, a new pool"


def test_another_rank_copies_what_rank_0_copies():
    wire, other = Wire(), Noting()
    engine = engine_over(wire, **OPTIONS)
    answers(engine)
    steps = len(wire.sent)
    engine.scheduler.manager.coordinator.copy([1], [39])
    assert wire.sent[steps:] == [Call("kv", "copy_blocks", ([1], [39]))], "the others are told which blocks to copy"
    follow(wire.sent, other)
    block = engine.runner.pool.K[0][1]
    assert torch.equal(engine.runner.pool.K[0][39], block), "rank 0 copies its own part of the block, too"
    torch.testing.assert_close(other.pools[0].K[0][39], block)


def test_the_runner_tells_of_its_ranks_and_ends_them():
    runner = engine_over(wire := Wire(), **OPTIONS).runner
    assert not runner.fault, "all ranks are there"
    wire.fault = "rank 1 has ended"
    assert runner.fault == wire.fault, "the engine says which rank is gone"
    runner.close()
    assert wire.is_closed, "the other ranks end with the engine"


@cache
def hybrid():
    return QWEN3_5.load(shipped_checkpoint("pocket-hybrid"))


@pytest.mark.parametrize(
    "options", [{}, {"scheduler_config": SchedulerConfig(chunked_prefill_size=5)}], ids=["whole", "chunks"]
)
def test_another_rank_has_the_states_of_rank_0(options):
    wire, other = Wire(hybrid()), Noting(hybrid())
    engine = engine_over(wire, max_track_slots=2, checkpoint_interval=8, **OPTIONS | options)
    first = answers(engine)
    assert answers(engine) == first, "the second time states are copied from checkpoints"
    follow(wire.sent, other)
    check_states(engine, other.pools[0])


def check_states(engine, other):
    """Check that the pool of another rank holds what rank 0's does, in each slot but the padding's."""
    mine, theirs = engine.runner.pool.states, other.states
    for ours, others in ((mine.recurrent_state, theirs.recurrent_state), (mine.conv_state, theirs.conv_state)):
        assert torch.allclose(ours[:, 1:], others[:, 1:], atol=1e-4), "states are copied in every rank, and reset"
