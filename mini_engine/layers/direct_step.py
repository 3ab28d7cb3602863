"""Course machinery. A direct store in one step: its pool for C++, made and checked once for all layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.kv.direct import LayerCache
from mini_engine.kv.store_around import StoreAround
from mini_engine.layers.blocks import LIBRARY
from mini_engine.layers.native import Place, Pool
from mini_engine.layers.packed_step import (
    Tables,
    alloc_padded,
    check_caches,
    contiguous,
    memory,
    pool_struct,
    refuse_table,
)


class Sizes(NamedTuple):
    """The sizes of an attention layer. outputs: of its joined matrix."""

    hidden: int
    outputs: int
    heads: int
    kv_heads: int
    dim: int


class Shared(NamedTuple):
    """What layers of the same sizes share in a step: the pool, and memory for activations that each one overwrites.

    caches, tables, rows: own the memory behind the structs. rows: normed, outputs and attended, `[T, …]`.
    """

    pool: Pool
    places: Sequence[Place]
    rows: Sequence[Tensor]
    caches: Sequence[LayerCache]
    tables: Tables


class DirectStep(StoreAround):
    """A direct store with a kernel in C++, in a step with the plan `meta`."""

    def __init__(self, store: Any, meta: ForwardMeta) -> None:
        super().__init__(store)
        self.meta = meta
        self.made: dict[tuple, Shared] = {}

    @property
    def direct_step(self) -> "DirectStep":
        """See `Store.direct_step`."""
        return self

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Return attention of q `[T, H_q, D]`."""
        return self.kv.attend(layer, q, meta)

    def shared(self, x: Tensor, sizes: Sizes) -> Shared:
        """Return what layers of these sizes share in a step over rows like x `[T, hidden_size]`.

        Raises:
            ValueError: slots or tables of any layer do not fit the caches, or the caches these layers.
        """
        key = (len(x), x.dtype, sizes)
        return self.made.get(key) or self.made.setdefault(key, self.make(x, sizes))

    def make(self, x: Tensor, sizes: Sizes) -> Shared:
        """Check all layers' caches, and return `shared`."""
        rows = [alloc_padded(x, width) for width in (sizes.hidden, sizes.outputs, sizes.heads * sizes.dim)]
        starts, kv_lens = self.meta.cu_seqlens_q.contiguous(), self.meta.seq_lens_kv.contiguous()
        caches, tables = self.kv.layer_caches(self.meta), Tables(starts, starts, kv_lens)
        if caches[0].k.shape[2] != sizes.kv_heads:
            raise ValueError(f"the store has {caches[0].k.shape[2]} heads; this model needs {sizes.kv_heads}")
        check_caches(rows[2].unflatten(1, (sizes.heads, sizes.dim)), caches, self.kernel, tables)
        caches = contiguous(caches)
        pool = pool_struct(self.kernel.native(x.dtype), caches, tables, sizes.dim**-0.5)
        refuse_table(LIBRARY.function("bad_table")(pool, len(caches)), pool)
        return Shared(pool, [*map(memory, rows)], rows, caches, tables)


def in_step(store: Any, meta: Any) -> Any:
    """Return the store for the layers of a step: what they share is made once (`Store.in_step`)."""
    native = store.direct and getattr(store.kernel, "native", None)  # lesson 3's kernel may be a bare function
    return DirectStep(store, meta) if native else store.in_step(meta)
