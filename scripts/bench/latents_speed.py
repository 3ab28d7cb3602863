"""Course machinery. For suite `latents`: one layer's attention by both ways to read latents, and decode steps.

Both ways read the same pool of random numbers. Processor time, since a machine may be busy with other work.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.bench.behind import BLOCK_SIZE, decoding, engine_behind, with_random_weights
from scripts.bench.turns import clock_of, gather_turns, take_turns

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.families.deepseek_config import DeepseekConfig
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.model import latent_model
from mini_engine.latents.reading import expanded_attention, multiplications
from mini_engine.latents.store import LatentKv

NEW = 4
EXPANDED, ABSORBED = "expanded", "absorbed"


@dataclass(frozen=True)
class LatentShape:
    """A model of random weights, and the measurements to make with it.

    decode: lengths of histories. chunks: of sequences, whose last q_lens tokens are queries. step: as `decode`.
    """

    config: LatentConfig
    decode: Sequence[int]
    chunks: Sequence[int]
    q_lens: Sequence[int]
    step: Sequence[int]

    @property
    def words(self) -> str:
        """A description for the table's reader."""
        c = self.config
        return (
            f"{c.num_attention_heads} heads of {c.qk_nope_head_dim} + {c.qk_rope_head_dim} and {c.v_head_dim} numbers, "
            f"a latent of {c.kv_lora_rank}, {c.num_hidden_layers} layers, hidden size {c.hidden_size}"
        )


def latent_config(hidden: int, layers: int, heads: int, rank: int, nope: int, rope: int, v: int) -> LatentConfig:
    """Return the config of a model of these sizes."""
    return DeepseekConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=rope,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_ids=(1,),
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
    )


Q_LENS = (1, 16, 64, 128, 192, 256, 512)
SHAPES = {
    "pocket-latent": LatentShape(
        latent_config(192, 6, 4, 64, 48, 32, 48), (256, 1024, 4096), (1024, 8192), Q_LENS, (1024, 4096)
    ),
    "DeepSeek-V3, 16 heads": LatentShape(
        latent_config(2048, 4, 16, 512, 128, 64, 128), (256, 1024, 4096), (512, 4096), Q_LENS, (1024,)
    ),
}


# ---------------------------------------------------------------- one layer's attention


class OneLayer:
    """A layer's latents of several sequences of one length, in blocks out of order, and both ways to read them."""

    def __init__(self, config: LatentConfig, args: Namespace, batch: int, q_len: int, kv_len: int) -> None:
        dtype, num_blocks = DTYPES[args.dtype], -(-kv_len // BLOCK_SIZE)
        kernel = load_kernel(args.kernel, "cpu", dtype, latents=True)
        kv = KvPool(one_layer(config), batch * num_blocks + 1, BLOCK_SIZE, kernel, dtype)
        for tensor in (*kv.K, *kv.V):
            tensor.normal_()
        table = 1 + torch.randperm(batch * num_blocks, dtype=torch.int32).view(batch, num_blocks)
        starts = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32)
        self.store = LatentKv(config, kv)
        self.tables = Batch(starts, torch.full((batch,), kv_len, dtype=torch.int32), table)
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.q = torch.randn(batch * q_len, heads, config.qk_head_dim).to(dtype)
        width = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b = (torch.randn(heads, width, rank) / math.sqrt(rank)).to(dtype)

    def absorbed(self) -> Tensor:
        """Read latents as they are."""
        return self.store.absorbed(0, self.q, self.kv_b, self.tables)

    def expanded(self) -> Tensor:
        """Expand every sequence's latents to keys and values first."""
        return expand_all(self.store, 0, self.q, self.kv_b, self.tables)


def one_layer(config: LatentConfig) -> LatentConfig:
    """Return the shape of a pool with a single layer."""
    return replace(config, num_hidden_layers=1)


def expand_all(store: LatentKv, layer: int, q: Tensor, kv_b: Tensor, batch: Batch) -> Tensor:
    """Return attention `[T, H, v]` over expanded latents, even where absorbing is cheaper."""
    caches, attend = (store.kv.K[layer], store.kv.V[layer]), store.kernel.expanded or expanded_attention
    starts, kv_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens_kv.tolist()
    parts = [
        attend(
            q[starts[s] : starts[s + 1]], caches, batch.block_table[s], kv_len, kv_b, store.config, store.kernel.widen
        )
        for s, kv_len in enumerate(kv_lens)
    ]
    return torch.cat(parts).to(q.dtype)


def reading_rows(args: Namespace) -> list[dict[str, Any]]:
    """Return milliseconds of both ways: decode by batch and history, and chunks by the length of the query."""
    rows = []
    for name, shape in SHAPES.items():
        cases = [(batch, 1, kv_len) for batch in (1, 8) for kv_len in shape.decode]
        cases += [(1, q_len, kv_len) for kv_len in shape.chunks for q_len in shape.q_lens if q_len <= kv_len]
        for batch, q_len, kv_len in dict.fromkeys(cases[::3] if args.quick else cases):
            where = {"case": name, "sequences": batch, "queries": q_len, "tokens": kv_len}
            rows.append(where | both_ways(name, args, batch, q_len, kv_len))
    return rows


def both_ways(name: str, args: Namespace, batch: int, q_len: int, kv_len: int, rounds: int = 7) -> dict[str, float]:
    """Return milliseconds of both ways for sequences of one length, and how they compare, measured and counted."""
    config, rounds = SHAPES[name].config, args.rounds or (3 if args.quick else rounds)
    one = OneLayer(config, args, batch, q_len, kv_len)
    with torch.inference_mode():
        contenders = {EXPANDED: one.expanded, ABSORBED: one.absorbed}
        timings = take_turns(contenders, rounds, f"{name}, {q_len} of {kv_len}", clock_of(args))
    slow, fast = timings[EXPANDED], timings[ABSORBED]
    counted = multiplications(config, q_len, kv_len)
    return {
        "expanded ms": slow.median * 1e3,
        "absorbed ms": fast.median * 1e3,
        "expanded / absorbed": slow.median / fast.median,
        "counted": counted[0] / counted[1],
        "± %": max(slow.spread, fast.spread) * 100,
    }


# ---------------------------------------------------------------- decode


class ExpandedKv(LatentKv):
    """A store that always expands, like an engine with only that way."""

    def in_step(self, meta: ForwardMeta) -> LatentKv:
        """Return itself: no step is absorbed."""
        return self

    def attend_latents(self, layer: int, q: Tensor, kv_b: Tensor, meta: ForwardMeta) -> Tensor:
        """Return attention of q over expanded latents."""
        return expand_all(self, layer, q, kv_b, meta.batch)


def step_rows(args: Namespace) -> list[dict[str, Any]]:
    """Return decode speed with all latents expanded and with none, by history."""
    rounds, clock, rows = args.rounds or (2 if args.quick else 5), clock_of(args), []
    for name, shape in SHAPES.items():
        for history in shape.step[:1] if args.quick else shape.step:
            engines = {way: engine_of(shape.config, args, history, rounds, way) for way in (EXPANDED, ABSORBED)}
            contenders = {way: decoding(engine, NEW, clock) for way, engine in engines.items()}
            timings = gather_turns(contenders, rounds, f"{name} behind {history}")
            slow, fast = timings[EXPANDED], timings[ABSORBED]
            rows.append(
                {
                    "case": f"{name}, {shape.config.num_hidden_layers} layers",
                    "history": history,
                    "expanded tokens/s": NEW / slow.median,
                    "absorbed tokens/s": NEW / fast.median,
                    "times": slow.median / fast.median,
                    "± %": max(slow.spread, fast.spread) * 100,
                }
            )
    return rows


def engine_of(config: LatentConfig, args: Namespace, history: int, rounds: int, way: str) -> Engine:
    """Return an engine whose request decodes after `history` tokens that were never computed."""
    torch.manual_seed(0)
    model = with_random_weights(latent_model(config), DTYPES[args.dtype])
    engine = engine_behind(model, 1, history, NEW * (rounds + 3), kernel=args.kernel)
    if way == EXPANDED:
        assert isinstance(engine.runner, ModelRunner)
        store: Any = engine.runner.pool
        engine.runner.pool = ExpandedKv(config, store.kv)
    return engine
