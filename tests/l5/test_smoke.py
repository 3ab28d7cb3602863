"""Lesson 5. The smoke script and the lesson's figures."""

import json

from scripts import l5_smoke, long_prompt

import pytest

from tests.support import checkpoint, ran, some_ids

NUM_PROMPTS = 9
PROMPTS = [
    part
    for n in range(1, NUM_PROMPTS + 1)
    for part in ("--prompt-ids", ",".join(map(str, some_ids(n * n % 37 + 1, 160, n))))
]


def smoke(capsys, *arguments):
    given = ["--model", checkpoint("four, with biases"), *PROMPTS, "--json", *arguments]
    code, out, err = ran(l5_smoke.main, *given, capsys=capsys)
    return code, (json.loads(out) if code in (0, 1) else err)


def test_a_pool_for_all_passes_and_says_that_nothing_was_preempted(capsys):
    code, report = smoke(capsys, "--max-new-tokens", "3", "--num-blocks", "200")
    assert code == 0 and report["not_exercised"] == ["no request was preempted"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--num-blocks", "2"], "the whole pool has 1"),
        (["--num-blocks", "1"], "must be 2 or more"),
        (["--kernel", "fast"], "no attention kernel 'fast'"),
    ],
)
def test_invalid_options_exit_with_code_2_and_one_line(capsys, options, words):
    code, error = smoke(capsys, *options)
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1, error


def test_a_long_prompt_delays_no_token_by_more_than_a_step(capsys):
    arguments = ["--decoders", "3", "--prompt-tokens", "200", "--steps", "12", "--budget", "32", "--json"]
    assert long_prompt.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["largest_gap_steps"] for r in report.values()] == [1, 1]
    assert set(report) == {"lesson 3, one step", "chunks, 32 tokens a step"}
