"""Lesson 17. Codes that are multiplied as they lie in the cache: nothing is lost that bfloat16 could show."""

from pathlib import Path

import pytest

from mini_engine.attention.contract import Batch
from mini_engine.quantized import cpu
from mini_engine.quantized.formats import FORMATS
from tests.kernels.cases import int32
from tests.shared.compiled import needs_compiler
from tests.support import some

FLAGS = Path("/proc/cpuinfo")
HAS_BYTE_PRODUCTS = FLAGS.is_file() and "avx512_vnni" in FLAGS.read_text(encoding="utf-8")
pytestmark = [
    pytest.mark.reference,  # no task is about this
    needs_compiler,
    pytest.mark.skipif(not HAS_BYTE_PRODUCTS, reason="this processor does not multiply bytes: C++ widens each code"),
]


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0], ids=["flat weights", "some large weights", "few large weights"])
@pytest.mark.parametrize("rows", FORMATS)
@pytest.mark.parametrize("heads", [2, 10], ids=["few rows", "many rows"])
def test_query_and_weights_keep_16_bits(rows, heads, spread):
    """float32 gives the same answers in bfloat16, but for a few that lie between two. With 8 bits many would differ."""
    k, v = some(40, 16, 2, 128, seed=1), some(40, 16, 2, 128, seed=2)
    k[..., ::7] *= 8  # large numbers beside small ones
    caches = [FORMATS[rows].pack(x) for x in (k, v)]
    batch = Batch(int32([0, 1]), int32([620]), int32([range(40)]))
    q = (spread * some(1, heads, 128, seed=3)).bfloat16()
    fast, exact = (cpu.paged_attention(x, *caches, batch, 0.1, rows=rows) for x in (q, q.float()))
    same = (fast == exact.bfloat16()).float().mean()
    assert same > 0.9, f"{100 * same:.0f} % of the numbers are those that float32 gives, rounded"
