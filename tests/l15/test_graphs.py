"""Lesson 15. Replayed decode steps over groups: the same tokens, and neither a hole nor a padding row is read."""

import pytest
import torch

from mini_engine.attention.contract import EVERY_KEY, Kernel
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.kv import pool_maker
from mini_engine.windows import store
from tests.l10.gpu_helpers import Counting, TapeCapture
from tests.l15.pocket import LENGTHS, PROMPTS, WINDOW, ask, check_answers, check_nothing_is_lost, drain, windows

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


def replaying(capture=no_graph, max_num_seqs=8, **options):
    """Return an engine over a pool full of NaN whose decode steps are replayed, and the count of replays."""
    counting = Counting(capture)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(capture, TapeCapture):
            patch.setattr(pool_maker, "load_kernel", load_recordable)
            patch.setattr(store, "windowed", lambda kernel, window: load_recordable(window=window))
        limits = SchedulerConfig(max_num_seqs=max_num_seqs)
        engine = windows(capture=counting, scheduler_config=limits, num_blocks=200, **options)
    return engine, counting


def test_recorded_steps_give_the_same_tokens():
    engine, counting = replaying(TapeCapture())
    for name in ("cold", "behind windows of the tree"):
        requests = ask(engine, name=name)
        drain(engine)
        found = check_answers(requests, name)
    assert found == [(length - 1) // 8 * 8 for length in LENGTHS]
    assert len(counting.replayed) >= 11, "decode steps must be replayed"
    check_nothing_is_lost(engine)


def test_a_step_s_tables_lie_where_the_last_ones_lay():
    engine, _ = replaying()
    runner, places = engine.runner, set()
    ask(engine)
    while engine.has_unfinished:
        engine.step()
        places.add(tuple(tensor.data_ptr() for tensor in runner.buffers.extras))
    assert len(places) == 1, "a graph has recorded where they were"
    slots, tables = runner.buffers.extras
    assert slots.shape == (3, 8) and tables.shape[:2] == (3, 8), "for each group, and each row"
    assert slots.dtype == torch.int64 and tables.dtype == torch.int32


def test_a_hole_is_null_in_the_buffers_and_so_is_padding():
    engine, _ = replaying()
    ask(engine, PROMPTS[1:], 16, ignore_eos=True)
    ask(engine, PROMPTS[:1], 6, name="short", ignore_eos=True)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        running = engine.scheduler.running
        if len(running) != 3 or not all(len(request.output_ids) > 7 for request in running):
            continue  # the short one, whose row is padding from now on, has not ended
        steps += 1
        slots, tables = engine.runner.host.extras
        for row, request in enumerate(running):
            fed = len(request.prompt_ids) + len(request.output_ids) - 2  # the position of the token that was fed
            holes = max(0, fed // 8 * 8 - WINDOW + 1) // 8
            assert tables[0, row, : fed // 8 + 1].all(), "the full layers' group has no hole"
            assert not tables[1:, row, :holes].any(), "what was freed must not stay in the buffers"
            assert tables[1:, row, holes : fed // 8 + 1].all(), "the blocks of the window are there"
        assert not slots[:, 3].any() and not tables[:, 3].any(), "three requests fill a size of four"
    assert steps > 5
