"""Lesson 17. The smoke script: in as many bits every path gives the same tokens, and what cannot run is refused."""

import json

from scripts import l17_smoke

import pytest

from mini_engine.pocket import POCKET_DIR

pytestmark = pytest.mark.reference
IDS = ["--prompt-ids", ",".join(map(str, range(5, 45))), "--prompt-ids", "9,8,7", "--prompt-ids", "11,12,13,14"]


@pytest.mark.nightly
def test_every_path_gives_the_tokens_of_its_bits(capsys):
    code = l17_smoke.main(["--model", str(POCKET_DIR), *IDS, "--max-new-tokens", "8", "--json", "--all"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"] and not report["faults"] and not report["not_exercised"]
    assert not set(report["kv"]["left_out"]) - {"int8 kernel cpu", "int4 kernel cpu"}, "these need a compiler"
    paths = {"float32", *l17_smoke.paths(l17_smoke.WAYS | l17_smoke.MORE_WAYS)}
    assert set(report["kv"]["equal"]) >= paths - set(report["kv"]["left_out"])
    assert all(report["kv"]["restored_tokens"].values())
    kl = {name: float(value) for name, value in report["kv"]["KL"].items()}
    assert 0 < kl["int8"] < kl["int4"], "tokens say nothing of this"


@pytest.mark.nightly
def test_a_path_with_other_tokens_is_a_fault(capsys, monkeypatch):
    monkeypatch.setattr(l17_smoke, "WAYS", {"batched": l17_smoke.batched})
    right = l17_smoke.answers
    monkeypatch.setattr(
        l17_smoke,
        "answers",
        lambda engine, prompts, *rest, **named: [
            [*ids[:-1], 0] if len(prompts) > 1 else ids for ids in right(engine, prompts, *rest, **named)
        ],
    )
    code = l17_smoke.main(["--model", str(POCKET_DIR), *IDS, "--max-new-tokens", "4", "--json"])
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert code == 1 and len(faults) == 2
    assert all("batched" in fault and "those expected" in fault for fault in faults)


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--block-size", "0"], "0 is too small"), (["--nonsense"], "nonsense")]
)
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, named):
    try:
        code = l17_smoke.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and named in capsys.readouterr().err
