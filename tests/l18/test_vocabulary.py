"""Lesson 18. Embedding and head cut by the vocabulary: each rank looks up and scores its own tokens."""

import pytest
import torch
from torch import nn

from mini_engine.distributed.tensor_parallel.vocabulary import (
    CutEmbedding,
    GatheredHead,
    looked_up,
    rows_each,
    rows_of,
    without_padding,
)

VOCAB, WIDTH = 7, 3


def table():
    """An embedding: the vector of token t is [10 t + 1, 10 t + 2, 10 t + 3], so none is zero."""
    return 10.0 * torch.arange(VOCAB)[:, None] + torch.arange(1, WIDTH + 1)


def share(rank, num_ranks):
    """A rank's rows of `table()`, padded with zeros to as many as every rank has."""
    rows = rows_of(VOCAB, rank, num_ranks)
    mine = torch.zeros(rows_each(VOCAB, num_ranks), WIDTH)
    mine[: len(rows)] = table()[rows.start : rows.stop]
    return nn.Embedding.from_pretrained(mine)


@pytest.mark.reference
def test_ranks_have_consecutive_rows():
    assert [rows_of(7, rank, 2) for rank in range(2)] == [range(0, 4), range(4, 7)], (
        "ceil(7 / 2) = 4 rows, then the rest"
    )
    assert [rows_of(5, rank, 4) for rank in range(4)] == [range(0, 2), range(2, 4), range(4, 5), range(5, 5)], (
        "ceil(5 / 4) = 2 each, as long as there are rows: the last rank has none"
    )
    assert rows_of(VOCAB, 0, 1) == range(VOCAB)


@pytest.mark.task(3)
@pytest.mark.parametrize(("rank", "mine"), [(0, [0, 3, 1]), (1, [4, 6, 5])])
def test_a_rank_s_own_tokens_are_looked_up_in_its_rows(rank, mine):
    found = looked_up(share(rank, 2), torch.tensor(mine), rows_of(VOCAB, rank, 2))
    assert found.tolist() == table()[mine].tolist(), "its first row is that of the first token that it has"


@pytest.mark.task(3)
@pytest.mark.parametrize(("rank", "theirs"), [(0, [4, 6]), (1, [0, 3])])
def test_the_tokens_of_others_are_zero(rank, theirs):
    found = looked_up(share(rank, 2), torch.tensor(theirs), rows_of(VOCAB, rank, 2))
    assert found.tolist() == [[0.0] * WIDTH] * 2, (
        "another rank adds their vectors; whatever stands here is added to them"
    )


@pytest.mark.task(3)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 9])
def test_the_parts_of_all_ranks_add_up_to_the_embedding(num_ranks):
    ids = torch.tensor([6, 0, 3, 3, 5, 1, 2, 4, 0])
    parts = [looked_up(share(rank, num_ranks), ids, rows_of(VOCAB, rank, num_ranks)) for rank in range(num_ranks)]
    assert sum(parts).tolist() == table()[ids].tolist(), f"{num_ranks} ranks: each token is one rank's"


@pytest.mark.task(3)
def test_only_rows_that_a_rank_has_are_asked_for():
    asked = []

    def lookup(rows):
        asked.extend(rows.tolist())
        return share(1, 2)(rows)

    looked_up(lookup, torch.tensor([0, 6, 4, 2]), rows_of(VOCAB, 1, 2))
    assert set(asked) <= set(range(4)), "a row below 0 or past the last is an error in a C++ lookup, or reads anything"


@pytest.mark.task(3)
def test_ids_are_left_as_they_are():
    ids = torch.tensor([0, 6])
    looked_up(share(1, 2), ids, rows_of(VOCAB, 1, 2))
    assert ids.tolist() == [0, 6], "the step's token ids belong to the caller"


# ---------------------------------------------------------------- the head


class Gathering:
    """The collectives of one rank, whose others bring what they are given."""

    def __init__(self, rank, others):
        self.rank, self.num_ranks, self.others, self.brought = rank, 1 + len(others), others, []

    def all_reduce(self, x):
        self.brought.append(x.clone())
        return x.add_(sum(self.others))

    def gather(self, x):
        self.brought.append(x.clone())
        return torch.cat([x, *self.others], dim=1) if self.rank == 0 else x


@pytest.mark.task(4)
def test_padding_is_cut_off_behind_the_last_rank():
    gathered = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 0.0]])
    assert without_padding(gathered, 5).tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]], "5 tokens over 3 ranks: 2, 2 and 1"
    assert without_padding(gathered, 6).tolist() == gathered.tolist(), "no padding, nothing to cut off"


@pytest.mark.task(4)
def test_rank_0_has_the_logits_of_all_tokens_in_their_order():
    own, theirs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), torch.tensor([[-5.0, -6.0, -7.0, 0.0]])
    meeting = Gathering(0, [theirs])
    logits = GatheredHead(lambda hidden: own, VOCAB, meeting)(torch.zeros(1, WIDTH))
    assert [x.tolist() for x in meeting.brought] == [own.tolist()], "each rank brings its own logits to one gather"
    assert logits.tolist() == [[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]], (
        "all logits are negative here: one of padding, 0, would win, and no token has its id"
    )


@pytest.mark.task(4)
def test_the_head_is_computed_once_of_what_it_is_given():
    given = []

    def head(hidden):
        given.append(hidden)
        return hidden @ torch.ones(WIDTH, 4)

    hidden = torch.arange(6.0).view(2, WIDTH)
    logits = GatheredHead(head, VOCAB, Gathering(0, [torch.zeros(2, 4)]))(hidden)
    assert len(given) == 1 and given[0] is hidden, "one multiplication by this rank's rows"
    assert logits.tolist() == [[3.0] * 4 + [0.0] * 3, [12.0] * 4 + [0.0] * 3], "one row of logits for each given row"


@pytest.mark.task(4)
def test_other_ranks_come_to_the_gather_too():
    meeting = Gathering(1, [torch.zeros(1, 4)])
    GatheredHead(lambda hidden: torch.ones(1, 4), VOCAB, meeting)(torch.zeros(1, WIDTH))
    assert len(meeting.brought) == 1, "rank 0 waits for every rank's logits, though only rank 0 needs them"


# ---------------------------------------------------------------- given


@pytest.mark.reference
def test_an_embedding_adds_up_what_each_rank_has_found():
    ids = torch.tensor([1, 6, 4])
    meeting = Gathering(0, [looked_up(share(1, 2), ids, rows_of(VOCAB, 1, 2))])
    assert CutEmbedding(share(0, 2), VOCAB, meeting)(ids).tolist() == table()[ids].tolist()
    assert meeting.brought[0].tolist() == [table()[1].tolist(), [0.0] * WIDTH, [0.0] * WIDTH]
