"""Lesson 7. The smoke script: OpenAI's client against a server of its own."""

import json

from scripts import l7_smoke

import pytest

pytestmark = pytest.mark.reference  # a check runs the script itself


@pytest.fixture(scope="module", autouse=True)
def _client():
    pytest.importorskip("openai", reason="needs the openai client")


def smoke(*arguments):
    try:
        return l7_smoke.main(list(arguments))
    except SystemExit as stop:
        return stop.code


def test_tokens_are_equal_whole_and_streamed_and_every_block_comes_back(capsys):
    code = smoke(
        "--prompt", "The capital of France is", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--json"
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and len(report["requests"]) == 2
    assert report["kv"]["whole_equals_streamed"] and report["kv"]["free_at_end"] == report["kv"]["blocks"]


def test_too_small_a_pool_is_one_line(capsys):
    assert smoke("--num-blocks", "2", "--max-new-tokens", "20") == 2
    error = capsys.readouterr().err
    assert "need 2 blocks of 16" in error and len(error.strip().splitlines()) == 1, error
