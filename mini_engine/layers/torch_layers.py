"""Lesson 9. Fast layers without a compiler, from torch's own operations.

q, k and v are one matrix, gate and up another, so a layer makes four matrix calls instead of seven. In bfloat16 oneDNN
packs the weights. Norm and RoPE treat the heads of q and k as one tensor. Long prompts run the small operations in
pieces, so that each operation finds the previous one's output in the cache.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.attention.folded import multiplies_bfloat16
from mini_engine.layers.direct_step import in_step
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.packed_attention import PackedAttention
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.model.decoder import Decoder, DecoderLayer, scaled
from mini_engine.model.layers import RMSNorm, SwiGLU
from mini_engine.model.rope import apply_rope

FEWEST_ROWS = 4  # with fewer, oneDNN is slower, and a single row gets other bits than the same row in a batch
PIECE = 256  # rows; results for more do not fit in the cache, and each is written to freshly mapped memory


class TorchLinear(nn.Module):
    """`nn.Linear`, with a bfloat16 weight in oneDNN's own layout if oneDNN supports this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        pack = weight.dtype == torch.bfloat16 and multiplies_bfloat16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if pack else weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[T, in_features]` to `[T, out_features]`."""
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        filled = F.pad(x, (0, 0, 0, max(0, FEWEST_ROWS - len(x))))
        return torch.ops.mkldnn._linear_pointwise(filled, self.weight, self.bias, "none", [], "")[: len(x)]


def join(*linears: nn.Linear) -> TorchLinear:
    """Return one layer whose outputs are those of `linears`, one after the other.

    They share an input, and either all have a bias or none has. Their own weights are released: afterwards only the
    joined layer holds them, even while the model they came from is still referenced.
    """
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    for linear in linears:
        del linear.weight
    return TorchLinear(weight, bias)


Join = Callable[..., nn.Module]  # one layer in place of several that share an input: `join`


class FastNorm(nn.Module):
    """RMSNorm in one operation.

    Args:
        norm: the norm whose weight it takes over.
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight.data, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TorchAttention(nn.Module):
    """Attention without its last matrix, which is `out`: lesson 0's in fewer, larger operations.

    Args:
        norm: of the layer's input. matrix: makes each of the matrices, one of several that share an input.
        gate: yields one or `head_dim` gates of each query head, whose logistic multiplies the result; None: no gates.
        scale: returns what a norm of heads multiplies by, `[D]`.
    """

    def __init__(
        self,
        attention: Any,
        norm: nn.Module,
        matrix: Join,
        gate: nn.Linear | None = None,
        scale: Callable[[Any], Tensor] = lambda norm: norm.weight.data,
    ) -> None:
        super().__init__()
        self.layer_idx, self.norm, self.head_dim = attention.layer_idx, norm, attention.head_dim
        heads = [linear.out_features // attention.head_dim for linear in (attention.q_proj, attention.k_proj)]
        self.heads = (heads[0], heads[1])
        self.gates = 0 if gate is None else gate.out_features // heads[0]
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv, self.out = matrix(*linears, *([] if gate is None else [gate])), matrix(attention.o_proj)
        norms = (attention.q_norm, attention.k_norm)
        self.head_norm, self.eps = None, 0.0  # or weights [H_q + H_kv, D]
        if not isinstance(attention.q_norm, nn.Identity):
            self.eps = attention.q_norm.eps
            self.head_norm = torch.cat([scale(x).expand(n, -1) for x, n in zip(norms, heads, strict=True)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any) -> Tensor:
        """Write K and V of x `[T, hidden_size]`; return attention `[T, H_q * D]`, which the next layer overwrites."""
        if self.entry is not None and kv.direct_step is not None:
            return self.entry.attend(x, cos, sin, kv.direct_step)
        outputs = in_pieces(self.project, x, cos, sin) if self.entry is None else self.entry(x, cos, sin)
        end = (self.heads[0] + 2 * self.heads[1]) * self.head_dim
        q, k, v = outputs[:, :end].view(len(x), -1, self.head_dim).split((*self.heads, self.heads[1]), dim=1)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        out = kv.attend(self.layer_idx, q, meta)
        if self.gates:
            out = out * outputs[:, end:].view(len(x), -1, self.gates).sigmoid()
        return out.flatten(1)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return q, k, v and gates of these rows side by side, `[T, …]`: q and k normed and rotated."""
        outputs, turned = self.qkv(self.norm(x)), cos.shape[1]
        qk = normed = outputs[:, : sum(self.heads) * self.head_dim].unflatten(1, (-1, self.head_dim))
        if self.head_norm is not None:
            normed = F.rms_norm(qk.to(self.head_norm.dtype), qk.shape[2:], eps=self.eps) * self.head_norm
        qk[..., :turned].copy_(apply_rope(normed[..., :turned], cos, sin))
        if turned < self.head_dim:
            qk[..., turned:].copy_(normed[..., turned:])
        return outputs

    @functools.cached_property
    def entry(self) -> PackedAttention | None:
        """All but the last matrix in one call, or `project` in one; None: the matrix is not packed."""
        if not isinstance(self.qkv, PackedLinear):
            return None
        sizes = (self.layer_idx, self.heads, self.head_dim, self.gates)
        return PackedAttention(self.norm, self.qkv, *sizes, self.head_norm, self.eps)


class TorchFeedForward(nn.Module):
    """The feed-forward block in two matrices. matrix: makes each, one of several that share an input."""

    def __init__(self, mlp: SwiGLU, matrix: Join) -> None:
        super().__init__()
        self.act = mlp.act
        self.gate_up, self.down = matrix(mlp.gate_proj, mlp.up_proj), matrix(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class TorchDecoderLayer(nn.Module):
    """A decoder layer in fewer, larger operations.

    Args:
        mixer: of the layer, in its own fast form: it norms x and stops before its last matrix, `mixer.out`.
        norm: in front of the feed-forward block. matrix: makes its matrices, one of several that share an input.
        exchange: completes the sums of out and of the feed-forward block, of which a process may have a part.
        feed_forward: makes the fast form of the feed-forward block, given `matrix`.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        mixer: nn.Module,
        norm: nn.Module,
        matrix: Join,
        exchange: Exchange = WHOLE,
        feed_forward: Callable[[Any, Join], nn.Module] = TorchFeedForward,
    ) -> None:
        super().__init__()
        self.mixer: Any = mixer
        self.norm, self.exchange, self.mlp = norm, exchange, feed_forward(layer.mlp, matrix)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Have the store keep every row of x `[T, hidden_size]`; return the given `rows` of the result, or all."""
        return in_pieces(self.finish, *self.mixed(x, cos, sin, kv, meta, rows))

    def mixed(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the mixer; return these rows, or all, of x and of the mixer's result before its last matrix."""
        mixed = self.mixer(x, cos, sin, kv, meta)
        return (x, mixed) if rows is None else (x[rows], mixed[rows])

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add to these rows the outputs of the mixer and of the feed-forward block."""
        x = x + self.exchange.all_reduce(self.mixer.out(mixed))
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward block for these rows."""
        return self.exchange.all_reduce(self.mlp(self.norm(x)))


def in_pieces(run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `run(*tensors)`, computed for at most PIECE rows of every tensor at a time."""
    if len(tensors[0]) <= PIECE:
        return run(*tensors)
    return torch.cat([run(*piece) for piece in zip(*(x.split(PIECE) for x in tensors), strict=True)])


class TorchModel(nn.Module):
    """A loaded decoder with other layers and another last norm. Its last layer goes on with the rows asked for."""

    def __init__(self, decoder: Decoder, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.rope, self.norm = decoder.embed_tokens, decoder.rope, norm
        self.scale = decoder.scale
        self.layers = nn.ModuleList(layers)

    def forward(self, token_ids: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Return the normed hidden states `[R, hidden_size]` of `rows`, or of all tokens."""
        x = scaled(self.embed_tokens(token_ids), self.scale)
        cos, sin = self.rope(meta.positions, x.dtype)
        kv = in_step(kv, meta)
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, cos, sin, kv, meta)
        return self.norm(last(x, cos, sin, kv, meta, rows))
