"""Lesson 11. Replayed decode steps: the same tokens, and padding rows that touch no request's state."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.build import build_engine
from mini_engine.gpu.graphs import no_graph
from mini_engine.gpu.loop import generate_on_device
from mini_engine.hybrid import graphs
from mini_engine.hybrid.graphs import HybridGraphRunner, captured
from mini_engine.hybrid.runner import HybridRunner
from tests.l10.gpu_helpers import Counting, TapeCapture, masked_attention
from tests.l11.models import ask, both, check_nothing_is_lost, drain, greedy, hybrid
from tests.l11.test_device import storage
from tests.support import some_ids

NEW, FAMILY = 12, "every fourth attends"
pytestmark = pytest.mark.reference  # no task is about this

LENGTHS = (1, 2, 9, 17, 33)


def recordable(*inputs):
    """Attention that reads no value in a decode step, as a recorded kernel must."""
    decoding = len(inputs[0]) == len(inputs[4])
    return (masked_attention if decoding else load_kernel("reference").paged_attention)(*inputs)


def replaying(capture):
    """Return an engine over pools full of NaN whose decode steps are replayed, and the count of replays."""
    engine, counting = hybrid(FAMILY, num_blocks=100), Counting(capture)
    eager = engine.runner
    eager.pool.kv.kernel = recordable
    engine.runner = HybridGraphRunner(eager.model, eager.pool, eager.slot_of, 8, counting)
    states = eager.pool.states
    for tensor in (states.recurrent_state, states.conv_state, *eager.pool.kv.K, *eager.pool.kv.V):
        tensor.fill_(float("nan"))
    return engine, counting


@pytest.mark.parametrize("make_capture", [lambda: no_graph, TapeCapture], ids=["padded", "recorded"])
def test_tokens_equal_hugging_face_s_and_behind_checkpoints_too(make_capture):
    engine, counting = replaying(make_capture())
    prompts = [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]
    for name in ("cold", "warm"):
        requests = ask(engine, prompts, NEW, name)
        drain(engine)
        assert [r.output_ids for r in requests] == [greedy(FAMILY, prompt, NEW) for prompt in prompts], (
            f"{name}: a replayed step must read each row's state slot from the buffer"
        )
    assert len(counting.replayed) > NEW, "decode steps must be replayed"
    states = engine.scheduler.manager.states
    states.recurrent_state.nan_to_num_(0)  # slots that were never handed out
    check_nothing_is_lost(engine)


def test_padding_rows_advance_slot_0_only():
    engine, _ = replaying(no_graph)
    requests = ask(engine, [tuple(some_ids(length, 160)) for length in (3, 5, 6)], NEW)
    while any(len(request.output_ids) < 3 for request in requests):
        engine.step()
    manager = engine.scheduler.manager
    touched = {manager.slot_of(request.id) for request in requests} | manager.states.held_track_slots
    others = [slot for slot in range(1, manager.states.num_slots) if slot not in touched]
    assert manager.states.recurrent_state[:, others].isnan().all(), "three requests fill a size of four"


def test_a_captured_device_loop_gives_the_same_tokens():
    kv, prompts = storage(FAMILY), [tuple(some_ids(length, 160, seed=length)) for length in (1, 4, 11)]
    kv.pool.kv.kernel = recordable
    want = [greedy(FAMILY, prompt, 8) for prompt in prompts]
    assert generate_on_device(both(FAMILY)[0], kv, prompts, 8, capture=TapeCapture(nullcontext)) == want


@pytest.mark.parametrize(
    "device, kernel, replays", [("cuda", "triton", True), ("cuda", "torch", False), ("cpu", "cpu", False)]
)
def test_only_a_gpu_with_triton_replays(monkeypatch, device, kernel, replays):
    monkeypatch.setattr(graphs, "CudaCapture", lambda: "capture")
    monkeypatch.setattr(graphs, "HybridGraphRunner", lambda *arguments: arguments)
    runner = object.__new__(HybridRunner)
    pool = SimpleNamespace(device=torch.device(device), kv=SimpleNamespace(kernel=SimpleNamespace(name=kernel)))
    runner.model, runner.pool, runner.slot_of = "model", pool, "slot_of"
    found = captured(runner, 8)
    assert found == ("model", pool, "slot_of", 8, "capture") if replays else found is runner


def test_the_composition_root_asks_for_captured_steps():
    engine = build_engine(both(FAMILY)[0], backend="reference", num_blocks=20, cuda_graphs=True)
    assert type(engine.runner) is HybridRunner, "without a GPU decode steps run as before"
