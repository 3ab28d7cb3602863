"""Lesson 0. The engine's view of a model: config, dtype and device. Faster layers have the same interface."""

from typing import Any

import torch
from torch import nn


class CausalLM(nn.Module):
    """A language model. Calling it runs one packed step; see `Qwen3ForCausalLM.forward`.

    Args:
        config: its shape. model: its layers, with the last norm as `norm`.
    """

    def __init__(self, config: Any, model: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.model: Any = model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and logits."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights; the tensors of a plan must be on it too."""
        return self.model.norm.weight.device
