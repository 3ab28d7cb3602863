"""Lesson 13. What a model in shares cannot do yet, refused in one sentence before any process starts."""

from typing import Any

import torch

from mini_engine.errors import UserError

# option: the values that ranks can carry out; the first one asks for nothing
ABLE = {
    "backend": ("auto", "reference"),
    "cuda_graphs": (None, False),
    "kv_dtype": ("auto",),
    "kv_cache_dir": (None,),
    "kv_host_bytes": (None,),
    "kv_disk_bytes": (None,),
    "kv_always": (False,),
}


def shareable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that concern ranks. UserError if one of the others asks for something."""
    for name, able in ABLE.items():
        if name in options and options[name] not in able:
            raise alone_only(f"{name} is {options[name]!r}", "leave it out", name)
    return {name: value for name, value in options.items() if name not in ABLE}


def check_device(device: str | torch.device) -> None:
    """Raise UserError unless this means a CPU."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device).type
    if chosen != "cpu":
        raise alone_only(f"device is {str(device)!r}, here a GPU", "give 'cpu'", "device")


def alone_only(what: str, advice: str, param: str) -> UserError:
    """Return the error for what works in one process only."""
    able = "a model shared by several processes runs with the reference layers on CPUs"
    return UserError(f"{what}, but {able}; {advice}, or use tensor_parallel_size 1", param=param)
