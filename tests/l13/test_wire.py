"""Lesson 13. The keys by which a router knows a prompt's blocks."""

import pytest

from mini_engine.distributed.routing.keys import block_keys


def test_a_prompt_has_a_key_for_each_whole_block_that_names_all_tokens_before():
    keys = block_keys(range(10), None, 4)
    assert len(keys) == 2 and block_keys(range(8), None, 4) == keys
    assert block_keys([9, 1, 2, 3, 4, 5, 6, 7], None, 4)[1] != keys[1], (
        "the second block is the same, what is before is not"
    )


def test_namespaces_of_different_types_are_apart():
    first = [block_keys(range(4), namespace, 4)[0] for namespace in (None, "None", 1, "1", True, "")]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("wrong", [[-1], [2**32], ["a"], [1.5], [None]])
def test_a_prompt_that_the_replica_will_refuse_has_no_keys(wrong):
    assert block_keys([0, 1, 2, *wrong], None, 4) == []
