"""Lesson 11. One store, two kinds of memory: K and V, which grow with the text, and states, which do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_engine.hybrid.delta_rule import advance_conv, causal_conv, chunk_scan, depthwise, l2norm, recurrent_step
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import Feed, Feeds
from mini_engine.hybrid.packed_mixers import StateStep
from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.kv.store_around import StoreAround
from mini_engine.layers.direct_step import in_step


class Run(NamedTuple):
    """Rows start … stop - 1 of a step: several tokens of the request whose state is in `slot`."""

    start: int
    stop: int
    slot: int


class Stage(NamedTuple):
    """The next token of every sequence with drafts: rows `[N]`, each the token after the state in `sources` `[N]`.

    The state after it goes to `slots` `[N]`. All are int64.
    """

    rows: Tensor
    sources: Tensor
    slots: Tensor


@dataclass(frozen=True)
class HybridMeta(ForwardMeta):
    """Lesson 3's plan, and the state slot of each sequence.

    single_rows: `[N]` int64, the rows of sequences that feed one token, and of each first token before drafts; None
        if that is every row.
    single_slots: `[N]` int64, their state slots. Padding rows have slot 0.
    runs: the sequences that feed more of their own tokens.
    stages: the first draft of every sequence that has one, then the second of each, and so on.
    """

    single_rows: Tensor | None
    single_slots: Tensor
    runs: tuple[Run, ...] = ()
    stages: tuple[Stage, ...] = ()


class HybridKv(StoreAround):
    """The store of a hybrid engine: attention goes to `kv`; delta nets and short convolutions to `states`.

    Args:
        kv: lesson 3's pool, or a store over it (lessons 15 and 16).
        state_step: of the step whose layers use it (`in_step`), if C++ can read and write the states.
    """

    def __init__(self, kv: Any, states: GdnPool, state_step: StateStep | None = None) -> None:
        super().__init__(kv)
        self.states, self.state_step = states, state_step

    @property
    def bytes(self) -> int:
        """Size of both pools in bytes, used or not."""
        return self.kv.bytes + self.states.mem_bytes

    @property
    def direct_step(self) -> Any:
        """See `Store.direct_step`."""
        return self.kv.direct_step

    def in_step(self, meta: HybridMeta) -> "HybridKv":
        """See `Store.in_step`."""
        conv, state_step = self.states.conv_state, None
        if conv.device.type == "cpu":
            state_step = StateStep(self.states, Feeds(feeds_of(meta), len(meta.positions), conv.shape[1]))
        return HybridKv(in_step(self.kv, meta), self.states, state_step)

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Return attention of q `[T, H_q, D]` over the KV pool; `layer` counts attention layers."""
        return self.kv.attend(layer, q, meta)

    def scan(self, layer: int, qkv: Tensor, g: Tensor, beta: Tensor, conv_weight: Tensor, meta: HybridMeta) -> Tensor:
        """Advance the states of all sequences by this step's tokens.

        Args:
            layer: counts delta nets.
            qkv: `[T, conv_dim]`, before the convolution. g, beta: `[T, H_v]`. conv_weight: `[conv_dim, K]`.

        Returns:
            `[T, H_v, D_v]` in the dtype of `qkv`.
        """
        step, run = (partial(advance, layer, conv_weight) for advance in (self._step, self._run))
        return each_sequence(meta, (qkv, g, beta), self.states.value_shape, step, run)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, meta: HybridMeta) -> Tensor:
        """Convolve x `[T, C]` with each sequence's last inputs, and keep the new ones.

        Args:
            layer: counts short convolutions. weight: `[C, K]`, one filter for each channel, the latest input last.

        Returns:
            `[T, C]` in the dtype of `x`.
        """
        conv = self.states.conv_state[layer]

        def step(x: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
            window, kept = advance_conv(conv[sources], x[:, None])
            conv.index_copy_(0, slots, kept)
            return depthwise(window, weight)[:, 0].to(x.dtype)

        def run(x: Tensor, slot: int) -> Tensor:
            window, conv[slot] = advance_conv(conv[slot], x)
            return depthwise(window, weight).to(x.dtype)

        return each_sequence(meta, (x,), x.shape[1:], step, run)

    def _step(
        self, layer: int, conv_weight: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, sources: Tensor, slots: Tensor
    ) -> Tensor:
        """Advance each of the states in `sources` by one token; the results go to `slots`."""
        recurrent, conv = self.states.get_layer_state(layer)
        window, kept = advance_conv(conv[sources], qkv[:, None])
        conv.index_copy_(0, slots, kept)
        q, k, v = self._heads(causal_conv(window, conv_weight)[:, 0])
        out, state = recurrent_step(recurrent[sources], q, k, v, g.float(), beta.float())
        recurrent.index_copy_(0, slots, state)
        return out.to(qkv.dtype)

    def _run(self, layer: int, conv_weight: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, slot: int) -> Tensor:
        """Advance the state in `slot` by several tokens."""
        recurrent, conv = self.states.get_layer_state(layer)
        window, kept = advance_conv(conv[slot], qkv)
        conv[slot] = kept
        q, k, v = self._heads(causal_conv(window, conv_weight))
        out, recurrent[slot] = chunk_scan(recurrent[slot], q, k, v, g.float(), beta.float())
        return out.to(qkv.dtype)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `[N, conv_dim]` into q, k `[N, H_v, D_k]` and v `[N, H_v, D_v]` in float32: normalized, q scaled."""
        heads, key_dim, value_dim = self.states.recurrent_state.shape[2:]
        q, k, v = mixed.float().split(self.states.conv_parts, dim=-1)
        q, k = (l2norm(x.view(len(x), -1, key_dim)) for x in (q, k))
        q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q * key_dim**-0.5, k))
        return q, k, v.view(len(v), heads, value_dim)


def each_sequence(
    meta: HybridMeta,
    inputs: Sequence[Tensor],
    shape: Sequence[int],
    step: Callable[..., Tensor],
    run: Callable[..., Tensor],
) -> Tensor:
    """Return the results of a step's tokens, `[T, *shape]` in the dtype of the first input.

    Args:
        inputs: a row for each token, `[T, ...]`.
        step: advances the states in the slots `sources` by these rows of the inputs, one each; the results go to
            `slots`. run: advances the state in a slot by several rows.
    """
    if meta.single_rows is None:
        return step(*inputs, meta.single_slots, meta.single_slots)
    out = inputs[0].new_empty(len(inputs[0]), *shape)
    rows, slots = meta.single_rows, meta.single_slots
    if len(rows):
        out[rows] = step(*(x[rows] for x in inputs), slots, slots)
    for rows, sources, slots in meta.stages:  # a wrong draft leaves the state before it intact
        out[rows] = step(*(x[rows] for x in inputs), sources, slots)
    for start, stop, slot in meta.runs:
        out[start:stop] = run(*(x[start:stop] for x in inputs), slot)
    return out


def feeds_of(meta: HybridMeta) -> list[Feed]:
    """Return what a step's sequences feed: all first tokens and runs, then one feed for each stage of drafts."""
    singles = meta.single_slots.contiguous()
    if meta.single_rows is None:
        return [Feed(singles, singles)]
    starts, stops, of_runs = torch.tensor(meta.runs, dtype=torch.int64).view(-1, 3).unbind(1)
    slots, rows = torch.cat((singles, of_runs)), torch.cat((meta.single_rows, starts))
    counts = torch.cat((torch.ones_like(singles), stops - starts))
    stages = (Feed(sources, slots, rows, torch.ones_like(rows)) for rows, sources, slots in meta.stages)
    return [Feed(slots, slots, rows, counts), *stages]
