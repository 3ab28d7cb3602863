"""Lesson 8. The smoke script: four ways to share, each answer equal to that of a cold run."""

import json

from scripts import l8_smoke

import pytest

from tests.support import checkpoint

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4,9", "--prompt-ids", "5,6,7,8,9"]


def smoke(*arguments):
    try:
        return l8_smoke.main(["--model", str(checkpoint("four, with biases")), *PROMPTS, *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("size", ["4", pytest.param("7", marks=pytest.mark.nightly)])
def test_every_scenario_finds_prefixes_and_equals_the_cold_runs(capsys, size):
    code = smoke("--block-size", size, "--max-new-tokens", "9", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"]
    for name, figures in report["scenarios"].items():
        assert figures["found_tokens"] > 0 and figures["held_at_end"] == 0, name
    assert report["scenarios"]["eviction"]["evicted_blocks"] > 0


@pytest.mark.nightly
def test_the_printed_report_shows_the_hit_rates(capsys):
    assert smoke("--max-new-tokens", "3") == 0
    assert "chat: 3 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words", [(["--block-size", "0"], "0 is too small"), (["--kernel", "fast"], "'fast'")]
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, words):
    assert smoke(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1, error
