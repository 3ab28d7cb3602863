"""Course machinery. Checkpoints whose text model lies beside a vision tower, as transformers writes the whole class."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.shared import hybrids
from tests.support import BASE, new_folder

SHARDS = dict(max_shard_size="100KB")
IMAGES: dict[str, Any] = {  # the rest of config.json: a tiny tower, and ids in place of images
    "Qwen3_5": dict(
        vision_config=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=48),
        **dict(image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153),
    ),
    "Gemma3": dict(
        vision_config=dict(
            hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, image_size=28
        ),
        **dict(image_token_index=150, boi_token_index=151, eoi_token_index=152, mm_tokens_per_image=4),
    ),
}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TEXTS = {"Qwen3_5": hybrids.BASE, "Gemma3": BASE | NO_TOKENS}
QWEN3_5: dict[str, dict[str, Any]] = {
    "every fourth attends, shards": SHARDS,
    "every second, tied": dict(full_attention_interval=2, linear_num_key_heads=4, tie_word_embeddings=True),
    "one delta net, first, one value head a key head": dict(
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "full_attention"],
        linear_num_key_heads=4,
    ),
}
GEMMA: dict[str, dict[str, Any]] = {
    "tied, five windows, then all, shards": SHARDS
    | dict(num_hidden_layers=6, sliding_window=7, query_pre_attn_scalar=16, tie_word_embeddings=True),
    "untied, full first": dict(
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=11,
        query_pre_attn_scalar=24,
    ),
    "tied, one key head": dict(
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        num_key_value_heads=1,
        sliding_window=16,
        tie_word_embeddings=True,
    ),
}


def write(directory: Path, architecture: str, max_shard_size: str = "5GB", **text: Any) -> Path:
    """Write a random text model and its tower. text: what differs from TEXTS in `text_config`."""
    from scripts.pocket.models import start_time_steps

    import transformers

    torch.manual_seed(0)
    tied, text = text.get("tie_word_embeddings", False), TEXTS[architecture] | text
    config = getattr(transformers, f"{architecture}Config")(
        text_config=text, tie_word_embeddings=tied, **IMAGES[architecture]
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    assert type(model).__name__ == f"{architecture}ForConditionalGeneration"
    with torch.no_grad():
        start_time_steps(model)
    for name, parameter in model.named_parameters():
        if "linear_attn.norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "norm" in name:
            parameter.data.uniform_(-0.5, 0.5)  # around 0: what is added to 1
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def beside_a_tower(architecture: str, shapes: Mapping[str, Mapping[str, Any]]) -> Callable[[str], Path]:
    """Return what writes a shape's checkpoint, once per run."""

    @functools.cache
    def path_of(shape: str) -> Path:
        return write(new_folder(), architecture, **shapes[shape])

    return path_of
