"""Lesson 1. The contiguous cache: rows, plans, counts, reused prefixes, and tokens equal to Hugging Face's."""

import pytest
import torch

from mini_engine.config import Qwen3Config
from mini_engine.engine.loop import generate
from mini_engine.errors import CacheFull
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv, ForwardMeta, reusable_prefix
from tests.support import FAMILIES, both, hf_greedy, oracle, some_ids

CONFIG = Qwen3Config(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def rows(count, seed=0):
    return torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(seed))


def filled(max_seq_len=8):
    kv = ContiguousKv(CONFIG, max_seq_len)
    for layer in range(3):
        kv.K[layer].copy_(rows(max_seq_len, seed=layer))
        kv.V[layer].copy_(rows(max_seq_len, seed=10 + layer))
    return kv


def test_set_kv_writes_the_rows_that_slot_mapping_names():
    kv = ContiguousKv(CONFIG, 8)
    kv.K[1].zero_(), kv.V[1].zero_()
    k, v = rows(2, seed=1), rows(2, seed=2)
    kv.set_kv(1, torch.tensor([3, 4]), k, v)
    assert torch.equal(kv.K[1][3:5], k) and torch.equal(kv.V[1][3:5], v), "k and v belong in rows 3 and 4 of K and V"
    assert not kv.K[1][:3].any() and not kv.K[1][5:].any(), "a row that was not named has changed: one row off?"


def test_set_kv_keeps_layers_apart():
    kv = ContiguousKv(CONFIG, 8)
    for tensor in (*kv.K, *kv.V):
        tensor.zero_()
    kv.set_kv(2, torch.tensor([0]), rows(1), rows(1))
    assert not kv.K[0].any() and not kv.K[1].any() and kv.K[2].any(), "write to the given layer and to no other"


def test_attend_reads_the_first_kv_len_rows_and_no_more():
    kv = filled()
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([4])
    meta = ForwardMeta(positions, positions, kv_len=5)
    want = oracle(q, kv.K[1][:5], kv.V[1][:5])
    for tensor in (*kv.K, *kv.V):
        tensor[5:] = float("nan")
    torch.testing.assert_close(kv.attend(1, q, meta).double(), want, atol=1e-5, rtol=1e-5)


def test_attend_reads_the_given_layer():
    kv, q = filled(), torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([7])
    got = [kv.attend(layer, q, ForwardMeta(positions, positions, kv_len=8)) for layer in range(3)]
    assert not torch.allclose(got[0], got[1]) and not torch.allclose(got[1], got[2]), "two layers gave the same result"


def test_the_first_plan_feeds_the_prompt():
    meta = CachedSequence(ContiguousKv(CONFIG, 8)).plan([5, 6, 7])
    assert meta.positions.tolist() == [0, 1, 2], "nothing is cached yet, so the whole prompt is fed"
    assert meta.slot_mapping.tolist() == [0, 1, 2], "row = position"
    assert meta.kv_len == 3, "this step writes three rows and reads them"


def test_a_decode_feeds_one_token_at_its_own_position():
    sequence = CachedSequence(ContiguousKv(CONFIG, 8))
    sequence.cur_len = 3
    meta = sequence.plan([5, 6, 7, 8])
    assert meta.positions.tolist() == [3], f"positions {meta.positions.tolist()}: the fourth token is at position 3"
    assert meta.slot_mapping.tolist() == [3], "its K and V go to row 3, right after the prompt's"
    assert meta.kv_len == 4, "it sees the three rows of the prompt and its own"


def test_plan_alone_writes_nothing_and_counts_nothing():
    sequence = CachedSequence(ContiguousKv(CONFIG, 8))
    sequence.plan([5, 6, 7])
    assert sequence.cur_len == 0, "cur_len counts tokens whose K and V are written; a plan writes none"


def test_after_a_prefill_of_t_tokens_cur_len_is_t():
    sequence = CachedSequence(ContiguousKv(CONFIG, 8))
    positions = torch.arange(3)
    sequence.commit(ForwardMeta(positions, positions, kv_len=3))
    assert sequence.cur_len == 3, f"cur_len is {sequence.cur_len}: the token just chosen has no K and V yet"


def test_a_full_cache_refuses_and_is_unchanged():
    sequence = CachedSequence(ContiguousKv(CONFIG, 4))
    sequence.cur_len = 4
    with pytest.raises(CacheFull):
        sequence.plan([1, 2, 3, 4, 5])
    assert sequence.cur_len == 4


def test_the_cache_reserves_all_its_rows_at_once():
    for dtype in (torch.float32, torch.bfloat16):
        assert ContiguousKv(CONFIG, 64, dtype).bytes == 64 * CONFIG.kv_bytes_per_token(dtype), f"K and V in {dtype}"


@pytest.mark.parametrize("keep", [0, 2, 5])
def test_truncate_keeps_the_first_tokens(keep):
    sequence = CachedSequence(ContiguousKv(CONFIG, 8))
    sequence.cur_len = 5
    sequence.truncate(keep)
    assert sequence.cur_len == keep, f"cur_len is {sequence.cur_len} after truncate({keep})"


@pytest.mark.parametrize("keep", [-1, 4])
def test_truncate_to_a_length_that_is_not_written_changes_nothing(keep):
    sequence = CachedSequence(ContiguousKv(CONFIG, 8))
    sequence.cur_len = 3
    with pytest.raises(ValueError):
        sequence.truncate(keep)
    assert sequence.cur_len == 3, f"cur_len is {sequence.cur_len}: check before you change it"


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
    assert reusable_prefix(cached, prompt) == expected, f"{cached} and {prompt} share {expected} leading tokens"


def test_nothing_after_the_first_difference_is_reusable():
    count = reusable_prefix([1, 2, 3, 4, 5], [1, 9, 3, 4, 5, 6])
    assert count == 1, f"{count} tokens reused: 3, 4 and 5 follow another token now, so their K and V differ"


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3]])
def test_the_last_prompt_token_is_always_fed(prompt):
    count = reusable_prefix([1, 2, 3, 4], prompt)
    assert count == len(prompt) - 1, f"{count} of {len(prompt)} reused: the last one must be fed, for its logits"


def test_a_cache_can_be_filled_to_its_last_row():
    assert CachedSequence(ContiguousKv(CONFIG, 4)).plan([1, 2, 3, 4]).kv_len == 4, "four tokens fit in four rows"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 63, 1000])
def test_tokens_equal_hugging_face(family, length):
    ours, hf = both(family)
    prompt = some_ids(length, ours.config.vocab_size)
    kv = ContiguousKv(ours.config, length + 64)
    for tensor in (*kv.K, *kv.V):
        tensor.fill_(float("nan"))  # what memory held before must not matter
    got, want = generate(ours, kv, CachedSequence(kv), prompt, 64), hf_greedy(hf, prompt, 64)
    part = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    assert got == want, f"the answers differ from new token {part} on; 0 is the prefill, 1 the first decode"


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
