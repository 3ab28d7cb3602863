"""Lesson 15. Replayed decode steps over groups: the same tokens, and neither a hole nor a padding row is read."""

import pytest
import torch

from mini_engine.attention.contract import EVERY_KEY, Kernel
from mini_engine.attention.registry import load_kernel
from mini_engine.kv import pool_maker
from mini_engine.windows import store
from tests.shared.gpu_helpers import Counting, TapeCapture
from tests.shared.windows import checkpoint, engine_of
from tests.support import ask, check_answers, check_no_block_is_lost, drain, some_ids

pytestmark = pytest.mark.reference  # no task is about this


def masked_attention(q, k_cache, v_cache, batch, scale, window):
    """Attention that reads no value in a decode step, as a recorded kernel must. Keys that are not seen may be NaN."""
    cu_seqlens_q, seq_lens_kv, block_table = batch
    has_query = cu_seqlens_q[1:] > cu_seqlens_q[:-1]
    k, v = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))  # [S, reach, H_kv, D]
    position = torch.arange(k.shape[1], device=q.device)[None]
    seen = (position < seq_lens_kv[:, None]) & (position >= seq_lens_kv[:, None] - window)
    heads = q.shape[1] // k.shape[2]
    k, v = (torch.where(seen[:, :, None, None], x, 0).repeat_interleave(heads, 2) for x in (k, v))
    scores = torch.einsum("shd,skhd->shk", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.where(has_query[:, None, None], torch.einsum("shk,skhd->shd", weights, v), 0)


class Recordable(Kernel):
    """A kernel with the attention above in decode steps."""

    def __call__(self, *inputs):
        decoding = len(inputs[0]) == len(inputs[3].seq_lens_kv)
        return masked_attention(*inputs, self.wanted.window) if decoding else self.paged_attention(*inputs)


def load_recordable(*wanted, window=EVERY_KEY, **cache):
    """Return torch's kernel, with the attention above in decode steps."""
    plain = load_kernel("torch", window=window)
    return Recordable("torch", plain.paged_attention, wanted=plain.wanted)


def test_recorded_steps_give_the_same_tokens(monkeypatch):
    """The pool is full of NaN where nothing was written."""
    counting, prompts = Counting(TapeCapture()), [some_ids(length, 160, seed=length) for length in (9, 40, 75, 130)]
    monkeypatch.setattr(pool_maker, "load_kernel", load_recordable)
    monkeypatch.setattr(store, "windowed", lambda kernel, window: load_recordable(window=window))
    engine = engine_of("SSFS", 7, num_blocks=200, capture=counting)
    for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
        layer.fill_(float("nan"))
    for when in ("cold", "behind windows of the tree"):
        requests = ask(engine, prompts, 12, when)
        drain(engine)
        found = check_answers(requests, checkpoint("SSFS", 7), when)
    assert found == [(len(ids) - 1) // 8 * 8 for ids in prompts]
    assert len(counting.replayed) >= 11, "decode steps must be replayed"
    check_no_block_is_lost(engine)
