"""Course machinery. Qwen3, dense: lesson 0's model, with windows in some layers (lesson 15) or without."""

from pathlib import Path

import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.json_files import read_json
from mini_engine.families.family import Family
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.kinds import SLIDING
from mini_engine.model.qwen3 import qwen3_model


def shape(directory: Path) -> Qwen3Config:
    """Return the shape in a directory's config.json. UserError: it cannot run here."""
    from mini_engine.checkpoint.config_schema import layer_types  # pydantic-core is needed only here

    raw = read_json(directory / "config.json")
    types = layer_types(raw) if isinstance(raw.get("num_hidden_layers"), int) else None
    if not isinstance(types, list) or SLIDING not in types:
        return Qwen3Config.from_dir(directory)
    from mini_engine.windows.window_config import WindowConfig

    return WindowConfig.from_dir(directory)


DENSE = Family(Qwen3Config.from_dir, qwen3_model, can_fuse=True)  # lesson 0's: every layer sees the whole text
FAMILY = DENSE._replace(shape=shape)


def load_model(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> CausalLM:
    """Load lesson 0's model, a dense Qwen3 checkpoint, ready for inference.

    Args:
        path_or_hub_id: a directory with config.json and safetensors (one file or shards), or a hub id such as
            "Qwen/Qwen3-0.6B", which huggingface_hub downloads once and keeps.
        dtype: dtype of the loaded weights; a checkpoint of another dtype is converted piece by piece.

    Raises:
        UserError: the checkpoint, the dtype or the device cannot be used; the message says why.
    """
    return DENSE.load(path_or_hub_id, dtype, device)
