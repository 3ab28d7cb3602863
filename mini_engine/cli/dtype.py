"""Lesson 6. `--dtype auto` for the commands: the checkpoint's own dtype, if the processor multiplies it.

`LLM` and the lessons compute in float32 on a CPU, whatever the checkpoint holds, because they compare exact tokens.
For a user's bfloat16 checkpoint, that would cost twice the memory and half the decoding speed.
"""

from pathlib import Path

import torch

from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.checkpoint.json_files import read_json
from mini_engine.checkpoint.shipped import PACKAGE, SHIPPED

INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # x86's two, and Arm's

OWN = (
    "computing in bfloat16, the checkpoint's dtype; --dtype float32 is exact, with twice the memory and half the speed"
)
NO_PRODUCTS = "computing in float32: this processor has no bfloat16 products; --dtype bfloat16 takes half the memory"


def chosen_dtype(model: str | None, dtype: str, device: str) -> tuple[str, str]:
    """Return the dtype to pass to LLM, and a sentence for the user, or "".

    Args:
        model: as `--model`; None and the course's own models stay with "auto", float32 on a CPU.
        dtype: as `--dtype`; a named one is used without comment.
    """
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if dtype != "auto" or model is None or model in SHIPPED or not on_cpu:
        return dtype, ""
    directory = resolve_checkpoint(model)
    if directory.resolve().parent == PACKAGE or stored_dtype(directory) != "bfloat16":
        return dtype, ""
    return ("bfloat16", OWN) if multiplies_bfloat16() else (dtype, NO_PRODUCTS)


def stored_dtype(directory: Path) -> str | None:
    """Return the dtype that a checkpoint's config.json names, under any of the keys in use."""
    outer = read_json(directory / "config.json")
    inner = outer.get("text_config")  # beside a vision tower's
    places = [inner, outer] if isinstance(inner, dict) else [outer]
    return next((found for each in places for name in ("dtype", "torch_dtype") if (found := each.get(name))), None)


def multiplies_bfloat16() -> bool:
    """Return True if the processor has instructions for bfloat16 products."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in INSTRUCTIONS)
