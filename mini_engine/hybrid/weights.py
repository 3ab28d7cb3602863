"""Lesson 11. Loads a hybrid checkpoint with lesson 0's reader: piece by piece, every tensor checked first."""

from pathlib import Path

import torch

from mini_engine import weights
from mini_engine.hybrid.config import HybridConfig
from mini_engine.hybrid.model import HybridForCausalLM

PREDICTION_HEADS = "mtp."  # multi-token prediction, which transformers leaves out too


def load_hybrid(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> HybridForCausalLM:
    """Load a dense hybrid checkpoint (`qwen3_5_text`), ready for inference. Arguments as for `load_model`.

    Raises:
        UserError: the checkpoint, the dtype or the device cannot be used; the message says why.
    """
    weights._check_place(dtype, device)
    directory = weights.resolve_checkpoint(path_or_hub_id)
    config = HybridConfig.from_dir(directory)
    sources = weights._find_tensors(directory)
    sources = {name: path for name, path in sources.items() if not name.startswith(PREDICTION_HEADS)}
    with torch.device("meta"):
        model = HybridForCausalLM(config)
    weights._check_tensors(directory, model, sources)
    tensors = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in model.named_parameters()}
    for name, tensor in tensors.items():
        weights._copy_into(tensor, sources[name], name)
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
