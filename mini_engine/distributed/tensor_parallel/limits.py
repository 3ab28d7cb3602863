"""Lesson 18. Refuses options that do not work with ranks, with the reason, before any process starts."""

import torch
import torch.distributed as dist

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.base.values import shown

# option: a value that does not work with ranks, and why
UNABLE = {
    "backend": ("fused", "lesson 10's layers do not add up partial sums over ranks"),
    "cuda_graphs": (True, "a step that waits for other ranks cannot be captured here"),
}


def check_shareable(config: EngineConfig) -> None:
    """Raise UserError if an option does not work with ranks."""
    for name, (value, why) in UNABLE.items():
        if getattr(config, name) == value:
            raise UserError(
                f"{name} is {shown(value)}, but {why}; leave it out, or use tensor_parallel_size 1", param=name
            )


def device_of_ranks(device: str | torch.device, num_ranks: int) -> str:
    """Return the type of each rank's device, "cpu" or "cuda".

    Raises:
        UserError: the type is "cuda" and there are too few GPUs, or torch cannot connect them.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) not in ("cpu", "cuda"):
        raise UserError(f"device is {shown(str(device))}; for ranks, choose one of auto, cpu, cuda", param="device")
    if str(device) == "cuda" and torch.cuda.device_count() < num_ranks:
        found = torch.cuda.device_count()
        raise UserError(f"{num_ranks} ranks need a GPU each, and torch sees {found}; use device 'cpu'", param="device")
    if str(device) == "cuda" and not dist.is_nccl_available():
        raise UserError("this torch has no NCCL, which connects ranks on GPUs; use device 'cpu'", param="device")
    return str(device)
