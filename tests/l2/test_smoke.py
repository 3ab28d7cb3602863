"""Lesson 2. The smoke script: equal tokens, every block returned, a pool that is too small refused in one line."""

import json

from scripts import l2_smoke

import pytest

from tests.support import checkpoint


def model() -> list[str]:
    return ["--model", str(checkpoint("four, with biases"))]


@pytest.mark.parametrize("block_size, num_slots", [(1, 40), (7, 42), (16, 48), (64, 64)])
def test_tokens_are_equal_and_every_block_is_returned(capsys, block_size, num_slots):
    arguments = ["--prompt-ids", "1,2,3", "--prompt-ids", "4", "--json"]
    code = l2_smoke.main([*model(), *arguments, "--block-size", str(block_size), "--num-slots", str(num_slots)])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"]
    assert report["kv"]["free_at_end"] == report["kv"]["blocks"], "not every block was returned"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-slots", "16"], ""),  # the learner's own words
        (["--num-slots", "100"], "100 slots cannot be divided into blocks of 16"),
        (["--block-size", "0"], "it must be 1 or more"),
    ],
)
def test_an_unsuitable_pool_exits_2_with_one_line(capsys, arguments, words):
    try:
        code = l2_smoke.main([*model(), "--prompt-ids", "1,2,3", *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1, error
