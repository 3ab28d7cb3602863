"""Lesson 12. The smoke script: every way that KV comes back gives Hugging Face's tokens, and saves some work."""

import json

from scripts import l12_smoke

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("model", [[], ["--model", "pocket-hybrid"]], ids=["dense", "hybrid"])
def test_every_path_equals_hugging_face_and_restores_something(model, capsys):
    code = l12_smoke.main([*model, "--max-new-tokens", "12", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"] and not report["not_exercised"]
    assert set(report["kv"]["equal"]) == set(l12_smoke.PATHS)
    assert all(report["kv"]["restored_tokens"][name] > 0 for name in ("host", "disk", "restart", "swapped"))


@pytest.mark.nightly
def test_prompts_without_a_whole_block_pass_and_say_what_they_do_not_show(capsys, monkeypatch):
    monkeypatch.setattr(
        l12_smoke, "PATHS", {name: l12_smoke.PATHS[name] for name in ("cold", "host", "disk", "swapped")}
    )
    code = l12_smoke.main(["--prompt-ids", "5", "--prompt-ids", "7,8,9", "--max-new-tokens", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"]
    said = {"host: no token came back from a tier", "disk: nothing was read from the disk"}
    assert set(report["not_exercised"]) >= said


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--block-size", "0"], "0 is too small"), (["--nonsense"], "nonsense")]
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, named):
    try:
        code = l12_smoke.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and named in capsys.readouterr().err
