"""Lesson 9. `speed_up(model)`: the same model with fast layers.

There are two backends. "packed" is this lesson's C++ over packed weights. "torch" needs no compiler: joined matrices,
weights that oneDNN packs, and fewer but larger operations.

A process with only a part of each matrix (lesson 18) passes an exchange. If C++ cannot call it, "packed" means torch's
layers over packed matrices.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import UserError
from mini_engine.layers import native
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.packed_layers import PackedLinear, PackedModel
from mini_engine.layers.torch_layers import TorchLinear, TorchModel
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.qwen3 import KvStore, Qwen3ForCausalLM
from mini_engine.values import shown

BACKENDS = ("auto", "packed", "torch")


class FastQwen3ForCausalLM(CausalLM):
    """The model that `speed_up` returns. `embed` looks up tokens; `head` turns normed rows into logits."""

    def __init__(
        self, config: Qwen3Config, layers: PackedModel | TorchModel, embed: Callable[[Tensor], Tensor], head: nn.Module
    ) -> None:
        super().__init__(config, layers)
        self.embed, self.head = embed, head

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step; return logits `[R, vocab_size]` of `rows` `[R]`, or of all fed tokens."""
        return self.head(self.model.norm(self.model(self.embed(token_ids), kv, meta, rows)))


def speed_up(
    model: Qwen3ForCausalLM | FastQwen3ForCausalLM, backend: str = "auto", exchange: Exchange = WHOLE
) -> FastQwen3ForCausalLM:
    """Return a fast model that takes over the weights of `model`; `model` cannot run afterwards.

    Packing reorders the weights in place, so there is never a second copy. A model that is already fast is returned
    unchanged.

    Args:
        backend: "packed", "torch", or "auto": the first that works on this machine.
        exchange: completes the sums of o and down if this model has only a part of both.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    check_backend(backend)
    if isinstance(model, FastQwen3ForCausalLM):
        return model
    functions = functions_for(model, backend)
    if functions is None:
        return _with_torch(model, exchange)
    return _with_packed(model, functions, exchange)


def check_backend(backend: str) -> None:
    """Raise UserError unless fast layers have this backend."""
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {shown(backend)}; choose one of {', '.join(BACKENDS)}", param="backend")


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
        return native.Functions(model.dtype)
    except UserError as why:
        if backend == "packed":
            raise
        sys.stderr.write(f"fast layers: {why}. Using torch's layers: the same tokens, but slower decode.\n")
        return None


def _with_packed(model: Qwen3ForCausalLM, functions: native.Functions, exchange: Exchange) -> FastQwen3ForCausalLM:
    """Use the packed backend. A tied head is also the embedding, which then reads its rows from the tiles."""

    def join(*linears: nn.Linear) -> PackedLinear:
        return join_packed(functions, *linears)

    embedding, head_weight = model.model.embed_tokens, model.head_weight.data
    if exchange.native(model.dtype) is None:
        layers = TorchModel(model, join, exchange)
    else:
        layers = PackedModel(functions, model, exchange)
    head = PackedLinear(functions, head_weight)
    embed = head.packed.rows if model.config.tie_word_embeddings else embedding
    return FastQwen3ForCausalLM(model.config, layers, embed, head)


def join_packed(functions: native.Functions, *linears: nn.Linear) -> PackedLinear:
    """Return one packed layer whose outputs are those of `linears` in turn; their own weights are released."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    for linear in linears:
        del linear.weight
    return PackedLinear(functions, weight, bias)


def _with_torch(model: Qwen3ForCausalLM, exchange: Exchange) -> FastQwen3ForCausalLM:
    """Use the torch backend. oneDNN's layout has no readable rows, so a tied embedding stays as a second copy."""
    head = TorchLinear(model.head_weight.data)
    return FastQwen3ForCausalLM(model.config, TorchModel(model, exchange=exchange), model.model.embed_tokens, head)
