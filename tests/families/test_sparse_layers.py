"""Course machinery. Layers with experts, beside dense ones: fast layers answer as the reference does.

Protects readers of answers that no other implementation is asked for. test_batched.py compares with Hugging Face's.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.engine.engine import Engine
from mini_engine.families import family_of
from tests.families.engines import OPTIONS, ask, drain, limits_of, prompt_of
from tests.support import BASE, with_random_weights

EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
LATENTS = dict(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=24, v_head_dim=10, first_k_dense_replace=1)
LATENTS |= dict(qk_nope_head_dim=12, qk_rope_head_dim=8, n_routed_experts=8, n_group=4, topk_group=2)
STATES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen3_moe, some layers dense": EXPERTS | dict(decoder_sparse_step=2, mlp_only_layers=[2]),
    "qwen3_5_moe_text": EXPERTS | STATES | dict(full_attention_interval=2, shared_expert_intermediate_size=28),
    "deepseek_v3": LATENTS | dict(num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2),
}


def engine_of(folder: Path, shape: str, backend: str) -> Engine:
    """Return an engine over a random model of a shape that is read from config.json."""
    raw = BASE | dict(model_type=shape.split(",")[0]) | SHAPES[shape]
    path = folder / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    family = family_of(raw, path)
    model = with_random_weights(family.build(family.shape(folder)))
    return build_engine(model, backend=backend, scheduler_config=limits_of(), **OPTIONS | {"num_blocks": 40})


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_layers_answer_as_the_reference_does(tmp_path, shape):
    answers = []
    for backend in ("reference", "torch"):
        engine = engine_of(tmp_path, shape, backend)
        requests = ask(engine, [prompt_of(9), prompt_of(20)], 8)
        drain(engine)
        answers.append([request.output_ids for request in requests])
    assert answers[0] == answers[1] and all(len(answer) == 8 for answer in answers[0])
