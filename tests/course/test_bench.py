"""Course machinery. The ladder's rungs do the same work; every suite of `scripts/bench.py` can be asked for.

Protects readers of the ladder from figures of runs whose tokens differ, and those who measure their own machine from a
traceback. Nothing here depends on the clock.
"""

import json

from scripts import make_random_qwen3
from scripts.bench import command, rungs

import pytest
import torch

from mini_engine.families.qwen3 import load_model
from tests.support import checkpoint

FAMILY = "two, tied, wide heads"


def test_a_quick_ladder_runs_and_writes(tmp_path, capsys):
    out = tmp_path / "ladder.json"
    arguments = ["ladder", "--quick", "--model", str(checkpoint(FAMILY)), "--requests", "2", "--json", str(out)]
    assert command.main([*arguments, "--lessons", "0,1,2,3,5,8"]) == 0, "it compares their tokens, too"
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [row["lesson"].split()[0] for row in written["rows"]] == ["0", "1", "2", "3", "5", "8"]
    assert written["machine"]["read_gb_s"] > 0 and "dirty" in written["machine"], (
        "figures mean nothing without the machine"
    )
    assert "measured in this run: memory reads at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ladder", "--lessons", "1,4"], "give some of 0,1,2,3,5,8,9"),
        (["ladder", "--lessons", "1,x"], "'1,x' is not a list of numbers"),
        (["ladder", "--quick", "--write"], "leave out --quick and --lessons"),
        (["ladder", "--plot", "ladder.txt"], ".svg, .png, .pdf"),
        (["ladder", "--model", "nowhere"], "no directory nowhere"),
        (["peers", "--peers", "oars"], "invalid choice: 'oars'"),
        (["step", "--batches", "0"], "give numbers such as 1,8,16"),
        (["kv_dtype", "--parts", "quality", "--text", "nowhere.txt"], "the text nowhere.txt cannot be read"),
        (["stairs"], "there is no suite 'stairs'"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("scripts.bench.turns.measure_rates", lambda device: None)
    try:
        code = command.main(arguments)
    except SystemExit as leave:
        code = leave.code
    err = capsys.readouterr().err
    assert code == 2 and said in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize("suite", command.suites())
def test_every_suite_has_help(suite, capsys):
    with pytest.raises(SystemExit) as leave:
        command.main([suite, "--help"])
    assert leave.value.code == 0 and "--json" in capsys.readouterr().out


# ---------------------------------------------------------------- random checkpoints


def make(tmp_path, *options: str) -> int:
    return make_random_qwen3.main(["--shape", "pocket", "--out", str(tmp_path / "m"), *options])


def test_a_random_checkpoint_runs_here_and_in_transformers_alike(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert make(tmp_path, "--dtype", "float32", "--tokenizer") == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "m").encode("The capital of France is")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    ours, no_cache = load_model(tmp_path / "m"), rungs.no_cache
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
        got = ours(torch.tensor(ids), no_cache.NoCache(), no_cache.Recompute().plan(ids))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert got.std() > 0.01, "random weights, not empty ones"
