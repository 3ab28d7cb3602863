"""Lesson 7. The smoke script: OpenAI's client against a server of its own."""

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


def test_too_small_a_pool_is_one_line(capsys):
    assert smoke("--num-blocks", "2", "--max-new-tokens", "20") == 2
    error = capsys.readouterr().err
    assert "need 2 blocks of 16" in error and len(error.strip().splitlines()) == 1, error
