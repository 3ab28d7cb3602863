"""Lesson 2. The calculator: from a model's shape and a memory budget to slots."""

import json

from scripts import pool_size

import pytest

from tests.support import checkpoint, ran


def run(capsys, *arguments):
    return ran(pool_size.main, *arguments, capsys=capsys)


def test_qwen3_8b_in_14_gib(capsys):
    code, out, _ = run(capsys, "--json")
    assert code == 0
    assert json.loads(out) == {"bytes_per_token": 147_456, "slots": 101_936, "blocks": 6371}


def test_the_shape_can_come_from_a_checkpoint(capsys):
    code, out, _ = run(
        capsys, "--model", str(checkpoint("two, tied, wide heads")), "--dtype", "float32", "--memory", "1MiB"
    )
    assert code == 0 and "2 x 2 heads x 40 x 3 layers x 4 bytes = 1,920 bytes" in out
    assert "544 tokens, 34 blocks of 16" in out


@pytest.mark.parametrize("wrong", [["--memory", "lots"], ["--layers", "0"], ["--model", "no/such/place"]])
def test_bad_input_exits_2_with_one_line(capsys, wrong):
    code, out, err = run(capsys, *wrong)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1, err
