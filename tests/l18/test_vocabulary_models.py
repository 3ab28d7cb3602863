"""Lesson 18. Embedding and head cut by rows: who has which token, lookups that others complete, gathered logits."""

import threading

import pytest
import torch
import torch.nn.functional as F

from mini_engine.assembly.layout import store_of
from mini_engine.attention.registry import load_kernel
from mini_engine.distributed.tensor_parallel.shard import bytes_per_step, gathered_bytes_per_step
from mini_engine.distributed.tensor_parallel.vocabulary import (
    CutEmbedding,
    GatheredHead,
    looked_up,
    rows_each,
    rows_of,
    without_padding,
)
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from tests.l18.families import load, path_of
from tests.l18.ranks import Sums, in_threads

SIZES = [(8, 1), (8, 2), (8, 4), (7, 2), (131, 2), (131, 4), (9, 4), (2, 4), (1, 3)]
HIDDEN = 6


def matrix(vocab_size):
    """Return a matrix with no zeros, `[vocab_size, HIDDEN]`."""
    return torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(vocab_size)) + 10


def share(weight, rank, num_ranks):
    """Return a rank's rows of a matrix, padded with zeros."""
    each = rows_each(len(weight), num_ranks)
    return F.pad(weight, (0, 0, 0, num_ranks * each - len(weight))).split(each)[rank]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("vocab_size", "num_ranks"), SIZES)
def test_every_token_has_one_rank(vocab_size, num_ranks):
    ranges = [rows_of(vocab_size, rank, num_ranks) for rank in range(num_ranks)]
    assert [token for rows in ranges for token in rows] == list(range(vocab_size)), "in the order of the ranks"
    each = rows_each(vocab_size, num_ranks)
    for rank, rows in enumerate(ranges):
        assert len(rows) <= each, "no rank has more rows than its matrix"
        assert not rows or rows.start == rank * each, "all ranks but the last have full shares: logits are in order"
    assert num_ranks * each - vocab_size < num_ranks, "padding is less than a row for each rank"


# ---------------------------------------------------------------- lookups


@pytest.mark.parametrize(("vocab_size", "num_ranks"), SIZES)
def test_a_rank_looks_up_its_own_tokens_and_leaves_zeros_for_others(vocab_size, num_ranks):
    weight, ids = matrix(vocab_size), torch.arange(vocab_size).flip(0)
    total = torch.zeros(vocab_size, HIDDEN)
    for rank in range(num_ranks):
        mine, rows = share(weight, rank, num_ranks), rows_of(vocab_size, rank, num_ranks)
        asked = []
        found = looked_up(lambda ids, mine=mine, asked=asked: asked.append(ids) or mine[ids], ids, rows)
        [local] = asked
        assert local.min() >= 0 and local.max() < len(mine), "a token of another rank would be looked up out of bounds"
        for token, vector in zip(ids.tolist(), found, strict=True):
            expected = weight[token] if token in rows else torch.zeros(HIDDEN)
            assert torch.equal(vector, expected), f"token {token} in rank {rank}, which has the tokens {rows}"
        total += found
    assert torch.equal(total, weight[ids]), "one rank has each vector; all others add zeros"


def test_no_tokens_are_looked_up_as_none():
    assert looked_up(lambda ids: matrix(4)[ids], torch.empty(0, dtype=torch.int64), range(2, 4)).shape == (0, HIDDEN)


# ---------------------------------------------------------------- logits


def test_padding_has_no_logits():
    logits = torch.full((3, 132), -5.0)
    logits[:, 131] = 0.0
    found = without_padding(logits, 131)
    assert found.shape == (3, 131) and (found == -5).all(), (
        "0 is the largest here: a token that does not exist would win"
    )


@pytest.mark.parametrize(("vocab_size", "num_ranks"), SIZES)
def test_ranks_together_embed_and_score_as_one_does(vocab_size, num_ranks):
    weight, ids = matrix(vocab_size), torch.tensor([0, vocab_size - 1, vocab_size // 2])
    rows, sums = matrix(3)[:3], Sums(num_ranks)

    def run(rank):
        mine, collectives = share(weight, rank, num_ranks), sums.of(rank)
        embedded[rank] = CutEmbedding(lambda ids: mine[ids], vocab_size, collectives)(ids)
        logits[rank] = GatheredHead(lambda x: x @ mine.T, vocab_size, collectives)(rows)

    embedded, logits = [None] * num_ranks, [None] * num_ranks
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in embedded:
        assert torch.equal(found, weight[ids])
    torch.testing.assert_close(logits[0], rows @ weight.T)


# ---------------------------------------------------------------- whole models


def step_of(model, ids):
    """Return the logits of a prompt in a new pool, of all tokens."""
    pool = KvPool(model.config, 6, 4, load_kernel("torch"))
    store = store_of(model, pool)
    slots, table = torch.arange(4, 4 + len(ids)), torch.arange(1, 6)[None].int()
    starts, length = torch.tensor([0, len(ids)]).int(), torch.tensor([len(ids)]).int()
    return model(ids, store, ForwardMeta(torch.arange(len(ids)), slots, starts, length, table, 4))


@torch.inference_mode()
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["131 tokens, untied", "131 tokens, tied"])
def test_the_bytes_of_a_step_are_those_of_the_formulas(name, num_ranks):
    ids = torch.tensor([0, 32, 33, 65, 66, 130])
    expected = step_of(load(name), ids)

    def work(model):
        logits, traffic = step_of(model, ids), model.lm_head.collectives.traffic
        return logits, traffic.calls, traffic.bytes

    config = load(name).config
    for logits, calls, num_bytes in in_threads(path_of(name), num_ranks, "reference", work):
        torch.testing.assert_close(logits[:, :131], expected, atol=1e-4, rtol=1e-4)  # others need not cut padding off
        assert calls == 2 * config.num_hidden_layers + 1 + 1, "all-reduces, and one gather"
        gathered = gathered_bytes_per_step(config, len(ids), 4, num_ranks)
        assert gathered == len(ids) * rows_each(131, num_ranks) * 4
        assert num_bytes == bytes_per_step(config, len(ids), 4) + gathered
