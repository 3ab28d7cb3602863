"""Lesson 16. A small model's sizes, latents in a poisoned pool, and attention over them in float64: for the tests."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.latents.contract import as_it_is
from mini_engine.latents.latent_config import LatentConfig
from tests.kernels.cases import make_case

HEADS, RANK, NOPE, ROPE, V = 3, 8, 6, 4, 5  # all different, so that no shape can be taken for another
SIZES = dict(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=ROPE,
    kv_lora_rank=RANK,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=V,
)
BLOCK_SIZE = 4


def config_of(**changes) -> LatentConfig:
    """Return the small model's shape with these changes."""
    return LatentConfig(**SIZES | changes)


def randoms(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return normal random tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def keys_and_values(c: Tensor, r: Tensor, kv_b: Tensor, nope: int = NOPE) -> tuple[Tensor, Tensor]:
    """Return each head's keys `[n, H, nope + rope]` and values `[n, H, v]`, one head after another."""
    keys = [torch.cat((c @ one[:nope].T, r), dim=1) for one in kv_b]
    values = [c @ one[nope:].T for one in kv_b]
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def attention(q: Tensor, c: Tensor, r: Tensor, kv_b: Tensor, scale: float) -> Tensor:
    """Return causal attention `[q_len, H, v]` in float64, over keys and values of all heads."""
    k, v = keys_and_values(c.double(), r.double(), kv_b.double(), q.shape[2] - r.shape[1])
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    hidden = torch.ones(len(q), len(c)).triu(len(c) - len(q) + 1).bool()
    return torch.einsum("qhk,khv->qhv", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)


def over_latents(q: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, scale: float) -> Tensor:
    """Return each head's weighted sum of latents `[q_len, H, rank]`, in the dtype of q."""
    scores = (torch.einsum("qhc,kc->qhk", q, c) + torch.einsum("qhr,kr->qhk", q_rope, r)) * scale
    hidden = torch.ones(len(q), len(c)).triu(len(c) - len(q) + 1).bool()
    return torch.einsum("qhk,kc->qhc", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), c)


def close(got: Tensor, want: Tensor, teach: str, guesses: dict[str, Tensor] | None = None, within: float = 1e-5):
    """Fail with `teach` unless the tensors agree; add the name of the guess that is what was got."""
    assert list(got.shape) == list(want.shape), teach
    equal = same(got, want, within)  # also if there is nothing to compare
    named = [] if equal else [f"; here {name}" for name, guess in (guesses or {}).items() if same(got, guess, within)]
    off = max((got.double() - want.double()).abs().flatten().tolist(), default=0.0)
    rounding = f"{within:.10f}".rstrip("0")
    assert equal, f"{teach}{''.join(named[:1])}\nlargest difference {off:.3g}, rounding is below {rounding}"


def same(a: Tensor, b: Tensor, within: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=within, atol=within)


def pack(x: Tensor) -> Tensor:
    """Return vectors as rows of another kind: negated, and one number longer. Lesson 17's rows use the same seam."""
    return torch.cat((-x, torch.ones_like(x[..., :1])), dim=-1)


def unpack(rows: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what such rows stand for."""
    return -rows[..., :dim].to(dtype)


@dataclass(frozen=True)
class Pool:
    """Sequences of the given (q_len, kv_len) in one pool, where every slot that no sequence owns is NaN.

    starts, lens, table: the step's cu_seqlens_q, seq_lens_kv and block_table.
    histories: each sequence's latents and rotary keys in order.
    """

    c_cache: Tensor
    r_cache: Tensor
    starts: Tensor
    lens: Tensor
    table: Tensor
    histories: list[tuple[Tensor, Tensor]]

    @property
    def rows(self) -> list[slice]:
        """Each sequence's rows of the packed queries."""
        return [slice(begin, end) for begin, end in pairwise(self.starts.tolist())]


def pool_of(
    lengths: list[tuple[int, int]], rank: int = RANK, rope: int = ROPE, pack=as_it_is, padding: int = -1, seed: int = 0
) -> Pool:
    """Return a pool whose sequences' blocks are shuffled.

    pack(x, dim, dtype): turns vectors into a cache's rows. padding: what the table has past a sequence's blocks.
    """
    case = make_case(lengths, latents=True, dim=rank, rope=rope, block_size=BLOCK_SIZE, entry=padding, seed=seed)
    c_cache, r_cache = (pack(x, x.shape[3], x.dtype) for x in case.caches)
    histories = [tuple(x[:, 0].float().split((rank, rope), dim=-1)) for x, _ in case.histories]
    return Pool(c_cache, r_cache, *case.batch, histories)
