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
