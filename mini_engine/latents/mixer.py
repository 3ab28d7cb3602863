"""Lesson 16. A layer's mixer in one call of `mixer.cpp`, in steps whose sequences all absorb kv_b, as decode does.

What a step's layers share is checked and described once (`AbsorbedStep`), and a layer's weights when the model is made
(`NativeLayer`): between its calls, Python only changes pointers.
"""

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p, pointer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention.contract import Native, check_batch, refuse_block
from mini_engine.base.native_build import Library, Signature
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.direct import LayerCache
from mini_engine.latents import absorb
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.layers.blocks import SOURCES, Entry, Norm, PackedEntry, check_rows
from mini_engine.layers.native import Place
from mini_engine.layers.packed_step import alloc_padded, check_slots, memory

HERE = Path(__file__).parent
PLACES, BUFFERS = ("x", "normed", "joined", "q_normed", "q"), ("rotary", "absorbed", "sums", "out")


class LatentLayer(ctypes.Structure):
    """A layer's weights and sizes; `mixer.cpp` has the same structs."""

    _fields_ = (
        *((name, POINTER(Entry)) for name in ("project", "queries")),
        *(("latent_norm", Norm), ("kv_b", c_void_p)),
        *((name, c_int64) for name in ("heads", "rank", "nope", "rope", "v", "interleaved")),
        ("scale", c_float),
    )


class LatentStep(ctypes.Structure):
    """One step's activations, tables and functions, and the caches of the layer that is called."""

    _fields_ = (
        ("rows", c_int64),
        *((name, Place) for name in PLACES),
        *((name, c_void_p) for name in (*BUFFERS, "cos", "sin", "c_cache", "r_cache")),
        *((name, c_void_p) for name in ("slots", "starts", "kv_lens", "table")),
        *((name, c_int64) for name in ("num_seqs", "num_blocks", "block_size", "max_blocks")),
        *((name, c_void_p) for name in ("write", "attention", "to_latents", "from_latents")),
    )


LIBRARY = Library(
    (
        *(HERE / name for name in ("mixer.cpp", "absorb.h", "latent_cpu.h")),
        *SOURCES,
    ),
    {"latent_mixer": Signature((POINTER(LatentLayer), POINTER(LatentStep), c_int))},
    "the packed backend",
    "the torch backend takes any dtype",
)


class NativeLayer:
    """The weights of a layer as C++ takes them. Its arguments must outlive it.

    Args:
        project: of x: queries or their latent, a latent, a rotary key. queries: of their latent; None: they have none.
        latent_norm: the norm of latents. kv_b: `[H, nope + v, rank]`, contiguous, of the matrices' dtype.
    """

    def __init__(
        self, project: PackedEntry, queries: PackedEntry | None, latent_norm: Any, kv_b: Tensor, config: LatentConfig
    ) -> None:
        self.linear, self.heads, self.config = project.linear, len(kv_b), config
        self.q_sizes = None if queries is None else (queries.linear.packed.in_features, queries.linear.matrix.outputs)
        self.latent_scale = latent_norm.weight.data.float()
        self.dtype = kv_b.dtype
        self.function = LIBRARY.function("latent_mixer", self.dtype)
        self.struct = LatentLayer(
            project=pointer(project.struct),
            queries=None if queries is None else pointer(queries.struct),
            latent_norm=Norm(self.latent_scale.data_ptr(), latent_norm.eps),
            kv_b=kv_b.data_ptr(),
            heads=self.heads,
            rank=config.kv_lora_rank,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            v=config.v_head_dim,
            interleaved=config.rope_interleave,
            scale=config.attention_scale,
        )


class AbsorbedStep:
    """A step all of whose sequences are absorbed: its tables, and memory for the activations of one layer.

    Raises:
        ValueError: slots or tables do not fit the pool, before anything is written.
    """

    def __init__(self, kv: KvPool, native: Native, meta: ForwardMeta) -> None:
        check_batch(meta.slot_mapping, kv.K[0], kv.V[0], meta.batch)
        check_slots(LayerCache(kv.K[0], kv.V[0], meta.slot_mapping, meta.block_table), kv.K[0], len(meta.positions))
        self.kv, self.dtype = kv, kv.K[0].dtype
        self.tables = [x.contiguous() for x in (meta.slot_mapping, *meta.batch)]
        names = ("slots", "starts", "kv_lens", "table")
        num_blocks, block_size = kv.K[0].shape[:2]
        self.struct = LatentStep(
            rows=len(meta.slot_mapping),
            **{name: table.data_ptr() for name, table in zip(names, self.tables, strict=True)},
            num_seqs=len(meta.seq_lens_kv),
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=meta.block_table.shape[1],
            write=native.write,
            attention=native.attention,
            to_latents=absorb.LIBRARY.address("to_latents", self.dtype),
            from_latents=absorb.LIBRARY.address("from_latents", self.dtype),
        )
        self.kept: list[Tensor] = []  # owns the memory of the activations

    def run(self, layer: NativeLayer, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Store latents and rotary keys of x `[T, hidden_size]` in layer `index`; return attention `[T, H * v]`.

        Raises:
            ValueError: x has another shape or dtype than the step and the layer, or a table names no block. Nothing is
                written.
        """
        struct = self.struct
        check_rows(x, layer.linear)
        if len(x) != struct.rows:
            raise ValueError(f"x has {len(x)} rows; this step has {struct.rows}")
        if not self.kept:
            self.allocate(layer, x)
        out = x.new_empty(len(x), layer.heads * layer.config.v_head_dim)
        cos, sin = (angles.to(x.dtype).contiguous() for angles in (cos, sin))
        struct.x, struct.out, struct.cos, struct.sin = memory(x), out.data_ptr(), cos.data_ptr(), sin.data_ptr()
        struct.c_cache, struct.r_cache = self.kv.K[index].data_ptr(), self.kv.V[index].data_ptr()
        refuse_block(layer.function(layer.struct, struct, torch.get_num_threads()), struct.num_blocks)
        return out

    def allocate(self, layer: NativeLayer, x: Tensor) -> None:
        """Make room for the activations of this layer, whose sizes all layers of a model have."""
        config, widths = layer.config, {"normed": x.shape[1], "joined": layer.linear.packed.out_features}
        if layer.q_sizes is not None:
            widths |= dict(zip(("q_normed", "q"), layer.q_sizes, strict=True))
        for name, width in widths.items():
            self.kept.append(alloc_padded(x, width))
            setattr(self.struct, name, memory(self.kept[-1]))
        rotary, latents = (layer.heads + 1) * config.qk_rope_head_dim, layer.heads * config.kv_lora_rank
        for name, width in (("rotary", rotary), ("absorbed", latents), ("sums", latents)):
            self.kept.append(x.new_empty(len(x), width))
            setattr(self.struct, name, self.kept[-1].data_ptr())
