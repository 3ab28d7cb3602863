"""Lesson 14. The smoke script: every path gives Hugging Face's tokens and accepts guesses."""

import json

from scripts import l14_smoke

import pytest


@pytest.mark.slow("mini_engine", "scripts/l14_smoke.py", "scripts/smoke")
def test_every_path_equals_hugging_face_and_accepts_guesses(capsys):
    code = l14_smoke.main(["--max-new-tokens", "14", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"]
    assert {*report["kv"]["equal"], *report["kv"]["left_out"]} == {l14_smoke.BATCHED, *l14_smoke.OTHERS}
    figures = [report["kv"]["speculation"][name] for name in report["kv"]["equal"]]
    assert all(0 < one["accepted"] == one["steps_saved"] <= one["drafts"] for one in figures)


@pytest.mark.slow("mini_engine", "scripts/l14_smoke.py", "scripts/smoke")
def test_a_path_that_accepts_nothing_fails_on_the_scripts_own_prompts(capsys, monkeypatch):
    monkeypatch.setattr(l14_smoke, "OTHERS", {})
    monkeypatch.setattr("mini_engine.speculation.lookup.find_continuation", lambda *_: None)
    assert l14_smoke.main(["--max-new-tokens", "4", "--json"]) == 1
    assert "no guess was accepted" in json.loads(capsys.readouterr().out)["faults"]


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--block-size", "0"], "0 is too small"), (["--nonsense"], "nonsense")]
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, named):
    try:
        code = l14_smoke.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and named in capsys.readouterr().err
