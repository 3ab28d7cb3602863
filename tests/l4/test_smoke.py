"""Lesson 4. The smoke script reports draws that depend on the batch, and distributions that are not transformers'."""

import json

from scripts import l4_smoke

import pytest

from mini_engine.engine import sampler
from tests.support import checkpoint


@pytest.fixture(scope="module")
def model():
    """Options for a model and two prompts."""
    return ["--model", str(checkpoint("four, with biases")), "--prompt-ids", "1,2,3", "--prompt-ids", "4"]


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
