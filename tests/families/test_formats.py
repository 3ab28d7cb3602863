"""Course machinery. Conformance: how near to full precision the answers of int8 and int4 are."""

from mini_engine.quantized.formats import FORMATS
from tests.families.engines import behind, engine_of, pools_of, prompts_of, right
from tests.families.rows import ROUNDED, parametrized, some

BEHIND = {"int8": 0.05, "int4": 1.0}  # what `behind` may find, in nats


@parametrized(some(ROUNDED))
def test_full_precision_finds_their_tokens_nearly_as_likely(model):
    found = behind(model, [(prompt, right(model, prompt)) for prompt in prompts_of(model)])
    assert found < BEHIND[model.kv_dtype], f"{found:.3f} nats behind"


@parametrized(some(ROUNDED))
def test_the_pool_holds_rows(model):
    pool, _ = pools_of(engine_of(model, num_blocks=20))
    assert pool.rows == FORMATS[model.kv_dtype] and pool.K[0].dtype.itemsize == 1, "bytes in place of numbers"
