"""Lesson 2. The smoke script refuses a pool that is too small in one line."""

from scripts import l2_smoke

import pytest

from tests.support import checkpoint


def model() -> list[str]:
    return ["--model", str(checkpoint("four, with biases"))]


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
