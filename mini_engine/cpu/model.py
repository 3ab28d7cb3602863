"""Lesson 9. `speed_up(model)`: the same model with fast layers.

There are two backends. "packed" is this lesson's C++ over packed weights. "torch" needs no compiler: joined matrices,
weights that oneDNN packs, and fewer but larger operations.
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
    """The model that `speed_up` returns. `embed` looks up tokens; `head` turns normed rows into logits."""

    def __init__(
        self, config: Qwen3Config, layers: PackedModel | TorchModel, embed: Callable[[Tensor], Tensor], head: nn.Module
    ) -> None:
        nn.Module.__init__(self)  # the base class would build the layers that these replace
        self.config, self.model, self.embed, self.head = config, layers, embed, head

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Compute logits as in lesson 0, but the last norm and the head for `rows` only, or for all rows if None."""
        return self.head(self.model.norm(self.model(self.embed(token_ids), kv, meta, rows)))


def speed_up(model: Qwen3ForCausalLM, backend: str = "auto") -> FastQwen3ForCausalLM:
    """Return a fast model that takes over the weights of `model`, which cannot run afterwards.

    Packing reorders the weights in place, so there is never a second copy. A model that is already fast is returned as
    it is.

    Args:
        backend: "packed", "torch", or "auto": the first that works on this machine.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    check_backend(backend)
    if isinstance(model, FastQwen3ForCausalLM):
        return model
    functions = functions_for(model, backend)
    return _with_torch(model) if functions is None else _with_packed(model, functions)


def check_backend(backend: str) -> None:
    """Raise UserError unless fast layers can have this backend."""
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}", param="backend")


def functions_for(model: Qwen3ForCausalLM, backend: str) -> native.Functions | None:
    """Return the compiled functions for a model's dtype; None if torch's layers are to be used.

    Raises:
        UserError: the model is not on the CPU, or "packed" does not work here.
    """
    if model.device.type != "cpu":
        raise UserError(f"fast layers run on the CPU only; this model is on {model.device}: use the reference backend")
    if backend == "torch":
        return None
    try:
        return native.load(model.dtype)
    except UserError as why:
        if backend == "packed":
            raise
        sys.stderr.write(f"fast layers: {why}. Using torch's layers: the same tokens, but slower decode.\n")
        return None


def _with_packed(model: Qwen3ForCausalLM, functions: native.Functions) -> FastQwen3ForCausalLM:
    """Use the packed backend. A tied head is also the embedding, which then reads its rows out of the tiles."""
    embedding, head_weight = model.model.embed_tokens, model.head_weight.data
    layers = PackedModel(functions, model)
    head = PackedLinear(functions, head_weight)
    embed = head.packed.rows if model.config.tie_word_embeddings else embedding
    return FastQwen3ForCausalLM(model.config, layers, embed, head)


def _with_torch(model: Qwen3ForCausalLM) -> FastQwen3ForCausalLM:
    """Use the torch backend. Rows cannot be read out of oneDNN's layout, so a tied embedding stays as a second copy."""
    head = TorchLinear(model.head_weight.data)
    return FastQwen3ForCausalLM(model.config, TorchModel(model), model.model.embed_tokens, head)
