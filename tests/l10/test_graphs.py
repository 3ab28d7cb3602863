"""Lesson 10. Replayed decode steps: padded to a capture size, in buffers that never move, with the same tokens."""

import functools
from array import array
from types import SimpleNamespace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu import graphs as graphs_module
from mini_engine.gpu.graphs import CudaCapture, DecodeBuffers, GraphRunner, capture_sizes_up_to, no_graph, runner_for
from mini_engine.kv.block_tensor import KvPool
from mini_engine.pocket import POCKET_DIR
from tests.shared.gpu_helpers import Counting, Decoding, TapeCapture, answers, graph_engine, recordable
from tests.support import FAMILIES, both, hf_greedy, some_ids

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 3, 4, 5, 9, 17]
CPU = torch.device("cpu")
some_families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in (FAMILY, "four, with biases") else pytest.mark.nightly)
        for name in FAMILIES
    ],
)


def prompts_of(family, lengths=LENGTHS):
    vocab_size = both(family)[1].config.vocab_size
    return [some_ids(length, vocab_size, seed=length) for length in lengths]


@functools.cache
def alone(family):
    """Hugging Face's answer to each prompt, alone."""
    _, hf = both(family)
    return [hf_greedy(hf, prompt, 8 + i % 3) for i, prompt in enumerate(prompts_of(family))]


def decode_chunks(lengths, block_size=4):
    """Return one decode chunk for each length; blocks are numbered from 1."""
    chunks, first = [], 1
    for length in lengths:
        count = -(-length // block_size)
        chunks.append(Chunk(Decoding(length), length - 1, length, array("i", range(first, first + count))))
        first += count
    return chunks


# Capture sizes


def test_the_capture_sizes_are_1_2_4_8_and_then_every_8th():
    assert capture_sizes_up_to(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert capture_sizes_up_to(64)[-3:] == [48, 56, 64]


@pytest.mark.parametrize("max_rows", [*range(1, 20), 31, 32, 33, 100])
def test_every_batch_finds_a_size_that_is_not_much_larger(max_rows):
    capture_sizes = capture_sizes_up_to(max_rows)
    assert capture_sizes == sorted(set(capture_sizes)) and capture_sizes[-1] == max_rows, (
        "the last size must be the largest possible batch"
    )
    for count in range(1, max_rows + 1):
        size = min(size for size in capture_sizes if size >= count)
        assert size - count < 8 and size < 2 * count + 1, f"{count} rows are padded to {size}"


def test_capture_sizes_for_no_rows_are_refused():
    with pytest.raises(UserError):
        capture_sizes_up_to(0)


# The buffers


def buffers_of(max_rows=8, max_blocks=6):
    return DecodeBuffers(max_rows, max_blocks, 4, vocab_size=5, dtype=torch.float32, device=CPU)


def filled(lengths, size, buffers=None):
    buffers = buffers or buffers_of()
    buffers.fill(plan_step(decode_chunks(lengths), 4, CPU), size)
    return buffers


@pytest.mark.task(1)
def test_a_step_fills_the_first_rows():
    buffers = filled([5, 2, 9], 4)
    assert buffers.token_ids[:3].tolist() == [5, 2, 9], "token_ids must begin with the tokens that the step feeds"
    assert buffers.positions[:3].tolist() == [4, 1, 8], "positions must begin with the step's"
    assert buffers.slot_mapping[:3].tolist() == [2 * 4, 3 * 4 + 1, 6 * 4], "slot = block * 4 + offset"
    assert buffers.seq_lens_kv[:3].tolist() == [5, 2, 9], "seq_lens_kv must begin with the step's"
    assert buffers.cu_seqlens_q[:4].tolist() == [0, 1, 2, 3], "each row of the step feeds one query"
    assert buffers.block_table[:3, :3].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]], "the step's block table, in place"


@pytest.mark.task(1)
def test_a_step_that_needs_no_padding_fills_its_size():
    buffers = filled([5, 2], 2, filled([9] * 8, 8))
    assert buffers.token_ids[:2].tolist() == [5, 2] and buffers.cu_seqlens_q[:3].tolist() == [0, 1, 2]
    assert buffers.seq_lens_kv[:2].tolist() == [5, 2] and buffers.block_table[:2, :2].tolist() == [[1, 2], [3, 0]]


@pytest.mark.task(1)
def test_padding_rows_have_no_query_no_keys_and_the_null_block_to_write_into():
    buffers = filled([5, 2, 9], 8, filled([9] * 8, 8))
    sums = buffers.cu_seqlens_q.tolist()
    why = (
        "padding rows were given a query each"
        if sums[4:] == [4, 5, 6, 7, 8]
        else "after the last query the sum stays 3"
    )
    assert sums == [0, 1, 2, 3, 3, 3, 3, 3, 3], f"cu_seqlens_q of three queries and five padding rows: {why}"
    assert buffers.seq_lens_kv[3:].tolist() == [0] * 5, "a padding row has no keys: clear those of the step before"
    assert buffers.slot_mapping[3:].tolist() == [0] * 5, (
        "padding rows must write into the null block, never into a live one"
    )
    assert buffers.block_table[3:, :3].tolist() == [[0, 0, 0]] * 5, "a padding row's table must be null blocks"
    assert (buffers.token_ids[3:].tolist(), buffers.positions[3:].tolist()) == ([0] * 5, [0] * 5), (
        "(token ids, positions): a padding row is token 0 at position 0, whatever the step before left there"
    )


@pytest.mark.task(1)
def test_buffers_never_move_and_keep_their_dtypes():
    buffers = buffers_of()
    before = {name: (x.data_ptr(), x.dtype) for name, x in vars(buffers).items() if isinstance(x, torch.Tensor)}
    for lengths, size in (([5, 2, 9], 4), ([1], 1), ([3] * 7, 8)):
        filled(lengths, size, buffers)
        after = {name: (x.data_ptr(), x.dtype) for name, x in vars(buffers).items() if isinstance(x, torch.Tensor)}
        changed = [name for name in after if after[name] != before[name]]
        assert changed == [], (
            "a graph reads the addresses that it recorded: copy into the buffers, and keep their dtypes"
        )


@pytest.mark.task(1)
def test_a_sizes_plan_is_a_view_of_the_buffers():
    buffers = buffers_of()
    meta = buffers.meta(4)
    filled([5, 2, 9], 4, buffers)
    assert meta.seq_lens_kv.tolist() == [5, 2, 9, 0], "an existing plan must show what is copied into the buffers later"
    assert len(meta.cu_seqlens_q) == 5 and meta.block_table.shape == (4, 6) and meta.block_size == 4
    for name in ("cu_seqlens_q", "seq_lens_kv", "block_table"):
        assert getattr(meta, name).dtype == torch.int32, f"{name}: kernel tables are int32"
    for name in ("positions", "slot_mapping"):
        assert getattr(meta, name).dtype == torch.int64, f"{name}: torch indexes with int64"


# The runner


@pytest.mark.task(2)
def test_the_largest_size_is_captured_first():
    sizes = []

    def note(work):
        work()
        sizes.append(len(seen[-1]))
        return work

    seen = []
    model = spy_on(both(FAMILY)[0], seen)
    GraphRunner(ModelRunner(model, pool_for(model)), 12, note)
    assert sizes == [12, 8, 4, 2, 1], "small graphs fit into the memory of large ones: capture those first"


def spy_on(model, seen):
    """Wrap a model; append the token ids of each call to `seen`."""

    class Spy:
        config, dtype, device = model.config, model.dtype, model.device

        def __call__(self, token_ids, kv, meta, rows=None):
            seen.append(token_ids)
            return model(token_ids, kv, meta, rows)

    return Spy()


def pool_for(model, kernel="torch", num_blocks=64):
    """Return a pool of zeros: some tests run steps whose history was never written."""
    pool = KvPool(model.config, num_blocks, 4, load_kernel(kernel))
    for tensor in (*pool.K, *pool.V):
        tensor.zero_()
    return pool


@pytest.mark.task(2)
def test_capturing_writes_nothing_outside_the_null_block():
    model = both(FAMILY)[0]
    pool = pool_for(model)

    def runs_once(work):  # as a recording does; no_graph alone does not run it
        work()
        return work

    runner = GraphRunner(ModelRunner(model, pool), 12, runs_once)
    for again in (False, True):
        runner.buffers.slot_mapping.fill_(9 if again else 0)  # as a step leaves it: a slot of block 2
        for tensor in (*pool.K, *pool.V):
            tensor.fill_(7)
        runner.capture_all()
        intact = all(tensor[1:].eq(7).all() for tensor in (*pool.K, *pool.V))
        when = "after a step" if again else "at first"
        assert intact, f"capturing {when} wrote into a request's block: clear the buffers, to make every row padding"


@pytest.mark.task(2)
def test_every_size_is_captured_again_when_the_pool_has_other_tensors():
    model = both(FAMILY)[0]
    counting = Counting()
    runner = GraphRunner(ModelRunner(model, pool_for(model)), 4, counting)
    runner.fill = lambda chunks, size: None  # task 1's
    for num_blocks, captured in ((64, 3), (32, 6), (32, 6)):
        for layers in (runner.pool.K, runner.pool.V):
            layers[:] = [layer[:num_blocks].clone() for layer in layers]
        runner.run(decode_chunks([3, 4]))
        assert counting.captured == captured, (
            "sizes captured: all at first, and all again only when the pool is another"
        )


@pytest.mark.task(2)
def test_each_batch_size_takes_its_size_and_prefills_and_mixed_steps_take_none():
    counting = Counting()
    model = both(FAMILY)[0]
    runner = GraphRunner(ModelRunner(model, pool_for(model)), 12, counting)
    runner.fill = lambda chunks, size: None  # task 1's
    assert counting.captured == len(runner.capture_sizes) == 5

    def size_of(chunks):
        counting.replayed.clear()
        runner.run(chunks)
        return [runner.capture_sizes[::-1][number] for number in counting.replayed]

    sizes = [size_of(decode_chunks([2] * count)) for count in (1, 2, 3, 8, 9, 12)]
    assert sizes == [[1], [2], [4], [8], [12], [12]], "decodes of 1, 2, 3, 8, 9 and 12 requests: one replay each"
    prompt = Chunk(Decoding(6), 0, 6, array("i", [40, 41]))
    middle = Chunk(Decoding(6), 2, 3, array("i", [40, 41]))
    assert size_of([prompt]) == [], "a prompt must not be replayed"
    assert size_of([*decode_chunks([2, 2]), prompt]) == [], "a mixed step must not be replayed"
    assert size_of([*decode_chunks([2, 2]), middle]) == [], "a one-token chunk in mid-prompt samples no token"
    assert size_of(decode_chunks([2] * 13)) == [], "more rows than the largest size must not be replayed"


def test_a_step_s_logits_stay_what_they_were_when_the_next_step_runs():
    model = both(FAMILY)[0]
    runner = GraphRunner(ModelRunner(model, pool_for(model)), 4, no_graph)
    first = runner.run(decode_chunks([3, 4]))
    kept = first.clone()
    runner.run(decode_chunks([7, 8]))
    assert torch.equal(first, kept), "the next step overwrote the logits that this one returned"


@some_families
def test_a_recorded_decode_gives_the_same_tokens(family):
    """A tape fixes addresses, shapes and numbers, and does not run the model's Python again."""

    tape = TapeCapture()
    engine = graph_engine(both(family)[0], tape, recordable)
    counting = Counting()
    engine.runner.replays = {size: counting(replay) for size, replay in engine.runner.replays.items()}
    assert answers(engine, prompts_of(family)) == alone(family), "a recorded step must be right in every later step"
    assert tape.runs == 2 * len(engine.runner.capture_sizes) and len(counting.replayed) > 5


def test_the_table_of_the_buffers_is_as_wide_as_a_sequence_can_become():
    model = both(FAMILY)[0]
    for num_blocks in (10, 100_000):
        kernel = load_kernel("torch")
        pool = SimpleNamespace(num_blocks=num_blocks, block_size=4, kernel=kernel, device=CPU, K=[torch.zeros(1, 4)])
        runner = object.__new__(GraphRunner)
        runner.capture_all = lambda: None
        GraphRunner.__init__(runner, ModelRunner(model, pool), 2, no_graph)
        want = min(num_blocks - 1, -(-model.config.max_position_embeddings // 4))
        assert runner.buffers.block_table.shape == (2, want), (
            "no sequence has more blocks than the pool without its null block, or than its positions need"
        )


@pytest.mark.parametrize("name, graphs", [("triton", True), ("torch", False), ("reference", False)])
def test_on_a_gpu_only_triton_s_steps_are_captured(monkeypatch, name, graphs):
    if name == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(graphs_module, "CudaCapture", lambda: "capture")
    monkeypatch.setattr(graphs_module, "GraphRunner", lambda *arguments: ("graphs", *arguments))
    pool = SimpleNamespace(device=torch.device("cuda"), kernel=load_kernel(name, "cuda"))
    eager = SimpleNamespace(pool=pool)
    assert runner_for(eager, 8) == (("graphs", eager, 8, "capture", graphs_module.NO_EXTRAS) if graphs else eager), (
        "all kernels but triton read lengths on the host, which cannot be captured"
    )


def test_without_a_gpu_the_plain_runner_is_used():
    model = both(FAMILY)[0]
    eager = ModelRunner(model, pool_for(model))
    assert runner_for(eager, 8) is eager


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_decode_gives_the_tokens_of_eager_decode(dtype):
    model = load_model(POCKET_DIR, dtype, "cuda")
    prompts = [some_ids(length, model.config.vocab_size, seed=length) for length in LENGTHS]

    def engine():
        return Engine.for_model(model, num_blocks=256, scheduler_config=SchedulerConfig(max_num_seqs=12, watermark=0))

    captured = engine()
    captured.runner = GraphRunner(captured.runner, 12, CudaCapture())
    assert answers(captured, prompts, 24) == answers(engine(), prompts, 24)


@pytest.mark.gpu
def test_a_gpu_with_triton_gets_graphs():
    model = load_model(POCKET_DIR, torch.bfloat16, "cuda")
    pool = KvPool(model.config, 64, 16, load_kernel("triton", "cuda", torch.bfloat16), torch.bfloat16, "cuda")
    assert isinstance(runner_for(ModelRunner(model, pool), 8), GraphRunner)
