"""Lesson 18. Latents over ranks: each has its heads and all latents, and a record has one copy of them."""

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch

from mini_engine.assembly.build import over_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.messages import Memory, PoolSize, ReadBlocks, WriteBlocks
from mini_engine.distributed.tensor_parallel.pools import SharedPools
from mini_engine.distributed.tensor_parallel.shard import share_of, shared_by
from mini_engine.engine.runner import Step
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.latents.store import LatentKv
from mini_engine.quantized.formats import INT8
from mini_engine.quantized.pool import RowKvPool
from mini_engine.tiers.blocks import BlockBytes
from tests.l16.models import (
    FAMILIES,
    FOUND,
    answered,
    checkpoint,
    latents,
    load,
    model,
)
from tests.l18.ranks import Wire, engine_over, follow, in_threads, part
from tests.l18.test_steps import Noting
from tests.support import must_raise, refused, some_ids

pytestmark = pytest.mark.reference
OPTIONS = {"num_blocks": 200, "block_size": 8, "backend": "reference", "kernel": "torch"}
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}
BLOCKS = [3, 1]


class NotingLatents(Noting):
    """As Noting, with a random model of latents."""

    def __init__(self):
        super().__init__()
        self.model = model()
        self.config = self.model.config


class Others(Wire):
    """Other ranks in this process: each message is carried out by their memories."""

    def __init__(self, own, memories):
        super().__init__(own)
        self.num_ranks, self.memories = 1 + len(memories), memories

    def tell(self, message):
        super().tell(message)
        for memory in self.memories:
            message.carry_out(memory)

    def tell_each(self, messages):
        raise AssertionError("there is nothing to divide: each rank gets the same")

    def ask(self, message, num_bytes):
        raise AssertionError("there is nothing to ask for: rank 0 has all of it")


def with_tiers(ranks, **options):
    """Return an engine over ranks with tiers, which know the model by its whole weights."""
    config = EngineConfig(**OPTIONS | TIERS | options)
    return over_ranks(ranks, config, identity_of(model(), config))


# ---------------------------------------------------------------- a block's bytes


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", [KvPool, partial(RowKvPool, INT8)], ids=["auto", "int8"])
def test_a_record_has_the_same_bytes_whatever_the_number_of_ranks(kind, num_ranks):
    memories = [Memory(part(checkpoint(), rank, num_ranks)) for rank in range(num_ranks)]
    for memory in memories:
        memory.pools["kv"] = kind(memory.model.config, 5, 4, load_kernel("torch", latents=True))
        for tensor in BlockBytes(*memory.pools["kv"].parts).tensors:
            tensor.zero_()
    alone = kind(model().config, 5, 4, load_kernel("torch", latents=True))
    for tensor in (*alone.K, *alone.V):
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=torch.Generator().manual_seed(tensor.shape[-1])))
    expected = BlockBytes(*alone.parts)
    blocks = SharedPools(Others(memories[0].model, memories[1:])).block_bytes(memories[0].pools["kv"])
    assert blocks.payload_bytes == expected.payload_bytes
    blocks.write(BLOCKS, expected.read([2, 4]))
    for rank, memory in enumerate(memories):
        for found, wanted in zip(chain(*memory.pools["kv"].parts), (*alone.K, *alone.V), strict=True):
            assert torch.equal(found[BLOCKS], wanted[[2, 4]]), f"rank {rank} attends over all latents, so it needs them"
            assert not found[[0, 2, 4]].any()
    assert list(map(bytes, blocks.read(BLOCKS))) == list(map(bytes, expected.read([2, 4])))
    before = [tensor.clone() for memory in memories for tensor in memory.pools["kv"].K]
    with must_raise(ValueError, "a payload has one size"):
        blocks.write(BLOCKS, [bytes(blocks.payload_bytes * num_ranks)] * 2)
    assert all(map(torch.equal, [tensor for memory in memories for tensor in memory.pools["kv"].K], before))


def test_tiers_over_ranks_ask_no_other_rank_and_tell_all():
    wire, other = Wire(model()), NotingLatents()
    engine = with_tiers(wire)
    answered(engine, "cold")
    engine.scheduler.manager.coordinator.clear()
    assert answered(engine, "from the host") == FOUND
    written = [message for message in wire.sent if isinstance(message, WriteBlocks)]
    assert written and not any(isinstance(message, ReadBlocks) for message in wire.sent)
    follow(wire.sent, other)
    slots = torch.cat([message.meta.slot_mapping for message in wire.sent if isinstance(message, Step)]).unique()
    for mine, theirs in zip(engine.runner.pool.K, other.pools[0].K, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots])


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_has_its_heads_and_everything_that_makes_latents(num_ranks):
    whole, config = model(), share_of(model().config, num_ranks, shared_by(model().config))
    assert config.num_attention_heads == 4 // num_ranks and config.k_shape == (1, 24) and config.v_shape == (1, 8)
    for rank in range(num_ranks):
        own = dict(part(checkpoint(), rank, num_ranks).named_parameters())
        for name, weight in whole.named_parameters():
            cut = {"q_b_proj": 0, "kv_b_proj": 0, "gate_proj": 0, "up_proj": 0, "embed_tokens": 0, "lm_head": 0}
            cut |= {"o_proj": 1, "down_proj": 1}
            dim = next((dim for part, dim in cut.items() if part in name), None)
            expected = weight if dim is None else weight.chunk(num_ranks, dim)[rank]
            assert torch.equal(own[name], expected), f"{name} of rank {rank}"


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_add_up_to_the_whole_model_and_store_the_same_latents(family, backend):
    ids = torch.tensor(some_ids(20, 160))

    def run(model):
        pool = KvPool(model.config, 6, 4, load_kernel("torch", latents=True))
        store = LatentKv(model.config, pool)
        slots, table = torch.arange(4, 24), torch.arange(1, 6)[None].int()
        meta = ForwardMeta(torch.arange(20), slots, torch.tensor([0, 20]).int(), torch.tensor([20]).int(), table, 4)
        return model(ids, store, meta), [layer[1:].clone() for layer in (*pool.K, *pool.V)]

    expected, latents_of = run(load(family))
    results: Any = in_threads(checkpoint(family), 2, backend, run)
    (first, own), (second, theirs) = results
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(first, second) and all(map(torch.equal, own, theirs)), "bit for bit, or records would differ"
    torch.testing.assert_close(own, latents_of, atol=1e-4, rtol=1e-4)


def test_the_numbers_of_ranks_that_heads_allow():
    with refused(UserError, "3 num_attention_heads 4 1, 2, 4"):
        share_of(model().config, 3, shared_by(model().config))


def test_a_rank_s_memory_holds_no_more_tokens_than_that_of_one_process():
    """With key heads to share, a pool of the same bytes has as many times the blocks as there are ranks."""
    wire = Wire(part(checkpoint(), 0, 2))
    pool = engine_over(wire, kv_bytes=2**20, block_size=8, kernel="torch", backend="reference").runner.pool
    assert pool.num_blocks == latents(num_blocks=None, kv_bytes=2**20).runner.pool.num_blocks
    [size] = [message for message in wire.sent if isinstance(message, PoolSize)]
    assert size.num_blocks == pool.num_blocks and pool.K[0].shape[2] == 1, "latents have no heads to share"
