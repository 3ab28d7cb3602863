"""Lesson 3. The smoke script: several prompts in one packed call, with each kernel."""

import json

from scripts import l3_smoke

import pytest

from tests.support import checkpoint

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4", "--prompt-ids", "5,6,7,8,9"]


def smoke(*arguments):
    try:
        return l3_smoke.main(["--model", str(checkpoint("four, with biases")), *PROMPTS, *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("kernel", ["reference", "blockwise", "torch", "auto"])
def test_tokens_are_equal_and_every_block_is_returned(capsys, kernel):
    code = smoke("--kernel", kernel, "--block-size", "7", "--num-slots", "140", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and len(report["requests"]) == 3
    assert report["kv"]["free_at_end"] == report["kv"]["blocks"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-slots", "100"], "--num-slots 100 is not a multiple of --block-size 16"),
        (["--kernel", "fast"], "no attention kernel 'fast'"),
    ],
)
def test_bad_options_exit_2_with_one_line(capsys, arguments, words):
    assert smoke(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1, error


def test_a_pool_that_is_too_small_exits_2_with_one_line(capsys):
    assert smoke("--num-slots", "32") == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, f"OutOfBlocks must reach the user as one line, got: {error}"
