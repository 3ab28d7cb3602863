"""Lesson 18. Windows over ranks: each has its heads of every group."""

import pytest

from mini_engine.distributed.tensor_parallel.messages import PoolSize
from tests.l15.pocket import directory
from tests.l18.ranks import Wire, engine_over, part

pytestmark = pytest.mark.reference
OPTIONS = {"num_blocks": 200, "block_size": 8, "backend": "reference", "kernel": "torch"}


def test_the_other_ranks_make_a_pool_of_one_group_s_layers():
    wire = Wire(part(directory(), 0, 2))
    pool = engine_over(wire, **OPTIONS).runner.pool
    [size] = [message for message in wire.sent if isinstance(message, PoolSize)]
    assert size.maker.config.num_hidden_layers == len(pool.K) == 2, "two full layers: blocks of two layers"
    assert size.maker.config.k_shape[0] == pool.K[0].shape[2] == 1, "and of a rank's share of the heads"
