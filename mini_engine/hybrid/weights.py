"""Lesson 11. Loads a hybrid checkpoint with lesson 0's reader: piece by piece, every tensor checked first."""

from pathlib import Path

import torch

from mini_engine.checkpoint.stored import Stored
from mini_engine.checkpoint.weights import check_place, resolve_checkpoint
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.model import HybridForCausalLM

NOT_OF_THE_TEXT = ("mtp.", "model.visual.", "visual.")  # prediction heads and the vision tower


def load_hybrid(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> HybridForCausalLM:
    """Load a dense hybrid checkpoint (`qwen3_5_text`), ready for inference. Arguments as for `load_model`.

    Raises:
        UserError: the checkpoint, the dtype or the device cannot be used; the message says why.
    """
    check_place(dtype, device)
    return stored_hybrid(resolve_checkpoint(path_or_hub_id)).load(dtype, device)


def stored_hybrid(directory: Path) -> Stored[HybridForCausalLM]:
    """Return the checked tensors of a dense hybrid checkpoint. UserError: the checkpoint cannot be used."""
    return Stored(HybridForCausalLM, HybridConfig.from_dir(directory), directory, text_name, NOT_OF_THE_TEXT)


def text_name(stored: str) -> str:
    """Return a tensor's name in a text model; with a vision tower it is stored as "model.language_model."…"."""
    bare = stored.removeprefix("model.")
    inner = bare.removeprefix("language_model.")
    return stored if inner == bare else f"model.{inner}"
