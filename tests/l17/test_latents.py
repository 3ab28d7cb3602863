"""Lesson 17. Lesson 16's latents as rows: expanded, in pools, in records. `tests/families` has whole engines."""

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.latents.reading import expanded_attention
from mini_engine.quantized.formats import INT4, INT8
from mini_engine.quantized.pool import RowKvPool, bytes_per_token
from mini_engine.tiers.blocks import BlockBytes
from tests.shared.latents import BLOCK, model
from tests.shared.small_latents import HEADS, NOPE, RANK, ROPE, V, attention, close, config_of, pool_of, randoms

pytestmark = pytest.mark.reference  # no task is about this

EACH_FORMAT = pytest.mark.parametrize("rows", [INT8, INT4], ids=lambda rows: rows.name)
# ---------------------------------------------------------------- expanded, pools, records


@EACH_FORMAT
def test_rows_are_widened_and_rotated_back_before_they_are_expanded(rows):
    pool = pool_of([(5, 9)], pack=lambda x, dim, dtype: rows.write(x.nan_to_num()))
    q, kv_b = randoms((5, HEADS, NOPE + ROPE), (HEADS, NOPE + V, RANK), seed=4)
    config, widen = config_of(), load_kernel("reference", rows=rows.name, latents=True).widen
    out = expanded_attention(q, (pool.c_cache, pool.r_cache), pool.table[0], 9, kv_b, config, widen)
    c, r = (rows.read(rows.write(x), x.shape[1], torch.float32) for x in pool.histories[0])
    close(out, attention(q, c, r, kv_b, config.attention_scale), "of rows, the vectors that they stand for")


@EACH_FORMAT
def test_a_pool_has_a_row_for_each_latent_and_each_rotary_key(rows):
    config = model().config
    pool = RowKvPool(rows, config, 5, BLOCK, load_kernel("reference", rows=rows.name, latents=True))
    widths = [rows.row_bytes(24), rows.row_bytes(8)]
    assert [x.shape[3] for x in (pool.K[0], pool.V[0])] == widths == {"int8": [28, 12], "int4": [16, 8]}[rows.name]
    assert pool.bytes == 5 * BLOCK * bytes_per_token(config, rows) == 5 * BLOCK * 3 * sum(widths)
    c, r = (torch.randn(3, 1, dim, generator=torch.Generator().manual_seed(dim)) for dim in (24, 8))
    pool.set_kv(1, torch.tensor([9, 4, 18]), c, r)
    for layers, x in ((pool.K, c), (pool.V, r)):
        assert torch.equal(layers[1].flatten(0, 1)[[9, 4, 18]], rows.write(x))
    with pytest.raises(ValueError):
        pool.set_kv(0, torch.tensor([5, 6, 7]), r, c)
    assert BlockBytes(*pool.parts).payload_bytes * 5 == pool.bytes, "a record is a block of rows"
