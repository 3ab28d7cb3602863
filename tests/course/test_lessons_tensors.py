"""Course machinery. A check says where two tensors differ, and what a failing test did.

Protects students of tensor lessons from `assert False`: they see the first value that differs and where it is.
"""

import ast
import gc
import importlib.util
import types

import pytest
import torch

from lessons._course.messages import remarks
from lessons._course.places import CHILD
from lessons._course.report import Failure
from lessons._course.result import sides_of

MESSAGE = "why\nassert False\n +  where False = <function equal at 0x1>(tensor([…]), tensor([…]))"


def child(name: str) -> types.ModuleType:
    """Import a module of the processes under `check`."""
    spec = importlib.util.spec_from_file_location(name, CHILD / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def last_pair():
    return child("course_tensors").LastPair()


def failure(last_pair) -> Failure:
    return Failure("AssertionError", MESSAGE, tensors=last_pair.shown(MESSAGE))


def test_the_first_differing_value_is_shown_with_its_index(last_pair):
    expected = torch.arange(32.0).view(4, 8)
    got = expected.clone()
    got[1, 3], got[2, 0] = -7.0, 5.0
    with last_pair:
        assert not torch.equal(got, expected)
    found = failure(last_pair)
    assert sides_of(found) == ("-7.0 at [1, 3]", "11.0 at [1, 3]")
    assert remarks(found) == ["2 of 32 values differ (float32 of shape (4, 8))."]


def test_other_shapes_and_dtypes_are_the_difference(last_pair):
    with last_pair:
        assert not torch.equal(torch.zeros(2, 3), torch.zeros(3, 2))
    assert sides_of(failure(last_pair)) == ("float32 of shape (2, 3)", "float32 of shape (3, 2)")


def test_a_small_tensor_is_shown_whole(last_pair):
    with last_pair:
        assert not torch.equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert sides_of(failure(last_pair)) == ("tensor([1, 2])", "tensor([1, 3])")


def test_values_within_the_tolerance_are_not_the_difference(last_pair):
    got = torch.zeros(20)
    got[0], got[9] = 0.01, 0.5
    with last_pair:
        assert not torch.allclose(got, torch.zeros(20), atol=0.1)
    assert sides_of(failure(last_pair))[0] == "0.5 at [9]"


def test_a_pair_that_differed_earlier_is_not_shown_for_another_assertion(last_pair):
    before = torch.equal
    with last_pair:
        assert not torch.equal(torch.zeros(2), torch.ones(2))
    assert last_pair.shown("assert 1 == 2") == []
    assert torch.equal is before, "torch is as before"


class ParsesAtTheEnd:
    """Garbage whose finalizer parses, as a warning's traceback does; a cycle, so that only the collector finds it."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        ast.parse("x = 1")


def test_a_finalizer_that_parses_does_not_disturb_the_description_of_a_failure():
    parse, source = child("course_failure").parse, "\n".join(f"x{i} = [{i}, ({i}, {i})]" for i in range(300))
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(40):
            ParsesAtTheEnd()
            assert len(parse(source).body) == 300
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled(), "the collector is on again"
