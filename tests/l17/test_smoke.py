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
    paths = {*l17_smoke.PATHS, *l17_smoke.MORE}
    assert set(report["kv"]["equal"]) >= paths - set(report["kv"]["left_out"])
    assert all(report["kv"]["restored_tokens"].values())
    kl = {name: float(value) for name, value in report["kv"]["KL"].items()}
    assert 0 < kl["int8"] < kl["int4"], "tokens say nothing of this"
