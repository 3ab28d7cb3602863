"""Lesson 18. Which rows and columns of each tensor a rank loads: every number of the model once, or in every rank."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.distributed.tensor_parallel.shard import part_of

CONFIG = SimpleNamespace(vocab_size=5, key_dim=4, value_dim=8)  # a hybrid's delta nets: queries 4, keys 4, values 8
LAYER = "model.layers.3."


def taken(name, shape, num_ranks):
    """What each rank loads of a tensor that holds 0, 1, 2, …: lists of rows, as loading reads them."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = []
    for rank in range(num_ranks):
        part = part_of(name, shape, CONFIG, rank, num_ranks)
        rows = [whole[row] for rows in part.rows for row in rows]
        columns = range(0) if part.columns is None else part.columns
        found.append(
            [(row[columns.start : columns.stop] if part.columns is not None else row).tolist() for row in rows]
        )
    return found


@pytest.mark.task(2)
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_matrices_whose_outputs_are_heads_or_columns_are_cut_by_outputs(name):
    first, second = taken(f"{LAYER}{name}.weight", (4, 3), 2)
    assert first == [[0, 1, 2], [3, 4, 5]], "rank 0 has the first half of the outputs, each with all inputs"
    assert second == [[6, 7, 8], [9, 10, 11]], "and rank 1 the second"


@pytest.mark.task(2)
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "linear_attn.out_proj"])
def test_matrices_that_take_what_ranks_have_are_cut_by_inputs(name):
    first, second = taken(f"{LAYER}{name}.weight", (3, 4), 2)
    assert first == [[0, 1], [4, 5], [8, 9]], "rank 0 has the first half of the inputs of every output"
    assert second == [[2, 3], [6, 7], [10, 11]], "and rank 1 the second: their outputs are two parts of one sum"


@pytest.mark.task(2)
def test_a_bias_goes_with_its_outputs():
    assert taken(f"{LAYER}self_attn.q_proj.bias", (4,), 2) == [[0, 1], [2, 3]], (
        "rank 1 has the second half of the heads"
    )


@pytest.mark.task(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_bias_of_a_sum_is_in_rank_0_alone(num_ranks):
    first, *others = taken(f"{LAYER}self_attn.o_proj.bias", (4,), num_ranks)
    assert first == [0, 1, 2, 3], "rank 0 adds all of it"
    assert others == [[]] * (num_ranks - 1), "the others add nothing, or the sum has it more than once"


@pytest.mark.task(2)
@pytest.mark.parametrize(
    "name", ["input_layernorm", "self_attn.q_norm", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"]
)
def test_what_all_heads_share_is_whole_in_every_rank(name):
    assert taken(f"{LAYER}{name}.weight", (3,), 2) == [[0, 1, 2]] * 2, "every head needs it"


@pytest.mark.task(2)
@pytest.mark.parametrize("name", ["linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"])
def test_queries_keys_and_values_of_a_delta_net_are_cut_one_by_one(name):
    first, second = taken(LAYER + name, (16, 1), 2)
    assert first == [[0], [1], [4], [5], [8], [9], [10], [11]], "queries 0 … 3, keys 4 … 7, values 8 … 15: half of each"
    assert second == [[2], [3], [6], [7], [12], [13], [14], [15]]


@pytest.mark.task(2)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_embedding_and_head_are_cut_by_tokens_and_the_last_rank_may_have_fewer(name):
    assert taken(name, (5, 1), 2) == [[[0], [1], [2]], [[3], [4]]], "5 tokens over 2 ranks: 3 and 2"
    assert taken(name, (5, 1), 4) == [[[0], [1]], [[2], [3]], [[4]], []], "over 4 ranks: 2, 2, 1 and none"


@pytest.mark.task(2)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_whole(num_ranks):
    for name, shape in [("self_attn.v_proj.weight", (8, 2)), ("mlp.down_proj.weight", (2, 8)), ("A_log", (8,))]:
        numbers = torch.tensor(
            [x for part in taken(LAYER + name, shape, num_ranks) for x in torch.tensor(part).flatten()]
        )
        assert sorted(numbers.tolist()) == list(range(torch.Size(shape).numel())), f"{name}: every number in one rank"
