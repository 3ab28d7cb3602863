"""Lesson 15. The plan of a step: the same positions and lengths in all groups, other blocks."""

from array import array
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.windows.plan import window_tables
from mini_engine.windows.store import GroupedMeta, with_groups

SIZE = 4


def meta():
    """Return a plan of three sequences: a chunk behind 5 tokens, a decode, and a prompt."""
    positions = torch.tensor([5, 6, 7, 8, 12, 0, 1])
    table = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7], [8, 0, 0, 0]], dtype=torch.int32)
    owner = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    return ForwardMeta(
        positions=positions,
        slot_mapping=table[owner, positions // SIZE].long() * SIZE + positions % SIZE,
        cu_seqlens_q=torch.tensor([0, 4, 5, 7], dtype=torch.int32),
        seq_lens_kv=torch.tensor([9, 13, 2], dtype=torch.int32),
        block_table=table,
        block_size=SIZE,
    )


OTHER = torch.tensor([[0, 12, 13, 0], [0, 0, 16, 17], [18, 0, 0, 0]], dtype=torch.int32)
THIRD = torch.tensor([[0, 22, 23, 0], [0, 0, 26, 27], [28, 0, 0, 0]], dtype=torch.int32)


@pytest.mark.task(4)
def test_each_group_has_its_table_and_its_slots():
    plain = meta()
    got = with_groups(plain, [OTHER, THIRD])
    assert type(got) is GroupedMeta, "return the plan of a grouped store"
    assert torch.equal(got.block_table, torch.stack([plain.block_table, OTHER, THIRD])), "group 0 first"
    expected = [
        plain.slot_mapping.tolist(),
        [49, 50, 51, 52, 68, 72, 73],
        [89, 90, 91, 92, 108, 112, 113],
    ]
    assert got.slot_mapping.tolist() == expected, "slot = block * block_size + offset, by the table of the group"


@pytest.mark.task(4)
def test_the_plan_that_it_is_given_stays_as_it_was():
    plain = meta()
    slots, table = plain.slot_mapping.clone(), plain.block_table.clone()
    with_groups(plain, [OTHER])
    assert torch.equal(plain.slot_mapping, slots), "make new tensors: `meta` may be used again"
    assert torch.equal(plain.block_table, table), "make new tensors: `meta` may be used again"


@pytest.mark.task(4)
def test_dtypes_are_lesson_3s():
    got = with_groups(meta(), [OTHER])
    assert got.block_table.dtype == torch.int32, "kernels read int32 tables"
    assert got.slot_mapping.dtype == torch.int64, "tensors that index are int64"


@pytest.mark.task(4)
def test_all_else_is_the_same():
    plain = meta()
    got = with_groups(plain, [OTHER])
    for field in fields(ForwardMeta):
        if field.name not in ("slot_mapping", "block_table"):
            mine, theirs = getattr(got, field.name), getattr(plain, field.name)
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)), (
                f"{field.name} is the same for all groups"
            )


@pytest.mark.task(4)
def test_a_sequence_without_tokens_moves_no_other():
    plain = meta()
    starts = torch.tensor([0, 4, 4, 7], dtype=torch.int32)  # the decode feeds nothing, the prompt three tokens
    positions = torch.tensor([5, 6, 7, 8, 0, 1, 2])
    got = with_groups(ForwardMeta(**vars(plain) | {"cu_seqlens_q": starts, "positions": positions}), [OTHER])
    expected = [49, 50, 51, 52, 72, 73, 74]
    assert got.slot_mapping[1].tolist() == expected, (
        "the last three tokens are the third sequence's: the second has none"
    )


def test_each_group_s_table_has_its_own_row_of_each_request():
    tables = {"a": ([0, 5], [0, 6]), "b": ([7], [8])}
    chunks = [SimpleNamespace(request=SimpleNamespace(id=name)) for name in tables]

    def tables_of(name):
        return SimpleNamespace(rows=[array("i", row) for row in tables[name]])

    found = [table.tolist() for table in window_tables(chunks, tables_of, 2)]
    assert found == [[[0, 5], [7, 0]], [[0, 6], [8, 0]]]
