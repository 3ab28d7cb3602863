"""Lesson 15. LFM3 with lesson 9's linear layers: packed matrices, joined where they share an input, and fused norms."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mini_engine.families.lfm3_model import HeadGatedAttention
from mini_engine.hybrid.packed_mixers import FastStateMixer, PackedShortConv
from mini_engine.hybrid.short_conv import ShortConv
from mini_engine.layers import native
from mini_engine.layers.blocks import PackedEntry, PackedFinish, normed
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.fast_model import with_torch_layers
from mini_engine.layers.torch_layers import FastNorm, Join, TorchAttention, TorchDecoderLayer, TorchModel
from mini_engine.model.causal_lm import CausalLM


class FastHeadGatedAttention(TorchAttention):
    """Attention with a gate for each head, without its last matrix, which is `out`. Arguments as for TorchAttention."""

    def __init__(self, attention: HeadGatedAttention, norm: nn.Module, matrix: Join, **scale: Any) -> None:
        gate, bias = attention.gate_proj, attention.q_proj.bias
        if gate is not None and bias is not None:  # the others have one; joined, all of them do
            gate.bias = nn.Parameter(bias.new_zeros(gate.out_features))
        super().__init__(attention, norm, matrix, gate, **scale)
        self.rotation = attention.rotation

    def forward(self, x: Tensor, cos: Any, sin: Any, kv: Any, meta: Any) -> Tensor:
        """Write K and V of x `[T, hidden_size]`; return gated attention `[T, H_q * D]`. cos, sin: two `[T, D]` each."""
        return super().forward(x, cos[self.rotation], sin[self.rotation], kv, meta)


class FastShortConv(FastStateMixer):
    """A short convolution without its last matrix, which is `out`."""

    def __init__(self, conv: ShortConv, norm: nn.Module, matrix: Join) -> None:
        super().__init__()
        self.index, bias = conv.index, conv.filters.bias
        self.weight, self.bias = conv.filters.weight.data[:, 0].contiguous(), None if bias is None else bias.data
        self.project, self.out = normed(norm, matrix(conv.in_proj)), matrix(conv.out_proj)

    def by_store(self, x: Tensor, kv: Any, meta: Any) -> Tensor:
        """See `FastStateMixer`."""
        before, after, x = x.chunk(3, dim=-1)
        out = kv.convolve(self.index, before * x, self.weight, meta)
        return after * (out if self.bias is None else out + self.bias)

    def pack(self, project: PackedEntry) -> PackedShortConv:
        """See `FastStateMixer`."""
        return PackedShortConv(project, self.index, self.weight, self.bias)


class FastSandwichLayer(TorchDecoderLayer):
    """A layer that also norms what is added to x.

    Args:
        post_norm: makes the fast forms of these norms.
    """

    def __init__(self, layer: Any, *parts: Any, post_norm: Callable[[Any], nn.Module] = FastNorm) -> None:
        super().__init__(layer, *parts)
        self.norms = nn.ModuleList(map(post_norm, (layer.post_operator_norm, layer.post_ffn_norm)))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add to these rows the normed outputs of the mixer and of the feed-forward block."""
        after_mixer, after_mlp = self.norms
        x = x + after_mixer(self.exchange.all_reduce(self.mixer.out(mixed)))
        return x + after_mlp(self.feed_forward(x))


def sandwich_finish(
    layer: Any, mixer: Any, norm: nn.Module, matrix: Join, post_norm: Callable[[Any], nn.Module] = FastNorm
) -> nn.Module:
    """Return what follows the mixer of a layer with all four norms. Arguments as for `dense_finish` and above."""
    after = post_norm(layer.post_operator_norm), post_norm(layer.post_ffn_norm)
    return PackedFinish(mixer.out, norm, layer.mlp, matrix, after)


FAST_MIXERS = {ShortConv: FastShortConv, HeadGatedAttention: FastHeadGatedAttention}


def lfm3_decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> TorchModel:
    """Return an LFM3's decoder with fast layers."""
    parts: Any = dict(layer=FastSandwichLayer, finish=sandwich_finish) if model.config.use_sandwich_norm else {}
    return with_torch_layers(model, functions, exchange, FAST_MIXERS, **parts)
