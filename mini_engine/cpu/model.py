"""Lesson 9. `speed_up(model)`: the same model with fast layers in it.

There are two backends. "packed" is this lesson's C++ over packed weights. "torch" needs no compiler: oneDNN's packed
weights, joined matrices, and fewer and larger operations.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mini_engine.config import Qwen3Config
from mini_engine.cpu import native
from mini_engine.cpu.packed_layers import PackedLinear, PackedModel
from mini_engine.cpu.torch_layers import TorchLinear, TorchModel
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import KvStore, Qwen3ForCausalLM

BACKENDS = ("auto", "packed", "torch")


class FastQwen3ForCausalLM(Qwen3ForCausalLM):
    """What `speed_up` returns. `embed` looks tokens up, `head` turns normed rows into logits."""

    def __init__(
        self, config: Qwen3Config, layers: PackedModel | TorchModel, embed: Callable[[Tensor], Tensor], head: nn.Module
    ) -> None:
        nn.Module.__init__(self)  # the base class would make the layers that these replace
        self.config, self.model, self.embed, self.head = config, layers, embed, head

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """As in lesson 0; rows that are not sampled get neither the last norm nor logits."""
        return self.head(self.model.norm(self.model(self.embed(token_ids), kv, meta, rows)))


def speed_up(model: Qwen3ForCausalLM, backend: str = "auto") -> FastQwen3ForCausalLM:
    """Return a fast model that takes over the weights of `model`, which cannot run afterwards.

    Packing reorders weights where they lie, so there is never a second copy. A model that is fast already is returned.

    Args:
        backend: "packed", "torch", or "auto": the first that works on this machine.

    Raises:
        UserError: there is no such backend, or it does not work here; nothing was changed.
    """
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}", param="backend")
    if isinstance(model, FastQwen3ForCausalLM):
        return model
    if model.device.type != "cpu":
        raise UserError(f"fast layers are for the CPU, and this model is on {model.device}; load it without them")
    functions = None
    if backend != "torch":
        try:
            functions = native.load(model.dtype)
        except UserError as why:
            if backend == "packed":
                raise
            sys.stderr.write(f"fast layers: {why}. Using torch's: the same tokens, slower in decode.\n")
    return _with_torch(model) if functions is None else _with_packed(model, functions)


def _with_packed(model: Qwen3ForCausalLM, functions: native.Functions) -> FastQwen3ForCausalLM:
    """A tied head and the embedding are one weight: it is packed, and the embedding finds its rows in there."""
    embedding, head_weight = model.model.embed_tokens, model.head_weight.data
    layers = PackedModel(functions, model)
    head = PackedLinear(functions, head_weight)
    embed = head.packed.rows if model.config.tie_word_embeddings else embedding
    return FastQwen3ForCausalLM(model.config, layers, embed, head)


def _with_torch(model: Qwen3ForCausalLM) -> FastQwen3ForCausalLM:
    """oneDNN does not give rows back, so a tied embedding stays beside its packed copy: speed for memory."""
    head = TorchLinear(model.head_weight.data)
    return FastQwen3ForCausalLM(model.config, TorchModel(model), model.model.embed_tokens, head)
