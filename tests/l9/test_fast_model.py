"""Lesson 9. A fast model is the same model: equal tokens in every store, independent rows, rejected input."""

import time
from dataclasses import replace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.loop import generate
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
from mini_engine.kv.no_cache import NoCache, Recompute
from mini_engine.kv.token_flat import FlatKvPool, FlatRequest, PagedSequence
from mini_engine.layers import native, speed_up, torch_layers
from mini_engine.layers.packed_step import starts_of
from mini_engine.model.decoder import Decoder
from mini_engine.model.qwen3 import qwen3_model
from tests.support import FAMILIES, both, checkpoint, hf_greedy, refused, some_ids, write_checkpoint

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 63]
NEW = 12


def has_compiler():
    try:
        native.Functions(torch.float32)
    except UserError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NOT CHECKED: packed weights in C++; no compiler")
backends = pytest.mark.parametrize("backend", [pytest.param("packed", marks=needs_compiler), "torch"])


def fast_model(family=FAMILY, backend="packed", dtype=torch.float32):
    return speed_up(load_model(checkpoint(family), dtype), backend)


def make_pool(model, num_blocks=80, block_size=8, kernel="auto"):
    dtype = model.dtype
    pool = KvPool(model.config, num_blocks, block_size, load_kernel(kernel, "cpu", dtype), dtype)
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(float("nan"))  # the null block, and every slot not yet written
    return pool, BlockAllocator(num_blocks, block_size)


def fed(requests):
    return torch.tensor([token for r in requests for token in r.token_ids[r.cur_len :]])


# ---------------------------------------------------------------- tokens


def stores(config):
    """Yield every kind of store for one sequence from lessons 0 to 2, with the sequence's plan."""
    yield NoCache(), Recompute()
    contiguous = ContiguousKv(config, 100)
    yield contiguous, CachedSequence(contiguous)
    flat, allocator = FlatKvPool(config, 96), BlockAllocator.for_slots(96)
    yield flat, PagedSequence(FlatRequest([]), flat, allocator)


@backends
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_hugging_face_through_every_store_of_one_sequence(family, backend):
    model, hf = fast_model(family, backend), both(family)[1]
    prompt = some_ids(17, hf.config.vocab_size, seed=17)
    want = hf_greedy(hf, prompt, NEW)
    for kv, sequence in stores(model.config):
        if isinstance(sequence, PagedSequence):
            sequence.request.prompt_ids = prompt
        assert generate(model, kv, sequence, prompt, NEW) == want, (
            f"{type(kv).__name__}: the tokens differ from Hugging Face's"
        )


@backends
@pytest.mark.parametrize(
    "family, kernel",
    [
        pytest.param(family, kernel, marks=[pytest.mark.nightly] if kernel != "auto" and family != FAMILY else [])
        for family in FAMILIES
        for kernel in ("auto", "torch", "reference")
    ],
)
def test_tokens_equal_hugging_face_in_batches_and_chunks(family, kernel, backend):
    model, hf = fast_model(family, backend), both(family)[1]
    engine = Engine.for_model(model, num_blocks=80, block_size=8, kernel=kernel)
    prompts = [some_ids(length, hf.config.vocab_size, seed=length) for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        assert request.error is None
        want = hf_greedy(hf, request.prompt_ids, NEW)
        assert request.output_ids == want, f"prompt of {len(request.prompt_ids)} tokens: other tokens than alone"


@pytest.mark.parametrize("length", [10, 11, 23])
def test_pieces_of_a_long_prompt_change_no_token(monkeypatch, length):
    monkeypatch.setattr(torch_layers, "PIECE", 5)
    model, hf = fast_model(FAMILY, "torch"), both(FAMILY)[1]
    prompt = some_ids(length, hf.config.vocab_size, seed=length)
    assert generate(model, NoCache(), Recompute(), prompt, NEW) == hf_greedy(hf, prompt, NEW)


@backends
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_equal_the_slow_models_up_to_rounding(family, backend):
    slow, fast = load_model(checkpoint(family), torch.bfloat16), fast_model(family, backend, torch.bfloat16)
    ids = torch.tensor(some_ids(33, slow.config.vocab_size))
    with torch.inference_mode():
        meta = Recompute().plan(ids.tolist())
        want, got = (model(ids, NoCache(), meta).float() for model in (slow, fast))
        exact = both(family)[0](ids, NoCache(), meta)
    own = float((want - exact).norm() / exact.norm())
    assert float((got - exact).norm() / exact.norm()) < 1.3 * own + 1e-3, "the error is larger than bfloat16 explains"


@backends
def test_a_stretched_context_is_stretched_here_too(tmp_path, backend):
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    directory = write_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=128)
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = speed_up(load_model(directory), backend)
    ids = some_ids(90, model.config.vocab_size)
    with torch.inference_mode():
        got = model(torch.tensor(ids), NoCache(), Recompute().plan(ids))
        want = hf(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, msg=lambda m: f"YaRN's frequencies are missing: {m}")


# ---------------------------------------------------------------- rows of a batch


def forward(model, requests, pool, allocator):
    """Run a step; return the logits of each request's last token."""
    reserve_all(requests)
    meta = plan_packed(requests, allocator.block_size, pool.device)
    with torch.inference_mode():
        logits = model(fed(requests), pool, meta, rows=meta.cu_seqlens_q[1:].long() - 1)
    for request in requests:
        request.cur_len = len(request.token_ids)
    return logits


def alone(model, prompt, tokens):
    """Return the logits after a prompt and after each of `tokens`, `[1 + len(tokens), vocab]`, in a batch of one."""
    pool, allocator = make_pool(model)
    request = PackedRequest(list(prompt), BlockTable(allocator))
    rows = [forward(model, [request], pool, allocator)]
    for token in tokens:
        request.output_ids.append(token)
        rows.append(forward(model, [request], pool, allocator))
    return torch.cat(rows)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_every_batch(family, dtype):
    model = fast_model(family, dtype=dtype)
    prompts = [some_ids(length, model.config.vocab_size, seed=length) for length in LENGTHS]
    tokens = some_ids(3, model.config.vocab_size, seed=99)
    want = [alone(model, prompt, tokens) for prompt in prompts]
    pool, allocator = make_pool(model)
    requests = []
    for step in range(len(LENGTHS) + 3):  # one more joins at every step: decodes and whole prompts side by side
        if step < len(LENGTHS):
            requests.append(PackedRequest(list(prompts[step]), BlockTable(allocator)))
        logits = forward(model, requests, pool, allocator)
        for i, (request, row) in enumerate(zip(requests, logits, strict=True)):
            at = len(request.output_ids)
            if at <= len(tokens):
                assert torch.equal(row, want[i][at]), f"prompt {i}, new token {at}: other bits than alone"
            request.output_ids.append(tokens[at] if at < len(tokens) else 0)


@needs_compiler
def test_a_timed_step_gives_the_same_logits_and_its_parts_take_no_longer_than_it_does():
    model = fast_model()
    prompt = some_ids(200, model.config.vocab_size)
    want = alone(model, prompt, [])
    threads = torch.get_num_threads()
    with model.model.timed() as seconds:
        begun = time.perf_counter()
        got = alone(model, prompt, [])
        taken = time.perf_counter() - begun
        noted = seconds.clone()
        torch.set_num_threads(threads + 1)
        try:
            with pytest.raises(ValueError):
                alone(model, prompt, [])
        finally:
            torch.set_num_threads(threads)
    alone(model, prompt, [])
    assert torch.equal(got, want)
    assert noted.shape == (threads, len(native.PARTS))
    assert (noted[:, [native.PARTS.index(part) for part in ("matrices", "heads", "attention")]] > 0).all()
    assert (noted >= 0).all() and noted.sum(1).max() <= taken, "a thread cannot work longer than the step takes"
    assert torch.equal(seconds, noted), "after the `with` block nothing is timed any more"


@needs_compiler
def test_padded_rows_change_nothing():
    model = fast_model()
    pool, allocator = make_pool(model)
    request = PackedRequest(some_ids(9, model.config.vocab_size), BlockTable(allocator))
    reserve_all([request])
    meta = plan_packed([request], 8, pool.device)
    with torch.inference_mode():
        want = model(fed([request]), pool, meta)
        padded = replace(
            meta,
            positions=torch.cat((meta.positions, torch.zeros(3, dtype=torch.int64))),
            slot_mapping=torch.cat((meta.slot_mapping, torch.arange(3))),  # in the null block
        )
        got = model(torch.cat((fed([request]), torch.zeros(3, dtype=torch.int64))), pool, padded)
    assert torch.equal(got[:9], want)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_sampled_skip_the_last_layer_and_nothing_else(dtype):
    model = fast_model(dtype=dtype)
    prompts = [some_ids(length, model.config.vocab_size, seed=length) for length in (9, 1, 14)]
    results = []
    for chosen in ([0, 1, 2], [1, 2], [0], [], None):
        pool, allocator = make_pool(model)
        requests = [PackedRequest(list(prompt), BlockTable(allocator)) for prompt in prompts]
        reserve_all(requests)
        meta = plan_packed(requests, allocator.block_size, pool.device)
        rows = None if chosen is None else meta.cu_seqlens_q[1:].long()[chosen] - 1
        with torch.inference_mode():
            results.append((chosen, rows, model(fed(requests), pool, meta, rows=rows), pool))
    *some, (_, _, every, full) = results
    for chosen, rows, logits, pool in some:
        assert torch.equal(logits, every[rows]), f"sequences {chosen}: other bits than when all rows are computed"
        for ours, its in zip((*pool.K, *pool.V), (*full.K, *full.V), strict=True):
            assert torch.equal(ours.nan_to_num(7), its.nan_to_num(7)), "every token's K and V are needed in every layer"


def test_attention_sees_one_query_for_each_sampled_row():
    starts = torch.tensor([0, 9, 10, 10, 24], dtype=torch.int32)  # the third sequence feeds nothing
    told = starts_of(torch.tensor([9, 23]), starts)
    assert told.tolist() == [0, 0, 1, 1, 2] and told.dtype == torch.int32, "the first and the third have no query here"
    assert starts_of(torch.tensor([8, 12]), starts) is None, (
        "row 12 is not its sequence's last: it must not see all keys"
    )


@needs_compiler
@pytest.mark.parametrize("rows", [[3], [8, 0], [23, 9, 8], [8, 8]])
def test_rows_inside_a_sequence_or_in_any_order_may_be_requested(rows):
    model = fast_model()
    pool, allocator = make_pool(model)
    prompts = [some_ids(length, model.config.vocab_size, seed=length) for length in (9, 1, 14)]
    requests = [PackedRequest(prompt, BlockTable(allocator)) for prompt in prompts]
    reserve_all(requests)
    meta = plan_packed(requests, allocator.block_size, pool.device)
    with torch.inference_mode():
        every = model(fed(requests), pool, meta)
        assert torch.equal(model(fed(requests), pool, meta, rows=torch.tensor(rows)), every[rows])


# ---------------------------------------------------------------- rejected input


@pytest.fixture
def step():
    """Return a fast model, a pool, a plan for 9 tokens, and the tokens."""
    model = fast_model()
    pool, allocator = make_pool(model)
    request = PackedRequest(some_ids(9, model.config.vocab_size), BlockTable(allocator))
    reserve_all([request])
    return model, pool, plan_packed([request], 8, pool.device), fed([request])


@needs_compiler
@pytest.mark.parametrize("stray", [-1, 640])
def test_slots_outside_the_pool_are_refused_before_anything_is_written(step, stray):
    model, pool, meta, ids = step
    slots = meta.slot_mapping.clone()
    slots[4] = stray
    with pytest.raises(ValueError, match=str(stray)):
        model(ids, pool, replace(meta, slot_mapping=slots))
    assert pool.K[0].isnan().all(), "unchecked, C++ writes out of bounds"


@needs_compiler
@pytest.mark.parametrize("stray", [-1, 80])
def test_blocks_outside_the_pool_are_refused(step, stray):
    model, pool, meta, ids = step
    table = meta.block_table.clone()
    table[0, 1] = stray
    with refused(ValueError, "block_table 0"):
        model(ids, pool, replace(meta, block_table=table))


@needs_compiler
def test_a_plan_for_other_tokens_is_refused(step):
    model, pool, meta, ids = step
    with refused(ValueError, "8 9"):
        model(ids[:8], pool, meta)
    with refused(ValueError, "8"):
        model(ids, pool, replace(meta, slot_mapping=meta.slot_mapping[:8]))


@needs_compiler
def test_another_models_pool_is_refused(step):
    model, _, meta, ids = step
    other = make_pool(fast_model("four, with biases"))[0]
    with pytest.raises(ValueError):
        model(ids, other, meta)


@needs_compiler
@pytest.mark.parametrize("stray", [-1, 160])
def test_tokens_outside_the_vocabulary_are_refused(step, stray):
    model, pool, meta, ids = step
    ids[3] = stray
    with pytest.raises(IndexError):
        model(ids, pool, meta)


def test_an_unknown_backend_is_refused():
    model = load_model(checkpoint(FAMILY))
    with refused(UserError, "auto packed torch"):
        speed_up(model, "faster")
    with refused(UserError, "meta"), torch.device("meta"):
        speed_up(qwen3_model(model.config))
    assert type(model.model) is Decoder, "a rejected model must be unchanged"


def test_a_model_is_made_fast_once():
    model = load_model(checkpoint(FAMILY))
    fast = speed_up(model)
    assert speed_up(fast) is fast
    assert type(model.model) is Decoder, "the caller's object must keep its layers"
    assert (fast.dtype, fast.device.type) == (torch.float32, "cpu")
