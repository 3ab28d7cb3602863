"""Lesson 10. The smoke script: all three paths equal Hugging Face, and none is left out."""

import json

from scripts import l10_smoke
from scripts.smoke import on_device

import pytest

from tests.support import checkpoint

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4,9", "--prompt-ids", "5,6,7,8,9"]


def smoke(capsys, *arguments):
    """Run the smoke script; return exit code, report (None if there is none) and stderr."""
    given = ["--model", str(checkpoint("two, tied, wide heads")), *PROMPTS, "--max-new-tokens", "6", "--json"]
    capsys.readouterr()  # transformers shows its progress when it writes a checkpoint
    try:
        code = l10_smoke.main([*given, *arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


@pytest.mark.parametrize("page", ["4", *(pytest.param(size, marks=pytest.mark.nightly) for size in ("1", "16"))])
def test_all_three_paths_equal_hugging_face(capsys, page):
    code, report, _ = smoke(capsys, "--block-size", page)
    assert code == 0 and report["match"] and report["lesson"] == 10
    assert report["kv"]["equal"] == {"plain": 3, "replayed": 3, "on device": 3}


@pytest.mark.parametrize("path", ["replayed", "on device"])
def test_other_tokens_fail_and_the_path_is_named(capsys, monkeypatch, path):
    real = l10_smoke.PATHS[path]

    def harmed(trial):
        outcome = real(trial)
        outcome.outputs[1] = [*outcome.outputs[1][:-1], 0]
        return outcome

    monkeypatch.setitem(l10_smoke.PATHS, path, harmed)
    code, report, _ = smoke(capsys)
    assert code == 1 and not report["match"] and report["kv"]["equal"][path] == 2
    assert report["faults"] == [f"{path}: answers [1] differ from Hugging Face's"]


def test_slots_that_stay_held_fail_whatever_the_dtype(capsys, monkeypatch):
    real = on_device.generate_on_device

    def leaks(model, kv, *rest):
        kv.allocator.alloc(kv.allocator.page_size)
        return real(model, kv, *rest)

    monkeypatch.setattr(on_device, "blocks_for", lambda prompts, args: [2 for _ in prompts])
    monkeypatch.setattr(on_device, "generate_on_device", leaks)
    code, report, _ = smoke(capsys, "--dtype", "bfloat16")
    assert code == 1 and report["faults"] == ["on device: 16 slots are still held"]
