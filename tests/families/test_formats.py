"""Course machinery. Conformance: how near to full precision the answers of int8 and int4 are."""

import torch

from mini_engine.quantized.formats import FORMATS
from tests.families.engines import engine_of, hf_logits, pools_of, prompts_of, right
from tests.families.rows import ROUNDED, parametrized, some

BEHIND = {"int8": 0.05, "int4": 1.0}  # how much less likely than its own choices full precision may find them, in nats


@parametrized(some(ROUNDED))
def test_full_precision_finds_their_tokens_nearly_as_likely(model):
    prompts = prompts_of(model)
    answers = [right(model, prompt) for prompt in prompts]
    behind = []
    for prompt, answer, logits in zip(
        prompts, answers, hf_logits(model, [[*p, *a] for p, a in zip(prompts, answers, strict=True)]), strict=True
    ):
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        behind.append(rows.amax(1) - rows.gather(1, torch.tensor(answer)[:, None])[:, 0])
    found = torch.cat(behind).mean().item()
    assert found < BEHIND[model.kv_dtype], f"{found:.3f} nats behind"


@parametrized(some(ROUNDED))
def test_the_pool_holds_rows(model):
    pool, _ = pools_of(engine_of(model, num_blocks=20))
    assert pool.rows == FORMATS[model.kv_dtype] and pool.K[0].dtype.itemsize == 1, "bytes in place of numbers"
