"""Lesson 18. A model in shares, in numbers: what each rank is given, and what it sends in each step."""

import re
from dataclasses import replace

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.distributed.tensor_parallel.shard import bytes_per_step, gathered_bytes_per_step, share_of
from tests.support import must_raise


def config_of(query_heads, key_heads, columns):
    """The configuration of a model as large as the pocket model, with other numbers of heads and columns."""
    sizes = {"num_attention_heads": query_heads, "num_key_value_heads": key_heads, "intermediate_size": columns}
    return Qwen3Config(vocab_size=2048, hidden_size=192, num_hidden_layers=6, head_dim=64, **sizes)


# ---------------------------------------------------------------- shares, in numbers


@pytest.mark.task(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_share_has_its_part_of_heads_and_columns(num_ranks):
    config = config_of(8, 4, 96)
    share = share_of(config, num_ranks)
    assert share.num_attention_heads == 8 // num_ranks, f"each of {num_ranks} ranks has its part of 8 query heads"
    assert share.num_key_value_heads == 4 // num_ranks, f"each of {num_ranks} ranks has its part of 4 key heads"
    assert share.intermediate_size == 96 // num_ranks, f"each of {num_ranks} ranks has its part of 96 columns"
    same = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    assert replace(share, **same) == config, "all else is whole in every rank"
    each = share.kv_bytes_per_token(torch.float32)
    assert num_ranks * each == config.kv_bytes_per_token(torch.float32), "a token's K and V are shared, too"


@pytest.mark.task(1)
@pytest.mark.parametrize("num_ranks", [0, -1, -2, 3, 8])
def test_heads_that_cannot_be_shared_evenly_are_refused(num_ranks):
    with must_raise(
        UserError, f"8 query heads, 4 key heads, 96 columns: {num_ranks} ranks cannot share them"
    ) as caught:
        share_of(config_of(8, 4, 96), num_ranks)
    told = set(re.findall(r"\d+", str(caught.value)))
    assert told >= {"1", "2", "4"}, f"the message must say that 1, 2 and 4 ranks are possible: {caught.value}"


@pytest.mark.task(1)
@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    [((6, 2, 96), 3), ((9, 6, 96), 2), ((8, 4, 98), 4)],
    ids=["key heads", "query heads", "columns"],
)
def test_one_number_that_cannot_be_divided_is_enough_to_refuse(sizes, num_ranks):
    teach = "query heads, key heads, columns: {}, {}, {}; one of them cannot be shared evenly".format(*sizes)
    with must_raise(UserError, f"{teach} by {num_ranks} ranks"):
        share_of(config_of(*sizes), num_ranks)


@pytest.mark.task(1)
def test_two_vectors_a_layer_and_token_are_added_up_and_one_behind_the_embedding():
    config = config_of(8, 4, 96)
    one = bytes_per_step(config, 1, 4)
    assert one == (2 * config.num_hidden_layers + 1) * config.hidden_size * 4, (
        "vectors of hidden_size numbers: two in each layer, after o_proj and after down_proj, and the embedded token"
    )
    assert bytes_per_step(config, 300, 4) == 300 * one, "prefill sends a vector for every token"
    assert bytes_per_step(config, 1, 2) == one // 2, "bfloat16 is half of it"
    assert bytes_per_step(share_of(config, 4), 1, 4) == one, "vectors are whole: more ranks do not make them shorter"


@pytest.mark.task(1)
def test_rank_0_gathers_a_row_of_logits_for_each_answer():
    config = replace(config_of(8, 4, 96), vocab_size=1000)
    assert gathered_bytes_per_step(config, 1, 4, 2) == 500 * 4, (
        "two ranks: each brings the logits of half of the tokens"
    )
    assert gathered_bytes_per_step(config, 8, 4, 2) == 8 * 500 * 4, "one row for each token to be chosen"
    assert gathered_bytes_per_step(config, 1, 2, 3) == 334 * 2, "1,000 over three ranks: 334 each, the last padded"
