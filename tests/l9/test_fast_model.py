"""Lesson 9. A fast model is the same model: equal tokens in every store, independent rows, rejected input."""

from dataclasses import replace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.loop import generate
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
from tests.shared.compiled import needs_compiler
from tests.support import FAMILIES, both, checkpoint, hf_greedy, refused, some_ids, write_checkpoint

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 63]
NEW = 12


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


def prefill(model, *lengths):
    """Return the token ids, a new pool and the plan of a step that feeds prompts of these lengths."""
    pool, allocator = make_pool(model)
    prompts = [some_ids(length, model.config.vocab_size, seed=length) for length in lengths]
    requests = [PackedRequest(prompt, BlockTable(allocator)) for prompt in prompts]
    reserve_all(requests)
    return fed(requests), pool, plan_packed(requests, allocator.block_size, pool.device)


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
def test_a_timed_step_gives_the_same_logits_and_the_seconds_of_its_parts(torch_threads):
    torch.set_num_threads(2)
    model = fast_model()
    prompt = some_ids(200, model.config.vocab_size)
    want = alone(model, prompt, [])
    with model.model.timed() as seconds:
        assert torch.equal(alone(model, prompt, []), want)
        noted = seconds.clone()
        torch.set_num_threads(3)
        with pytest.raises(ValueError):
            alone(model, prompt, [])
    torch.set_num_threads(2)
    alone(model, prompt, [])
    assert noted.shape == (2, len(native.PARTS)) and (noted >= 0).all()
    assert (noted[:, [native.PARTS.index(part) for part in ("matrices", "heads", "attention")]] > 0).all()
    assert torch.equal(seconds, noted), "after the `with` block nothing is timed any more"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_sampled_skip_the_last_layer_and_nothing_else(dtype):
    model, results = fast_model(dtype=dtype), []
    for chosen in ([0, 1, 2], [1, 2], [0], [], None):
        ids, pool, meta = prefill(model, 9, 1, 14)
        rows = None if chosen is None else meta.cu_seqlens_q[1:].long()[chosen] - 1
        with torch.inference_mode():
            results.append((chosen, rows, model(ids, pool, meta, rows=rows), pool))
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
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("rows", [[3], [8, 0], [23, 9, 8], [8, 8], [9, 23], [*range(24)], [*range(23, -1, -1)]])
def test_rows_inside_a_sequence_or_in_any_order_may_be_requested(rows, dtype):
    model = fast_model()
    ids, pool, meta = prefill(model, 9, 1, 14)
    with torch.inference_mode():
        every = model(ids, pool, meta)
        assert torch.equal(model(ids, pool, meta, rows=torch.tensor(rows, dtype=dtype)), every[rows])


@needs_compiler
def test_the_last_norm_has_weights_of_its_own():
    slow, fast = (load_model(checkpoint(FAMILY)) for _ in range(2))
    weight = torch.randn(slow.model.norm.weight.shape)
    for model in (slow, fast):
        model.model.norm.weight.data.copy_(weight)
    fast = speed_up(fast, "packed")
    ids, pool, meta = prefill(fast, 9, 1)
    with torch.inference_mode():
        torch.testing.assert_close(fast(ids, pool, meta), slow(ids, pool, meta), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- rejected input


@pytest.fixture
def step():
    """Return a fast model, 9 tokens, a pool and a plan."""
    model = fast_model()
    return model, *prefill(model, 9)


def changed(table, index, value):
    table = table.clone()
    table[index] = value
    return table


@needs_compiler
@pytest.mark.parametrize(
    ("change", "kind", "values"),
    [
        (lambda ids, meta: (ids, replace(meta, slot_mapping=changed(meta.slot_mapping, 4, -1))), ValueError, "-1"),
        (lambda ids, meta: (ids, replace(meta, slot_mapping=changed(meta.slot_mapping, 4, 640))), ValueError, "640"),
        (lambda ids, meta: (ids, replace(meta, slot_mapping=meta.slot_mapping[:8])), ValueError, "8"),
        (lambda ids, meta: (ids, replace(meta, block_table=changed(meta.block_table, (0, 1), -1))), ValueError, "0"),
        (lambda ids, meta: (ids, replace(meta, block_table=changed(meta.block_table, (0, 1), 80))), ValueError, "0"),
        (lambda ids, meta: (ids[:8], meta), ValueError, "8 9"),
        (lambda ids, meta: (changed(ids, 3, -1), meta), IndexError, ""),
        (lambda ids, meta: (changed(ids, 3, 160), meta), IndexError, ""),
    ],
    ids=["slot -1", "slot 640", "8 slots", "block -1", "block 80", "8 tokens", "token -1", "token 160"],
)
def test_what_lies_outside_is_refused_before_anything_is_written(step, change, kind, values):
    model, ids, pool, meta = step
    with refused(kind, values):
        ids, meta = change(ids, meta)
        model(ids, pool, meta)
    assert pool.K[0].isnan().all(), "unchecked, C++ reads and writes out of bounds"


@needs_compiler
def test_another_models_pool_is_refused(step):
    model, ids, _, meta = step
    with pytest.raises(ValueError):
        model(ids, make_pool(fast_model("four, with biases"))[0], meta)


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
