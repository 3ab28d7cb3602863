"""Lesson 16. Loads a checkpoint with latents through lesson 0's reader: piece by piece, every tensor checked first."""

from pathlib import Path

import torch

from mini_engine.checkpoint.stored import Stored
from mini_engine.checkpoint.weights import check_place, resolve_checkpoint
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.model import LatentForCausalLM


def load_latents(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LatentForCausalLM:
    """Load a DeepSeek-V3 whose layers are all dense, ready for inference. Arguments and errors as for `load_model`."""
    check_place(dtype, device)
    return stored_latents(resolve_checkpoint(path_or_hub_id)).load(dtype, device)


def stored_latents(directory: Path) -> Stored[LatentForCausalLM]:
    """Return the checked tensors of a checkpoint with latents. UserError: the checkpoint cannot be used."""
    return Stored(LatentForCausalLM, LatentConfig.from_dir(directory), directory)
