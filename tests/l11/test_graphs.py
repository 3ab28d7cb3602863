"""Lesson 11. Recorded decode steps: the same tokens."""

import pytest

from lessons.l10_device.loop import generate_on_device
from mini_engine.assembly.build import build_engine
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.runner import ModelRunner
from mini_engine.kv import pool_maker
from tests.l10.gpu_helpers import Counting, TapeCapture, masked_attention
from tests.l11.models import ask, both, check_nothing_is_lost, drain, greedy, hybrid
from tests.l11.test_device import storage
from tests.support import some_ids

NEW, FAMILY = 12, "every fourth attends"
pytestmark = pytest.mark.reference  # no task is about this

LENGTHS = (1, 2, 9, 17, 33)


def recordable(*inputs):
    """Attention that reads no value in a decode step, as a recorded kernel must."""
    decoding = len(inputs[0]) == len(inputs[3].seq_lens_kv)
    return (masked_attention if decoding else load_kernel("reference").paged_attention)(*inputs)


def replaying(capture):
    """Return an engine over pools full of NaN whose decode steps are replayed, and the count of replays."""
    counting = Counting(capture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_maker, "load_kernel", lambda *which, **cache: recordable)
        engine = hybrid(FAMILY, num_blocks=100, capture=counting)
    pool = engine.runner.pool
    for tensor in (pool.states.recurrent_state, pool.states.conv_state, *pool.kv.K, *pool.kv.V):
        tensor.fill_(float("nan"))
    return engine, counting


def test_recorded_steps_give_hugging_face_s_tokens_and_behind_checkpoints_too():
    engine, counting = replaying(TapeCapture())
    prompts = [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]
    for name in ("cold", "warm"):
        requests = ask(engine, prompts, NEW, name)
        drain(engine)
        assert [r.output_ids for r in requests] == [greedy(FAMILY, prompt, NEW) for prompt in prompts], (
            f"{name}: a replayed step must read each row's state slot from the buffer"
        )
    assert len(counting.replayed) > NEW, "decode steps must be replayed"
    states = engine.runner.pool.states
    states.recurrent_state.nan_to_num_(0)  # slots that were never handed out
    check_nothing_is_lost(engine)


def test_a_captured_device_loop_gives_the_same_tokens():
    kv, prompts = storage(FAMILY), [tuple(some_ids(length, 160, seed=length)) for length in (1, 4, 11)]
    kv.pool.blocks.kernel = recordable
    want = [greedy(FAMILY, prompt, 8) for prompt in prompts]
    assert generate_on_device(both(FAMILY)[0], kv, prompts, 8, capture=TapeCapture()) == want


def test_the_composition_root_asks_for_captured_steps():
    engine = build_engine(both(FAMILY)[0], backend="reference", num_blocks=20)
    assert type(engine.runner) is ModelRunner, "without a GPU decode steps run as before"
