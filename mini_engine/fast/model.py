"""Lesson 9. `speed_up(model)`: the same model, called in the same way, with fast layers in it.

There are two ways. "packed" is this lesson's C++ over packed weights. "torch" is what can be had without a compiler:
oneDNN's packed weights, joined matrices, and fewer and larger operations.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mini_engine.errors import UserError
from mini_engine.fast import native
from mini_engine.fast.packed_layers import PackedLinear, PackedModel
from mini_engine.fast.torch_layers import TorchLinear, TorchModel
from mini_engine.model.qwen3 import KvStore, Qwen3ForCausalLM

WAYS = ("auto", "packed", "torch")


class FastQwen3ForCausalLM(Qwen3ForCausalLM):
    """What `speed_up` makes of a model. `embed` looks tokens up, `head` makes logits of normed rows."""

    @property
    def head_weight(self) -> Tensor:
        """The head's weights, for their dtype and device; packed, so these are not its rows."""
        return self.head.weight

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """As lesson 0's; rows that nobody samples from get neither the last norm nor logits."""
        return self.head(self.model.norm(self.model(self.embed(token_ids), kv, meta, rows)))


def speed_up(model: Qwen3ForCausalLM, way: str = "auto") -> Qwen3ForCausalLM:
    """Replace a model's layers by fast ones, in place; the same model. One that is fast already stays as it is.

    Args:
        way: "packed", "torch", or "auto": the first that works here.

    Raises:
        UserError: there is no such way, or it cannot be gone; nothing was changed.
    """
    if way not in WAYS:
        raise UserError(f"there is no way {way!r} to speed a model up; choose one of {', '.join(WAYS)}")
    if isinstance(model, FastQwen3ForCausalLM):
        return model
    weight = model.head_weight
    if weight.device.type != "cpu":
        raise UserError(f"fast layers are for the CPU, and this model is on {weight.device}; load it without them")
    functions = None
    if way != "torch":
        try:
            functions = native.load(weight.dtype)
        except UserError as why:
            if way == "packed":
                raise
            sys.stderr.write(f"fast layers: {why}. Using torch's: the same tokens, slower in decode.\n")
    if functions is None:
        _use_torch(model)
    else:
        _use_packed(model, functions)
    return model


def _use_packed(model: Qwen3ForCausalLM, functions: native.Functions) -> None:
    """A tied head and the embedding are one weight: it lies packed, and the embedding finds its rows in there."""
    embedding, head_weight = model.model.embed_tokens, model.head_weight.data
    layers = PackedModel(functions, model)
    head = PackedLinear(functions, head_weight)
    _replace(model, layers, head.packed.rows if model.config.tie_word_embeddings else embedding, head)


def _use_torch(model: Qwen3ForCausalLM) -> None:
    """oneDNN does not give rows back, so a tied embedding stays beside its packed copy: speed for memory."""
    _replace(model, TorchModel(model), model.model.embed_tokens, TorchLinear(model.head_weight.data))


def _replace(model: Qwen3ForCausalLM, layers: nn.Module, embed: Callable[[Tensor], Tensor], head: nn.Module) -> None:
    """The same object with other parts, so that whoever holds the model holds the fast one."""
    model.model, model.embed, model.head = layers, embed, head
    if not model.config.tie_word_embeddings:
        del model.lm_head
    model.__class__ = FastQwen3ForCausalLM
