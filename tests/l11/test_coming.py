"""Lesson 11. Checkpoints on their way: a request waits for one that it can use, and for no other."""

import pytest

from tests.l11.ledger import admit, compute, manager, places, serve

PROMPT = list(range(100, 121))  # 21 tokens: five whole blocks of 4
ELSEWHERE = [1] * 9


def waits(kv, tokens) -> bool:
    """Whether a request with this prompt should wait."""
    return kv.cost(tokens, len(tokens)).should_wait


def drop(kv, length) -> None:
    """Evict the checkpoint after this many tokens."""
    node = next(node for node in kv.checkpoints.slots if sum(len(part.blocks) for part in node.path()) * 4 == length)
    kv.checkpoints.drop(node)


def test_a_request_waits_for_an_interval_s_checkpoint():
    kv = manager()
    admit(kv, "a", PROMPT)
    assert waits(kv, PROMPT[:10] + ELSEWHERE), (
        "a's prompt will be checkpointed after 8 tokens, and both begin with them"
    )
    compute(kv, "a", PROMPT[:8])
    assert not waits(kv, PROMPT[:10] + ELSEWHERE), "the checkpoint after 8 tokens is there"
    assert waits(kv, PROMPT[:17] + ELSEWHERE), "the next one comes after 16"


@pytest.mark.parametrize("rest", [PROMPT[20:], ELSEWHERE], ids=["its twin", "a longer prompt"])
def test_a_request_waits_for_the_last_whole_block(rest):
    kv = manager(interval=40)
    admit(kv, "a", PROMPT)
    assert waits(kv, PROMPT[:20] + rest), "a will be checkpointed after 20 tokens, which this prompt begins with"
    assert not waits(kv, PROMPT[:19] + ELSEWHERE), "a state after 20 tokens is of no use to a prompt that shares 19"


def test_no_request_waits_for_a_place_that_the_other_has_passed():
    kv = manager(interval=8)
    admit(kv, "a", PROMPT)
    compute(kv, "a", PROMPT[:10])
    drop(kv, 8)
    assert not waits(kv, PROMPT[:10] + ELSEWHERE), "a has passed 8 tokens: no state of that place will come any more"
    compute(kv, "a", PROMPT)
    for length in (16, 20):
        drop(kv, length)
    assert not waits(kv, PROMPT), "a has passed all places of its prompt"


def test_no_request_waits_for_a_checkpoint_that_is_there():
    kv = manager(interval=40)
    for name in ("a", "b"):
        admit(kv, name, PROMPT)
    compute(kv, "b", PROMPT)
    assert not waits(kv, PROMPT), "b has made the checkpoint that a is on its way to"


def test_a_long_answer_is_checkpointed_at_every_interval():
    kv, answer = manager(), list(range(200, 215))
    text = PROMPT[:6] + answer
    admit(kv, "a", PROMPT[:6])
    compute(kv, "a", PROMPT[:6])
    compute(kv, "a", text, most=1)
    assert {tuple(text[:end]) for end in (4, 8, 16)} == places(kv).keys(), (
        "an answer's states are kept as a prompt's are"
    )
    assert all(kv.states.seen[slot] == tokens for tokens, slot in places(kv).items())
    kv.free("a", text)
    assert serve(kv, "next turn", [*text, 1, 2]) == 16, "the next turn of a chat begins behind the last answer's state"


def test_a_lookup_counts_a_hit_for_each_node_of_its_path():
    kv = manager()
    serve(kv, "a", PROMPT)
    admit(kv, "b", PROMPT[:17] + ELSEWHERE)
    hits = {sum(len(part.blocks) for part in node.path()) * 4: node.num_hits for node in kv.checkpoints.slots}
    assert (hits[8], hits[16], hits[20]) == (1, 1, 0), "LFU evicts by hits: b has used the nodes up to token 16"
    told = kv.coordinator.prefixes.stats.asked_tokens, kv.coordinator.prefixes.stats.found_tokens
    assert told == (21 + 26, 16), "a asked for 21 tokens and found none; b asked for 26 and found 16"
