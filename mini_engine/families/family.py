"""Course machinery. The functions that a family of models consists of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mini_engine.base.errors import UserError, first_line
from mini_engine.base.values import shown
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.checkpoint.stored import Stored
from mini_engine.model.causal_lm import CausalLM

SHARED = ("num_key_value_heads", "num_attention_heads", "intermediate_size")


class Family(NamedTuple):
    """A family of models.

    shape: reads the config.json of a checkpoint directory. build: returns a model of a shape, without weights.
    decoder: makes the fast layers of lesson 9's `speed_up`; None: they are those of lesson 0's model.
    can_fuse: lesson 10's layers for a GPU fit this family.
    shared: the names of the numbers of a shape that ranks divide.
    renamed, ignored, in_float32: as for `Stored`.
    """

    shape: Callable[[Path], Any]
    build: Callable[[Any], CausalLM]
    decoder: Callable[..., Any] | None = None
    can_fuse: bool = False
    shared: tuple[str, ...] = SHARED
    renamed: Callable[[str], str] = str
    ignored: tuple[str, ...] = ()
    in_float32: tuple[str, ...] = ()

    def load(
        self, path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> CausalLM:
        """Load a checkpoint of this family, ready for inference. Arguments and errors as for `load_model`."""
        check_dtype_and_device(dtype, device)
        return self.stored(resolve_checkpoint(path_or_hub_id)).load(dtype, device)

    def stored(self, directory: Path) -> Stored:
        """Return the checked tensors of a checkpoint. UserError: the checkpoint cannot be used."""
        return Stored(self.build, self.shape(directory), directory, self.renamed, self.ignored, self.in_float32)


def check_dtype_and_device(dtype: torch.dtype, device: str | torch.device) -> None:
    """Raise UserError unless weights of this dtype can lie on this device."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype is {shown(dtype)}; give torch.float32, torch.bfloat16 or torch.float16", param="dtype")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises each of them for some missing device
        why = first_line(error)
        raise UserError(
            f"device {str(device)!r} cannot be used on this machine ({why}); give 'cpu'", param="device"
        ) from error
