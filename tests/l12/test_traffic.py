"""Lesson 12. The generated requests are like the recorded ones; what the suite counts as found is what is there."""

from collections import OrderedDict

from scripts.bench.trace import caches
from scripts.bench.traffic import Chats, read_trace

import pytest

from mini_engine.base.errors import UserError

# `python scripts/bench.py trace --trace mooncake-conversation.jsonl`: LRU's share by capacity; mean blocks a request
RECORDED = {3_000: 6.5, 10_000: 21.2, 30_000: 32.6, None: 36.6}
MEAN_BLOCKS = 24.0


@pytest.mark.nightly
def test_generated_requests_find_about_what_the_recorded_ones_do():
    requests = Chats().generate()
    total = sum(map(len, requests))
    found = {capacity: 100 * caches(capacity)["lru"](requests) / total for capacity in RECORDED}
    assert {capacity: abs(found[capacity] - share) < 4 for capacity, share in RECORDED.items()} == dict.fromkeys(
        RECORDED, True
    ), f"found {found}, recorded {RECORDED}"
    assert abs(total / len(requests) - MEAN_BLOCKS) < 3 and len(requests) == 12_031


def test_the_same_seed_gives_the_same_requests_and_a_turn_repeats_its_history():
    chats = Chats(num_requests=600, gap=(20.0, 0.5))
    requests = chats.generate()
    assert requests == chats.generate() != chats.generate(seed=1)
    beginnings = {tuple(ids[:2]) for ids in requests}
    assert all(ids[0] == 0 for ids in requests) and len(beginnings) < 0.75 * len(requests)


def test_a_block_counts_as_found_only_behind_all_before_it():
    requests = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [5, 1, 2]]
    assert {name: run(requests) for name, run in caches(None).items()} == dict.fromkeys(
        ("lru", "lfu", "fifo", "tier"), 4
    )


def test_the_tier_evicts_the_least_recently_used_block():
    requests, capacity = Chats(num_requests=300, gap=(20.0, 0.5)).generate(), 200
    held, found = OrderedDict(), 0
    for ids in requests:
        for one in ids:
            if one not in held:
                break
            held.move_to_end(one)
            found += 1
        else:
            continue
        for one in ids:
            if one not in held:
                held[one] = True
                if len(held) > capacity:
                    held.popitem(last=False)
    assert caches(capacity)["tier"](requests) == found > 0


@pytest.mark.parametrize(
    "text", ["", "{}", "not json", '{"hash_ids": []}', '{"hash_ids": ["a"]}', '{"hash_ids": [-1]}']
)
def test_a_file_that_is_no_trace_is_one_sentence(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert "trace.jsonl" in str(caught.value)
