"""Lesson 15. LFM3, dense: a model whose layers keep all tokens, the last ones, or a state."""

import re

from mini_engine.families.family import SHARED, Family
from mini_engine.families.lfm3_config import Lfm3Config
from mini_engine.families.lfm3_fast import lfm3_decoder
from mini_engine.families.lfm3_model import lfm3_model

NAMES = {
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.self_attn\.g_proj\.": ".self_attn.gate_proj.",
    r"\.conv\.conv\.": ".conv.filters.",
    r"(^|\.)embedding_norm\.": r"\1norm.",
}


def usual_name(stored: str) -> str:
    """Return a tensor's name in this model for its name in a checkpoint."""
    for pattern, usual in NAMES.items():
        stored = re.sub(pattern, usual, stored)
    return stored


FAMILY = Family(Lfm3Config.from_dir, lfm3_model, lfm3_decoder, shared=(*SHARED, "conv_channels"), renamed=usual_name)
