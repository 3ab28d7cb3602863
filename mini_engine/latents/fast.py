"""Lesson 16. Latents with lesson 9's linear layers: packed matrices, joined where inputs are shared, and fused norms.

Attention remains the store's job, so `kv_b_proj` remains a plain matrix: it is never applied as a layer.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.latents.model import LatentAttention, LatentDecoderLayer, LatentForCausalLM, LatentStore, rotate_end
from mini_engine.layers import native
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.fast_model import check_backend, functions_for, join_packed
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.torch_layers import TorchLinear, in_pieces, join
from mini_engine.model.causal_lm import CausalLM

Join = Callable[..., nn.Module]


class FastLatentLayer(nn.Module):
    """A decoder layer in fewer, larger operations.

    Args:
        matrix: makes one layer of several that share an input. exchange: completes the sums of o and down.
    """

    def __init__(self, layer: LatentDecoderLayer, matrix: Join, exchange: Exchange = WHOLE) -> None:
        super().__init__()
        attention = cast(LatentAttention, layer.self_attn)
        mlp: Any = layer.mlp
        self.config, self.layer_idx, self.exchange = attention.config, attention.layer_idx, exchange
        heads, rank = self.config.num_attention_heads, self.config.kv_lora_rank
        self.kv_b = attention.kv_b_proj.weight.data.view(heads, -1, rank)
        self.through_latent = self.config.q_lora_rank is not None
        if self.through_latent:
            first = attention.q_a_proj
            self.q_norm, self.q_b = attention.q_a_layernorm.weight, matrix(attention.q_b_proj)
        else:
            first = attention.q_proj
        self.latent_norm, self.latent_eps = attention.kv_a_layernorm.weight, attention.kv_a_layernorm.eps
        self.sizes = (first.out_features, rank, self.config.qk_rope_head_dim)
        self.project, self.o = matrix(first, attention.kv_a_proj_with_mqa), matrix(attention.o_proj)
        self.gate_up, self.down = matrix(mlp.gate_proj, mlp.up_proj), matrix(mlp.down_proj)
        self.input_norm, self.post_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.eps = layer.input_layernorm.eps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LatentStore, meta: Any) -> Tensor:
        q, c, k_rope = self.project(F.rms_norm(x, x.shape[1:], self.input_norm, self.eps)).split(self.sizes, dim=-1)
        if self.through_latent:
            q = self.q_b(F.rms_norm(q, q.shape[1:], self.q_norm, self.latent_eps))
        q = rotate_end(q.unflatten(1, (-1, self.config.qk_head_dim)), cos, sin, self.config)
        c = F.rms_norm(c, c.shape[1:], self.latent_norm, self.latent_eps)
        kv.set_kv(self.layer_idx, meta.slot_mapping, c[:, None], rotate_end(k_rope[:, None], cos, sin, self.config))
        attended = kv.attend_latents(self.layer_idx, q, self.kv_b, meta).flatten(1)
        return in_pieces(self.finish, x, attended)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add to these rows the outputs of attention and of the feed-forward block."""
        x = x + self.exchange.all_reduce(self.o(attended))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[1:], self.post_norm, self.eps)).chunk(2, dim=-1)
        return x + self.exchange.all_reduce(self.down(F.silu(gate) * up))


class FastLatentForCausalLM(CausalLM):
    """The model that `speed_up_latents` returns. `embed` looks up tokens; `head` turns normed rows into logits."""

    def __init__(self, model: CausalLM, embed: Callable[[Tensor], Tensor], head: nn.Module) -> None:
        super().__init__(model.config, model.model)
        self.embed, self.head = embed, head

    def forward(self, token_ids: Tensor, kv: LatentStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step; return logits `[R, vocab_size]` of `rows` `[R]`, or of all fed tokens."""
        x = self.embed(token_ids)
        cos, sin = self.model.rope(meta.positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, kv, meta)
        return self.head(self.model.norm(x if rows is None else x[rows]))


def speed_up_latents(
    model: LatentForCausalLM | FastLatentForCausalLM, backend: str = "auto", exchange: Exchange = WHOLE
) -> FastLatentForCausalLM:
    """Return a fast model that takes over the weights of `model`; `model` cannot run afterwards.

    Args:
        backend: "packed" (lesson 9's C++), "torch", or "auto": the first that works on this machine.
        exchange: as for lesson 9's `speed_up`.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    check_backend(backend)
    if isinstance(model, FastLatentForCausalLM):
        return model
    functions = functions_for(model, backend)
    matrix, head, embed = _with_torch(model) if functions is None else _with_packed(model, functions)
    loaded = cast(Iterable[LatentDecoderLayer], model.model.layers)
    model.model.layers = nn.ModuleList(FastLatentLayer(layer, matrix, exchange) for layer in loaded)
    return FastLatentForCausalLM(model, embed, head)


def _with_torch(model: LatentForCausalLM) -> tuple[Join, nn.Module, nn.Module]:
    return join, TorchLinear(model.head_weight.data), model.model.embed_tokens


def _with_packed(
    model: LatentForCausalLM, functions: native.Functions
) -> tuple[Join, nn.Module, Callable[[Tensor], Tensor]]:
    """Use packed matrices. A tied head is also the embedding, which then reads its rows from the tiles."""

    def matrix(*linears: nn.Linear) -> PackedLinear:
        return join_packed(functions, *linears)

    embedding, head = model.model.embed_tokens, PackedLinear(functions, model.head_weight.data)
    return matrix, head, head.packed.rows if model.config.tie_word_embeddings else embedding
