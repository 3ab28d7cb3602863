"""Lesson 1. The contiguous cache: rows, plans, counts, reused prefixes, and tokens equal to Hugging Face's."""

import pytest
import torch

from mini_engine.attention.dense import causal_attention
from mini_engine.base.errors import CacheFull
from mini_engine.engine.loop import generate
from mini_engine.kv import contiguous
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv, ContiguousMeta, reusable_prefix
from tests.support import FAMILIES, SMALL, both, first_difference, hf_greedy, must_raise, oracle, small_rows, some_ids


def filled(max_seq_len=8):
    kv = ContiguousKv(SMALL, max_seq_len)
    for layer in range(3):
        kv.K[layer].copy_(small_rows(max_seq_len, seed=layer))
        kv.V[layer].copy_(small_rows(max_seq_len, seed=10 + layer))
    return kv


@pytest.mark.task(1)
@pytest.mark.parametrize("where", [[3, 4], [6, 2]])
def test_set_kv_writes_the_rows_that_slot_mapping_names(where):
    kv = ContiguousKv(SMALL, 8)
    kv.K[1].zero_(), kv.V[1].zero_()
    k, v = small_rows(2, seed=1), small_rows(2, seed=2)
    kv.set_kv(1, torch.tensor(where), k, v)
    first, second = where
    for name, cache, given in (("k", kv.K[1], k), ("v", kv.V[1], v)):
        why = f"slot_mapping is {where}: {name}[0] and {name}[1] belong in rows {first} and {second} of {name.upper()}"
        if torch.equal(cache[[first + 1, second + 1]], given):
            why += ", and are one row late"
        assert torch.equal(cache[where], given), why
        written = cache.any(dim=(1, 2)).nonzero().flatten().tolist()
        assert written == sorted(where), f"a row of {name.upper()} that slot_mapping does not name has changed"


@pytest.mark.task(1)
def test_set_kv_keeps_layers_apart():
    kv = ContiguousKv(SMALL, 8)
    for tensor in (*kv.K, *kv.V):
        tensor.zero_()
    kv.set_kv(2, torch.tensor([0]), small_rows(1), small_rows(1))
    for name, layers in (("K", kv.K), ("V", kv.V)):
        written = [layer for layer, tensor in enumerate(layers) if tensor.any()]
        assert written == [2], f"write to the given layer and to no other: the layers whose {name} has changed"


@pytest.mark.task(1)
def test_set_kv_writes_in_place():
    kv = filled()
    before = [*kv.K, *kv.V]
    kv.set_kv(1, torch.tensor([3]), small_rows(1), small_rows(1))
    assert all(mine is kept for mine, kept in zip([*kv.K, *kv.V], before, strict=True)), (
        "K and V are allocated once, at the start: write into them; a new tensor would copy the whole cache"
    )


@pytest.mark.task(2)
def test_attend_reads_the_first_kv_len_rows_and_no_more():
    kv = filled()
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([4])
    meta = ContiguousMeta(positions, positions, kv_len=5)
    want = oracle(q, kv.K[0][:5], kv.V[0][:5])
    for first in (7, 5):  # the last row, then all that are not written
        for tensor in (*kv.K, *kv.V):
            tensor[first:] = float("nan")
        got = kv.attend(0, q, meta)
        clean = not got.isnan().any()
        assert clean, f"kv_len is 5, and a row from {first} on was read: it holds whatever was in memory, here NaN"
    why = "attention must read K and V of rows 0 … 4, all of them: kv_len is 5"
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, msg=lambda m: f"{why}\n{m}")


@pytest.mark.task(2)
def test_attend_reads_the_given_layer():
    kv, q = filled(), torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([7])
    for layer in range(3):
        got = kv.attend(layer, q, ContiguousMeta(positions, positions, kv_len=8))
        right = torch.allclose(got.double(), oracle(q, kv.K[layer], kv.V[layer]), atol=1e-5)
        assert right, f"attend({layer}, …) must read K and V of layer {layer}: was the layer index forgotten?"


@pytest.mark.task(2)
def test_attend_of_several_queries_is_causal():
    kv, q = filled(), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([3, 4])
    got = kv.attend(0, q, ContiguousMeta(positions, positions, kv_len=5))
    why = "two queries behind three cached tokens: the first sees rows 0 … 3, the second rows 0 … 4"
    want = oracle(q, kv.K[0][:5], kv.V[0][:5])
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, msg=lambda m: f"{why}\n{m}")


@pytest.mark.task(2)
def test_attend_copies_no_row(monkeypatch):
    kv, seen = filled(), []

    def spy(q, k, v, *more, **named):
        seen.extend([k, v])
        return causal_attention(q, k, v, *more, **named)

    monkeypatch.setattr(contiguous, "causal_attention", spy)
    positions = torch.tensor([4])
    kv.attend(1, torch.ones(1, 4, 8), ContiguousMeta(positions, positions, kv_len=5))
    in_place = [x.untyped_storage().data_ptr() for x in (kv.K[1], kv.V[1])]
    assert all(x.untyped_storage().data_ptr() in in_place for x in seen), (
        "the history was copied before attention read it: a slice is a view and copies nothing, an index copies"
    )


@pytest.mark.task(3)
@pytest.mark.parametrize("count", [1, 3])
def test_the_first_plan_feeds_the_prompt(count):
    planned(
        CachedSequence(ContiguousKv(SMALL, 8)).plan([5, 6, 7][:count]),
        positions=list(range(count)),
        kv_len=count,
        why="nothing is cached yet, so the whole prompt is fed",
    )


@pytest.mark.task(3)
def test_a_decode_feeds_one_token_at_its_own_position():
    sequence = CachedSequence(ContiguousKv(SMALL, 8))
    sequence.cur_len = 3
    why = "three tokens are cached: the fourth token is at position 3, its K and V go to row 3"
    planned(sequence.plan([5, 6, 7, 8]), positions=[3], kv_len=4, why=why)


@pytest.mark.task(3)
def test_a_prompt_behind_a_reused_prefix_feeds_the_rest():
    sequence = CachedSequence(ContiguousKv(SMALL, 8))
    sequence.cur_len = 3
    planned(sequence.plan([5, 6, 7, 8, 9]), positions=[3, 4], kv_len=5, why="three of five tokens are cached")


def planned(meta, *, positions, kv_len, why):
    """Check one plan; row = position."""
    for name, tensor in (("positions", meta.positions), ("slot_mapping", meta.slot_mapping)):
        assert tensor.tolist() == positions, f"{name}: {why}; row = position"
        assert tensor.dtype == torch.int64, f"{name}: torch indices are int64"
    assert meta.kv_len == kv_len, "kv_len: attention reads the rows written earlier and those of this step"


@pytest.mark.task(3)
def test_a_plan_is_on_the_device_of_the_cache():
    meta = CachedSequence(ContiguousKv(SMALL, 8, device="meta")).plan([5, 6, 7])
    devices = [meta.positions.device.type, meta.slot_mapping.device.type]
    assert devices == ["meta", "meta"], "the model and its cache are on one device: a plan must be on it too"


@pytest.mark.task(3)
def test_plan_alone_writes_nothing_and_counts_nothing():
    sequence = CachedSequence(ContiguousKv(SMALL, 8))
    sequence.plan([5, 6, 7])
    assert sequence.cur_len == 0, "cur_len counts tokens whose K and V are written; a plan writes none"


@pytest.mark.task(4)
@pytest.mark.parametrize("cur_len, fed", [(0, 3), (3, 1), (2, 3)])
def test_commit_counts_the_tokens_that_are_written(cur_len, fed):
    sequence = CachedSequence(ContiguousKv(SMALL, 8))
    sequence.cur_len = cur_len
    positions = torch.arange(cur_len, cur_len + fed)
    sequence.commit(ContiguousMeta(positions, positions, kv_len=cur_len + fed))
    assert sequence.cur_len == cur_len + fed, (
        f"{cur_len} tokens were written, and the step fed {fed}; the token just chosen has no K and V yet"
    )
    kind = type(sequence.cur_len).__name__
    assert kind == "int", "cur_len is a plain number"


@pytest.mark.task(3)
def test_a_full_cache_refuses_and_is_unchanged():
    sequence = CachedSequence(ContiguousKv(SMALL, 4))
    sequence.cur_len = 4
    with must_raise(CacheFull, "five tokens need five rows, and this cache has four: refuse before the step runs"):
        sequence.plan([1, 2, 3, 4, 5])
    assert sequence.cur_len == 4, "a plan that fails changes nothing"


@pytest.mark.task(3)
def test_a_cache_can_be_filled_to_its_last_row():
    try:
        kv_len = CachedSequence(ContiguousKv(SMALL, 4)).plan([1, 2, 3, 4]).kv_len
    except CacheFull as error:
        raise AssertionError("four tokens fit in a cache of four rows") from error
    assert kv_len == 4, "four tokens fit in four rows"


def test_the_cache_reserves_all_its_rows_at_once():
    for dtype in (torch.float32, torch.bfloat16):
        assert ContiguousKv(SMALL, 64, dtype).bytes == 64 * SMALL.kv_bytes_per_token(dtype), f"K and V in {dtype}"


@pytest.mark.task(5)
@pytest.mark.parametrize("keep", [0, 2, 5])
def test_truncate_keeps_the_first_tokens(keep):
    sequence = CachedSequence(filled())
    sequence.cur_len = 5
    kept = sequence.kv.K[0].clone()
    sequence.truncate(keep)
    assert sequence.cur_len == keep, f"truncate({keep}) keeps the first {keep} of 5 tokens"
    assert torch.equal(sequence.kv.K[0], kept), "nothing has to be cleared: later steps overwrite the rows first"


@pytest.mark.task(5)
@pytest.mark.parametrize("keep", [-1, 4])
def test_truncate_to_a_length_that_is_not_written_changes_nothing(keep):
    sequence = CachedSequence(ContiguousKv(SMALL, 8))
    sequence.cur_len = 3
    with must_raise(ValueError, f"three tokens are written, and {keep} cannot be kept: a row never written is noise"):
        sequence.truncate(keep)
    assert sequence.cur_len == 3, f"check before you change it: truncate({keep}) was refused"


@pytest.mark.task(6)
@pytest.mark.parametrize(
    "cached, prompt, expected",
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [7, 2, 3, 4], 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3, 4, 5], [1, 2, 9, 8], 2),
    ],
)
def test_reusable_prefix_counts_the_leading_tokens_that_are_equal(cached, prompt, expected):
    count = reusable_prefix(cached, prompt)
    assert count == expected, (
        f"cached {cached}, prompt {prompt}: count the leading tokens that are equal, at most all but the prompt's last"
    )


@pytest.mark.task(6)
def test_nothing_after_the_first_difference_is_reusable():
    count = reusable_prefix([1, 2, 3, 4, 5], [1, 9, 3, 4, 5, 6])
    assert count == 1, (
        "cached [1, 2, 3, 4, 5], prompt [1, 9, 3, 4, 5, 6]: "
        "3, 4 and 5 follow another token now, so their K and V differ"
    )


@pytest.mark.task(6)
@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3]])
def test_the_last_prompt_token_is_always_fed(prompt):
    count = reusable_prefix([1, 2, 3, 4], list(prompt))
    assert count == len(prompt) - 1, f"cached [1, 2, 3, 4], prompt {prompt}: the last one must be fed, for its logits"


@pytest.mark.task(6)
def test_reusable_prefix_modifies_no_list():
    cached, prompt = [1, 2, 3], [1, 2, 4, 5]
    reusable_prefix(cached, prompt)
    assert (cached, prompt) == ([1, 2, 3], [1, 2, 4, 5]), "both lists belong to the caller"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 63])
def test_tokens_equal_hugging_face(family, length):
    ours, hf = both(family)
    prompt = some_ids(length, ours.config.vocab_size)
    kv = ContiguousKv(ours.config, length + 24)
    for tensor in (*kv.K, *kv.V):
        tensor.fill_(float("nan"))  # what memory held before must not matter
    got, want = generate(ours, kv, CachedSequence(kv), prompt, 24), hf_greedy(hf, prompt, 24)
    part = first_difference(got, want)
    assert got == want, f"the answers differ from new token {part} on; 0 is the prefill, 1 the first decode"


def test_tokens_equal_hugging_face_after_a_thousand_tokens():
    ours, hf = both("two, tied, wide heads")
    prompt, kv = some_ids(1000, ours.config.vocab_size), ContiguousKv(ours.config, 1008)
    got, want = generate(ours, kv, CachedSequence(kv), prompt, 8), hf_greedy(hf, prompt, 8)
    assert got == want, "the answers differ"


def test_after_the_prompt_every_step_feeds_one_token():
    ours, _ = both("two, tied, wide heads")
    fed = []
    handle = ours.register_forward_pre_hook(lambda module, args: fed.append(len(args[0])))
    kv = ContiguousKv(ours.config, 32)
    generate(ours, kv, CachedSequence(kv), [1, 2, 3, 4], 5)
    handle.remove()
    assert fed == [4, 1, 1, 1, 1], f"fed {fed} tokens a step; after the prompt, one a step is enough"


def test_prompts_that_reuse_a_prefix_get_hugging_faces_tokens():
    ours, hf = both("two, tied, wide heads")
    first = some_ids(20, ours.config.vocab_size)
    other = [*first[:9], (first[9] + 1) % ours.config.vocab_size, *first[10:]]
    turn = [*first, *hf_greedy(hf, first, 8), 5, 6]
    kv = ContiguousKv(ours.config, 64)
    sequence, text, reused = CachedSequence(kv), [], []
    for prompt in (first, turn, first, other):
        sequence.truncate(reusable_prefix(text[: sequence.cur_len], prompt))
        for tensor in (*kv.K, *kv.V):
            tensor[sequence.cur_len :] = float("nan")  # what was truncated must not be read again
        reused.append(sequence.cur_len)
        got, want = generate(ours, kv, sequence, prompt, 8), hf_greedy(hf, prompt, 8)
        assert got == want, f"prompt {len(reused)}, after {reused[-1]} reused tokens, got other tokens"
        text = prompt + got
    assert reused == [0, 27, 19, 9], f"reused {reused} tokens; an answer's last token is never written"
