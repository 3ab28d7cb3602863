"""Lesson 13. Refuses in one sentence, before any process starts, what ranks cannot carry out, and says why."""

import torch

from mini_engine.engine_config import EngineConfig
from mini_engine.errors import UserError
from mini_engine.values import shown

# option: a value that ranks cannot carry out, and why
UNABLE = {
    "backend": ("fused", "ranks run on CPUs, and lesson 10's layers on GPUs"),
    "cuda_graphs": (True, "ranks run on CPUs, where no step can be captured"),
}


def check_shareable(config: EngineConfig) -> None:
    """Raise UserError if an option asks for something that ranks cannot carry out."""
    for name, (value, why) in UNABLE.items():
        if getattr(config, name) == value:
            raise alone_only(f"{name} is {shown(value)}", why, "leave it out", name)


def check_device(device: str | torch.device) -> None:
    """Raise UserError unless this means a CPU."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device).type
    if chosen != "cpu":
        why = "ranks exchange their sums with gloo, between CPUs"
        raise alone_only(f"device is {str(device)!r}, here a GPU", why, "give 'cpu'", "device")


def alone_only(what: str, why: str, advice: str, param: str) -> UserError:
    """Return the error for what works in one process only."""
    return UserError(f"{what}, but {why}; {advice}, or use tensor_parallel_size 1", param=param)
