"""Lesson 11. Qwen3.5, dense: a hybrid of delta nets and attention. Of a model with a vision tower, the text part."""

from mini_engine.checkpoint.names import text_name
from mini_engine.families.family import SHARED, Family
from mini_engine.hybrid.fast import hybrid_decoder
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.model import hybrid_model

NOT_OF_THE_TEXT = ("mtp.", "model.visual.", "visual.")  # prediction heads and the vision tower


FAMILY = Family(
    HybridConfig.from_dir,
    hybrid_model,
    hybrid_decoder,
    shared=(*SHARED, "linear_num_key_heads", "linear_num_value_heads"),
    renamed=text_name,
    ignored=NOT_OF_THE_TEXT,
)
