"""Lesson 15. Loads a checkpoint with windows through lesson 0's model and reader. Only the config differs."""

from pathlib import Path

import torch

from mini_engine.checkpoint.stored import Stored
from mini_engine.checkpoint.weights import check_place, resolve_checkpoint
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.windows.window_config import WindowConfig


def load_windowed(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Qwen3ForCausalLM:
    """Load a dense Qwen3 checkpoint with windows, ready for inference. Arguments and errors as for `load_model`."""
    check_place(dtype, device)
    return stored_windowed(resolve_checkpoint(path_or_hub_id)).load(dtype, device)


def stored_windowed(directory: Path) -> Stored[Qwen3ForCausalLM]:
    """Return the checked tensors of a checkpoint with windows. UserError: the checkpoint cannot be used."""
    return Stored(Qwen3ForCausalLM, WindowConfig.from_dir(directory), directory)
