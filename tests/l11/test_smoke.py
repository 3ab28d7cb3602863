"""Lesson 11. The smoke script on a random hybrid, and the commands that take one without a flag."""

import json

from scripts import l11_smoke
from scripts.smoke.arguments import pocket_dir

import pytest

from tests.shared.hybrids import checkpoint

FAMILY = "every third, four value heads a key head, wide keys"
PROMPTS = ["--prompt-ids", "1,2,3,4,5,6,7,8,9,10", "--prompt-ids", "4", "--prompt-ids", "5,6,7,8,9"]


def smoke(*arguments):
    try:
        return l11_smoke.main(["--model", str(checkpoint(FAMILY)), *PROMPTS, *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.reference  # a check runs the script itself
def test_every_path_equals_hugging_face(capsys):
    code = smoke("--max-new-tokens", "9", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"], report["faults"]
    paths = {"alone", "batched", "chunks of 1", "chunks of 7", "preempted", "cached prefix", "on device"}
    assert paths <= set(report["kv"]["equal"]) and set(report["kv"]["equal"].values()) == {3}
    assert report["kv"]["state_bytes"] > 0
    assert set(report["kv"]["left_out"]) == {"chunks of 33", "chunks of 64"}, "the longest prompt has 10 tokens"


def test_a_qwen3_is_refused_and_pointed_back(capsys):
    assert l11_smoke.main(["--model", str(pocket_dir()), *PROMPTS]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("number", range(11))
def test_an_earlier_lesson_s_script_points_to_what_runs_it(number, capsys):
    script = pytest.importorskip(f"scripts.l{number}_smoke", reason="needs the server's packages")
    path = str(checkpoint(FAMILY))
    capsys.readouterr()  # transformers shows its progress when it writes one
    assert script.main(["--model", path, *PROMPTS]) == 2
    error = capsys.readouterr().err
    assert "LLM" in error and len(error.strip().splitlines()) == 1, error
