"""Lesson 9. `speed_up(model)`: the same model with fast layers.

There are two backends. "packed" is this lesson's C++ over packed weights. "torch" needs no compiler: joined matrices,
weights that oneDNN packs, and fewer but larger operations.

A process with only a part of each matrix (lesson 18) passes an exchange. If C++ cannot call it, "packed" means torch's
layers over packed matrices.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.layers import native
from mini_engine.layers.block_layer import BlockLayer, dense_finish
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.packed_layers import PackedLinear, PackedModel, RowsOf, joined
from mini_engine.layers.packed_norm import PackedNorm
from mini_engine.layers.torch_layers import (
    FastNorm,
    Join,
    TorchAttention,
    TorchDecoderLayer,
    TorchLinear,
    TorchModel,
    join,
)
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.decoder import Decoder
from mini_engine.model.qwen3 import Qwen3Attention

BACKENDS = ("auto", "packed", "torch")
FastDecoder = Callable[[CausalLM, native.Functions | None, Exchange], nn.Module]
FastMixers = Mapping[type[nn.Module], Callable[[Any, nn.Module, Join], nn.Module]]  # makes the fast form of each class
FAST_MIXERS: FastMixers = {Qwen3Attention: TorchAttention}


def speed_up(
    model: CausalLM, backend: str = "auto", exchange: Exchange = WHOLE, decoder: FastDecoder | None = None
) -> CausalLM:
    """Return a fast model that takes over the weights of `model`; `model` cannot run afterwards.

    Packing reorders the weights in place, so there is never a second copy. A model that is already fast is returned
    unchanged.

    Args:
        backend: "packed", "torch", or "auto": the first that works on this machine.
        exchange: completes the sums of o and down if this model has only a part of both.
        decoder: makes the layers of another family than lesson 0's.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {shown(backend)}; choose one of {', '.join(BACKENDS)}", param="backend")
    if not isinstance(model.model, Decoder):
        return model
    functions = functions_for(model, backend)
    fast: Any = (decoder or fast_decoder)(model, functions, exchange)
    if functions is None:  # oneDNN's layout has no readable rows, so a tied embedding stays as a second copy
        return CausalLM(model.config, fast, TorchLinear(model.head_weight.data))
    head = PackedLinear(functions, model.head_weight.data)
    if model.config.tie_word_embeddings:
        fast.embed_tokens = RowsOf(head)
    return CausalLM(model.config, fast, head)


def fast_decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> nn.Module:
    """Return lesson 0's decoder with fast layers: one call for all of them where C++ can do the exchange."""
    if functions is not None and exchange.native(model.dtype) is not None:
        return PackedModel(functions, model, exchange)
    return with_torch_layers(model, functions, exchange)


def with_torch_layers(
    model: CausalLM,
    functions: native.Functions | None,
    exchange: Exchange,
    fast_mixers: FastMixers = FAST_MIXERS,
    norm: Callable[[Any], nn.Module] = FastNorm,
    layer: Callable[..., TorchDecoderLayer] = TorchDecoderLayer,
    finish: Callable[..., nn.Module] = dense_finish,
) -> TorchModel:
    """Return a decoder whose layers are torch's, over packed matrices if there are functions for them.

    Args:
        fast_mixers: make the fast forms of mixers, given the norm in front of each and what joins matrices.
        norm: makes that of a norm. layer: makes the layers. finish: makes what follows a mixer instead, as
            `dense_finish` does, where this process has all of each packed matrix.
    """
    matrix: Join = join if functions is None else partial(join_packed, functions)

    def fast(loaded: Any) -> nn.Module:
        mixer = fast_mixers[type(loaded.mixer)](loaded.mixer, norm(loaded.input_layernorm), matrix)
        if functions is not None and exchange is WHOLE:
            return BlockLayer(mixer, finish(loaded, mixer, norm(loaded.post_attention_layernorm), matrix))
        return layer(loaded, mixer, norm(loaded.post_attention_layernorm), matrix, exchange)

    last = norm(model.model.norm)
    if functions is not None:
        last = PackedNorm(functions, last)
    return TorchModel(model.model, map(fast, model.model.layers), last)


def functions_for(model: CausalLM, backend: str) -> native.Functions | None:
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


def join_packed(functions: native.Functions, *linears: nn.Linear) -> PackedLinear:
    """Return one packed layer whose outputs are those of `linears` in turn; their own weights are released."""
    weight, bias = joined(*linears)
    return PackedLinear(functions, weight, bias)
