"""Lesson 14. The smoke script: every path gives Hugging Face's tokens and accepts guesses."""

import json

from scripts import l14_smoke

import pytest


@pytest.mark.nightly
def test_every_path_equals_hugging_face_and_accepts_guesses(capsys):
    code = l14_smoke.main(["--max-new-tokens", "14", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"] and not report["not_exercised"]
    assert {*report["kv"]["equal"], *report["kv"]["left_out"]} == set(l14_smoke.PATHS)
    figures = [report["kv"]["speculation"][name] for name in report["kv"]["equal"]]
    assert all(0 < one["accepted"] == one["steps_saved"] <= one["drafts"] for one in figures)


@pytest.mark.nightly
def test_a_path_that_accepts_nothing_is_not_exercised(capsys, monkeypatch):
    monkeypatch.setattr(l14_smoke, "PATHS", {"batched": l14_smoke.batched})
    monkeypatch.setattr("mini_engine.speculation.lookup.find_continuation", lambda *_: None)
    assert l14_smoke.main(["--max-new-tokens", "4", "--json"]) == 0, "the tokens are equal"
    assert json.loads(capsys.readouterr().out)["not_exercised"] == ["no guess was accepted"]
