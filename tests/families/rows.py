"""Course machinery. The rows of the conformance suite: each family's tiny random checkpoints.

Adding a family is one more Row, and no test file: its name, how transformers writes it, what chunks should straddle.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mini_engine.model.kinds import FULL
from tests.families import towers
from tests.families.towers import beside_a_tower
from tests.shared import hybrids, latents, lfm3, windows
from tests.support import FAMILIES, new_folder, write_checkpoint

BLOCK = 8  # tokens in a block, and
INTERVAL = 16  # between two checkpoints of states, in the engines of all tests


@dataclass(frozen=True)
class Row:
    """A family.

    shapes: names of its checkpoints. The first runs in every test, the others only in some, and at night in all.
    path_of: returns a shape's checkpoint.
    straddle: the tokens that chunks and prompts should straddle, for all shapes or for each: the window, what lies
        between two checkpoints of a state, or a block.
    is_kin: its layers are those of another row, so CI only runs all of its shapes together, and each kind of layers.
    """

    name: str
    shapes: Iterable[str]
    path_of: Callable[[str], Path]
    straddle: int | Callable[[str], int] = BLOCK
    is_kin: bool = False


@dataclass(frozen=True)
class Model:
    """One checkpoint of a family, and how its K and V are stored: `kv_dtype` is an engine's option."""

    family: str
    shape: str
    row: Row = field(compare=False, repr=False)
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        return ", ".join([self.family, self.shape, *([] if self.is_exact else [self.kv_dtype])])

    @property
    def is_exact(self) -> bool:
        """True if its tokens must be Hugging Face's."""
        return self.kv_dtype == "auto"

    @property
    def path(self) -> Path:
        return self.row.path_of(self.shape)

    @property
    def straddle(self) -> int:
        found = self.row.straddle
        return found(self.shape) if callable(found) else found


def written_as(
    architecture: str, shapes: Mapping[str, Mapping[str, Any]], write: Callable[..., Path] = write_checkpoint
) -> Callable[[str], Path]:
    """Return what writes a shape's checkpoint, once per run. shapes: what differs from `tests.support.BASE` in each.

    architecture: of transformers, such as "Qwen3". write: another function for a model that needs its own weights.
    """

    @functools.cache
    def path_of(shape: str) -> Path:
        return write(new_folder(), architecture=architecture, **shapes[shape])

    return path_of


def window_of(shape: str) -> int:
    """Return the window of one of lesson 15's random Qwen3s."""
    return windows.FAMILIES[shape]


QWEN3 = {
    "two, tied, wide heads": FAMILIES["two, tied, wide heads"],
    "131 tokens": dict(vocab_size=131, num_key_value_heads=4),  # a prime: two ranks cannot share them evenly
    "131 tokens, tied": dict(vocab_size=131, num_key_value_heads=4, tie_word_embeddings=True),
    **FAMILIES,
}
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32, rope_theta=5e5)
LLAMA: dict[str, dict[str, Any]] = {
    "two queries a key head": {},
    "Llama 3's angles, biases, tied": dict(rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=True),
    "one key head, heads from the hidden size": dict(num_key_value_heads=1, head_dim=None),
}
QWEN2: dict[str, dict[str, Any]] = {
    "two queries a key head": {},
    "windows from the second layer on, tied": dict(
        use_sliding_window=True, sliding_window=7, max_window_layers=1, tie_word_embeddings=True
    ),
    "one key head": dict(num_key_value_heads=1),
}
MISTRAL: dict[str, dict[str, Any]] = {
    "windows in all layers": dict(sliding_window=9),
    "no windows, tied": dict(sliding_window=None, tie_word_embeddings=True),
    "narrow windows, wide heads": dict(sliding_window=2, head_dim=40),
}
STRETCHED = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
GEMMA: dict[str, dict[str, Any]] = {
    "five windows, then all": dict(
        num_hidden_layers=6, sliding_window=7, query_pre_attn_scalar=16, tie_word_embeddings=True
    ),
    "untied, full first, other scale and angles": dict(
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": STRETCHED,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        sliding_window=11,
        query_pre_attn_scalar=24,
    ),
    "one key head": dict(
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        num_key_value_heads=1,
        sliding_window=16,
    ),
}
LATENTS: dict[str, Any] = dict(num_key_value_heads=4, head_dim=8, q_lora_rank=20, kv_lora_rank=24, v_head_dim=10)
LATENTS |= dict(qk_nope_head_dim=12, qk_rope_head_dim=8, bos_token_id=None, eos_token_id=None)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64)
SHARDS = dict(shard_size="100KB")
YOUTU: dict[str, dict[str, Any]] = {
    "pairs of neighbours, tied": LATENTS | dict(tie_word_embeddings=True),
    "no latent of queries, pairs of halves, shards": LATENTS | SHARDS | dict(q_lora_rank=None, rope_interleave=False),
    "yarn, biases, tied, shards": LATENTS
    | SHARDS
    | dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.2), attention_bias=True, tie_word_embeddings=True),
}
DENSE = LATENTS | dict(first_k_dense_replace=3)
DEEPSEEK_V2: dict[str, dict[str, Any]] = {
    "Lite: no latent of queries, yarn": DENSE
    | dict(q_lora_rank=None, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
    "tied, shards": DENSE | SHARDS | dict(tie_word_embeddings=True),
    "yarn without mscale, biases, wide values": DENSE
    | dict(rope_parameters=YARN, attention_bias=True, v_head_dim=30, rms_norm_eps=1e-5),
}
SPARSE = LATENTS | dict(first_k_dense_replace=1, moe_intermediate_size=20, num_experts_per_tok=2)
DEEPSEEK_V2_MOE: dict[str, dict[str, Any]] = {
    "Lite: 2 of 6, yarn": SPARSE
    | dict(n_routed_experts=6, q_lora_rank=None, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
    "3 of the best 2 groups of 2, tied, shards": SPARSE
    | SHARDS
    | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, n_routed_experts=8, num_experts_per_tok=3)
    | dict(routed_scaling_factor=4.0, tie_word_embeddings=True),
    "1 of 4 in every layer, a single shared expert": SPARSE
    | dict(n_routed_experts=4, num_experts_per_tok=1, n_shared_experts=1, first_k_dense_replace=0, n_group=2),
}
DEEPSEEK_V3_MOE: dict[str, dict[str, Any]] = {
    "2 of the best group of 4": SPARSE | dict(n_routed_experts=8, n_group=2, topk_group=1),
    "3 of the best 2 groups of 3, weights as they are, tied, shards": SPARSE
    | SHARDS
    | dict(n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=3, norm_topk_prob=False)
    | dict(q_lora_rank=None, tie_word_embeddings=True, n_shared_experts=2),
    "1 of 6 in one group, yarn, the last layer alone": SPARSE
    | dict(n_routed_experts=6, n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=2)
    | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0), rope_interleave=False),
}

QWEN3_MOE: dict[str, dict[str, Any]] = {
    "every layer, 2 of 6": dict(num_experts=6, norm_topk_prob=True),
    "tied, every second layer, all but one of 4, weights as they are": dict(
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        num_hidden_layers=4,
        tie_word_embeddings=True,
    ),
    "the last layer is dense, 1 of 16, with windows": dict(
        num_experts=16,
        num_experts_per_tok=1,
        mlp_only_layers=[2],
        norm_topk_prob=False,
        use_sliding_window=True,
        sliding_window=9,
    ),
}
QWEN3_MOE = {name: dict(num_experts_per_tok=2, moe_intermediate_size=20) | shape for name, shape in QWEN3_MOE.items()}

QWEN3_5_MOE: dict[str, dict[str, Any]] = {
    "2 of 6": dict(num_experts=6, num_experts_per_tok=2),
    "tied, 1 of 4, a wide shared expert": dict(
        num_experts=4,
        num_experts_per_tok=1,
        shared_expert_intermediate_size=72,
        full_attention_interval=2,
        tie_word_embeddings=True,
    ),
    "all of 4, one delta net": dict(
        num_experts=4, num_experts_per_tok=4, num_hidden_layers=3, layer_types=["linear_attention", *[FULL] * 2]
    ),
}
QWEN3_5_MOE = {
    name: dict(moe_intermediate_size=20, shared_expert_intermediate_size=28) | shape
    for name, shape in QWEN3_5_MOE.items()
}


def slides(shapes: Mapping[str, Mapping[str, Any]]) -> Callable[[str], int]:
    """Return what looks up a shape's window; without one, a block counts."""
    return lambda shape: shapes[shape].get("sliding_window") or BLOCK


ROWS = (
    Row("Qwen3", QWEN3, written_as("Qwen3", QWEN3)),
    Row("Qwen3.5", hybrids.FAMILIES, hybrids.checkpoint, INTERVAL),
    Row("Qwen3 with windows", windows.FAMILIES, lambda shape: windows.checkpoint(shape, window_of(shape)), window_of),
    Row("LFM3", lfm3.SHAPES, lfm3.checkpoint, lambda shape: lfm3.SHAPES[shape][1]),
    Row("DeepSeek-V3", latents.FAMILIES, latents.checkpoint),
    Row("Llama", LLAMA, written_as("Llama", LLAMA), is_kin=True),
    Row("Qwen2.5", QWEN2, written_as("Qwen2", QWEN2), slides(QWEN2), is_kin=True),
    Row("Mistral", MISTRAL, written_as("Mistral", MISTRAL), slides(MISTRAL), is_kin=True),
    Row("Qwen3 with experts", QWEN3_MOE, written_as("Qwen3Moe", QWEN3_MOE), slides(QWEN3_MOE)),
    Row(
        "Qwen3.5 with experts", QWEN3_5_MOE, written_as("Qwen3_5Moe", QWEN3_5_MOE, hybrids.write_hybrid), INTERVAL, True
    ),
    Row("Youtu", YOUTU, written_as("Youtu", YOUTU), is_kin=True),
    Row("DeepSeek-V2", DEEPSEEK_V2, written_as("DeepseekV2", DEEPSEEK_V2), is_kin=True),
    Row("DeepSeek-V2 with experts", DEEPSEEK_V2_MOE, written_as("DeepseekV2", DEEPSEEK_V2_MOE), is_kin=True),
    Row("DeepSeek-V3 with experts", DEEPSEEK_V3_MOE, written_as("DeepseekV3", DEEPSEEK_V3_MOE), is_kin=True),
    Row("Gemma 3", GEMMA, written_as("Gemma3Text", GEMMA), slides(GEMMA), is_kin=True),
    Row("Gemma 3 beside a tower", towers.GEMMA, beside_a_tower("Gemma3", towers.GEMMA), slides(towers.GEMMA), True),
    Row("Qwen3.5 beside a tower", towers.QWEN3_5, beside_a_tower("Qwen3_5", towers.QWEN3_5), INTERVAL, True),
)
FORMATS = ("int8", "int4")  # lesson 17's
MODELS = [[Model(row.name, shape, row) for shape in row.shapes] for row in ROWS]
FIRST = [models[0] for models in MODELS if not models[0].row.is_kin]
OTHERS = [model for models in MODELS for model in models if model not in FIRST]
KIN = [model for model in OTHERS if model.row.is_kin]
FIRST_KIN = [models[0] for models in MODELS if models[0] in KIN and "tower" not in models[0].family]  # loaded otherwise
ROUNDED = [Model(model.family, model.shape, model.row, kv_dtype) for model in FIRST for kv_dtype in FORMATS]


def some(models: Iterable[Model], *marks: Any) -> list[Any]:
    """Return parameters of these models, with marks."""
    return [pytest.param(model, id=str(model), marks=marks) for model in models]


def parametrized(*params: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [param for group in params for param in group])


nightly = pytest.mark.nightly
SECOND = [models[1] for models in MODELS if models[0] in FIRST]
INT4 = [model for model in ROUNDED if model.kv_dtype == "int4"]  # the coarsest rows, over the same paths as int8's
each_family = parametrized(some(FIRST), some([*OTHERS, *ROUNDED], nightly))
each_kind = parametrized(some(FIRST), some(OTHERS, nightly))  # kin share what makes a path another one
each_exact = parametrized(some([*FIRST, *FIRST_KIN]), some((one for one in OTHERS if one not in FIRST_KIN), nightly))
each_shape = parametrized(
    some([*FIRST, *SECOND, *KIN]), some((one for one in OTHERS if one not in [*SECOND, *KIN]), nightly)
)
each_format = parametrized(
    some([*FIRST, *INT4]), some((one for one in [*OTHERS, *ROUNDED] if one not in INT4), nightly)
)
