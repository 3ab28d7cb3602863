"""Lesson 4. The smoke script: greedy tokens equal, draws the same alone and in a batch, failures reported."""

import json

from scripts import l4_smoke

import pytest

from mini_engine.engine import sampler
from tests.support import checkpoint


@pytest.fixture(scope="module")
def model():
    """Options for a model and two prompts."""
    return ["--model", str(checkpoint("four, with biases")), "--prompt-ids", "1,2,3", "--prompt-ids", "4"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", "0"],
        ["--temperature", "1.3", "--top-k", "30", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2"],
    ],
)
def test_greedy_tokens_are_equal_and_draws_are_the_same_alone(capsys, model, options):
    code = l4_smoke.main([*model, "--json", "--max-new-tokens", "12", *options])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"]
    assert [len(request["ours"]) for request in report["requests"]] == [12, 12] == [len(ids) for ids in report["drawn"]]
    assert report["kv"]["free_at_end"] == report["kv"]["blocks"], "blocks were not freed"


def test_the_printed_report_covers_both_parts(capsys, model):
    assert l4_smoke.main([*model, "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "PASS: 2 of 2 answers equal Hugging Face's" in out
    assert "beside greedy neighbours, the same alone and from transformers' distributions:" in out


def test_draws_that_depend_on_the_batch_fail_the_script(capsys, model, monkeypatch):
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: logits.argmin(dim=-1))
    assert l4_smoke.main([*model, "--max-new-tokens", "3", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["match"] and len(report["faults"]) == 2 and "drawn beside neighbours" in report["faults"][0]


def test_a_distribution_that_is_not_transformers_fails_the_script(capsys, model, monkeypatch):
    monkeypatch.setattr("scripts.smoke.packed.process", lambda logits, rows: logits - 1)
    assert l4_smoke.main([*model, "--max-new-tokens", "3"]) == 1
    out = capsys.readouterr().out
    assert "prompt 1: the distributions of new tokens [0, 1, 2] differ from transformers'" in out and "FAIL" in out


@pytest.mark.parametrize(
    "options, words",
    [
        (["--top-p", "1.5"], "top_p is 1.5; give a number from 0 to 1"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-k", "-2"], "top_k is -2"),
    ],
)
def test_a_wrong_option_exits_2_with_one_line(capsys, model, options, words):
    assert l4_smoke.main([*model, *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1, error
