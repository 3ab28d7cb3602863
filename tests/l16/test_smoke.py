"""Lesson 16. The smoke script: every path gives Hugging Face's tokens; what cannot run is refused, exit code 2."""

import json
import shutil

from scripts import l16_smoke
from scripts.smoke.paths import batched

import pytest

from tests.l16.models import LONG, PROMPTS, checkpoint

pytestmark = pytest.mark.reference
IDS = [word for ids in (*PROMPTS, LONG[:64] * 2) for word in ("--prompt-ids", ",".join(map(str, ids)))]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["interleaved", "yarn without mscale, plain"])
def test_every_path_equals_hugging_face(family, capsys):
    code = l16_smoke.main(["--model", str(checkpoint(family)), *IDS, "--max-new-tokens", "12", "--json", "--all"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"]
    left_out = set(report["kv"]["left_out"]) - {"packed layers", "kernel cpu"}  # these need a compiler
    assert left_out == {"restart"}, "these checkpoints have no tokenizer, which a server needs"
    paths = {*l16_smoke.PATHS, *l16_smoke.MORE}
    assert set(report["kv"]["equal"]) >= paths - set(report["kv"]["left_out"])
    assert all(report["kv"]["restored_tokens"].values())
    assert not [line for line in report["not_exercised"] if not line.startswith("speculation")]


def harmed(trial, **options):
    """Run all prompts together, and change their last tokens."""
    done = batched(trial, **options)
    done.outputs = [[*ids[:-1], 0] for ids in done.outputs]
    return done


@pytest.mark.nightly
def test_a_path_with_other_tokens_is_a_fault(capsys, monkeypatch):
    monkeypatch.setattr(l16_smoke, "PATHS", {"alone": l16_smoke.alone, "batched": harmed})
    code = l16_smoke.main(["--model", str(checkpoint()), *IDS[:6], "--max-new-tokens", "4", "--json"])
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert code == 1 and len(faults) == 1
    assert "batched" in faults[0] and "Hugging Face's" in faults[0]


def test_a_model_that_cannot_run_is_refused_in_one_line(tmp_path, capsys):
    shutil.copytree(checkpoint(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}), encoding="utf-8")
    capsys.readouterr()  # transformers shows how it writes a checkpoint, if none was written before
    assert l16_smoke.main(["--model", str(tmp_path), "--prompt-ids", "1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "num_key_value_heads" in said[0]


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--block-size", "0"], "0 is too small"), (["--nonsense"], "nonsense")]
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, named):
    try:
        code = l16_smoke.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and named in capsys.readouterr().err
