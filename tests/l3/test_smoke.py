"""Lesson 3. The smoke script refuses what it cannot run in one line."""

from scripts import l3_smoke

import pytest

from tests.support import checkpoint

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4", "--prompt-ids", "5,6,7,8,9"]


def smoke(*arguments):
    try:
        return l3_smoke.main(["--model", str(checkpoint("four, with biases")), *PROMPTS, *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-slots", "100"], "--num-slots 100 is not a multiple of --block-size 16"),
        (["--kernel", "fast"], "no attention kernel 'fast'"),
        (["--num-slots", "32"], ""),  # OutOfBlocks, in the learner's own words
    ],
)
def test_bad_options_exit_2_with_one_line(capsys, arguments, words):
    assert smoke(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1, error
