"""Course machinery. The ladder's rungs do the same work; every suite of `scripts/bench.py` can be asked for.

Protects readers of the ladder from figures of runs whose tokens differ or of rungs that do other work than theirs,
and those who measure their own machine from a traceback. Nothing here depends on the clock.
"""

import json
from types import SimpleNamespace

from scripts import make_random_qwen3
from scripts.bench import command, ladder, latents_crossing, rungs

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from tests.support import checkpoint

FAMILY = "two, tied, wide heads"

# ---------------------------------------------------------------- the rungs


@pytest.fixture(scope="module")
def small():
    """A small model and a load for it."""
    model = load_model(checkpoint(FAMILY))
    return model, rungs.make_load(5, model.config.vocab_size, common=32, own=24, answer=9, share=0.6)


def all_rungs(model, load):
    return {
        0: rungs.lesson_0(model),
        1: rungs.lesson_1(model, load),
        2: rungs.lesson_2(model, load),
        3: rungs.lesson_3(model, load),
        5: rungs.engine_rung(model, load, KvCacheManager),
        8: rungs.engine_rung(model, load, caching_manager),
    }


def test_all_lessons_give_the_same_tokens_and_count_what_they_compute(small):
    model, load = small
    done = {lesson: run(load) for lesson, run in all_rungs(model, load).items()}
    ladder.check_equal({lesson: [each] for lesson, each in done.items()})
    figures = {lesson: each.figures(load, 1024) for lesson, each in done.items()}
    for lesson in (1, 2, 3, 5):
        assert figures[lesson]["prefill_tokens"] == load.prompt_tokens, f"lesson {lesson} computes each prompt once"
    assert figures[8]["prefill_tokens"] == load.prompt_tokens - 4 * 32, "four of five find the 32 shared tokens there"
    lengths = [len(prompt) + i for prompt, wanted in load.jobs for i in range(wanted)]
    assert figures[0]["prefill_tokens"] == sum(lengths) - (load.new_tokens - 5), (
        "lesson 0 feeds the whole text each time"
    )
    assert all(len(each.first_tokens) == 5 for each in done.values()), "each request has one first token"
    assert figures[0]["waste"] is None and figures[2]["waste"] < figures[1]["waste"]
    assert figures[8]["kv_kib_a_request"] < figures[5]["kv_kib_a_request"]


def test_different_tokens_are_reported_and_not_compared():
    same, other = (SimpleNamespace(answers=answers) for answers in ([[1, 2], [3]], [[1, 2], [4]]))
    ladder.check_equal({0: [same], 1: [same, same]})
    with pytest.raises(UserError, match="lesson 8 answers 1 of 2 requests differently from lesson 0"):
        ladder.check_equal({0: [same], 8: [same, other]})


def test_a_quick_ladder_runs_and_writes(tmp_path, capsys):
    out = tmp_path / "ladder.json"
    arguments = ["ladder", "--quick", "--model", str(checkpoint(FAMILY)), "--requests", "2", "--json", str(out)]
    assert command.main([*arguments, "--lessons", "1,3,8"]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [row["lesson"].split()[0] for row in written["rows"]] == ["1", "3", "8"]
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


@pytest.mark.parametrize(("ratios", "measured"), [((60.0, 2.0, 0.5), 128), ((60.0, 3.0, 1.5), None)])
def test_the_crossing_of_both_ways_to_read_latents_is_found_and_drawn(ratios, measured, tmp_path):
    """Between 64 and 256 queries the ratio falls from 2 to a half, so it is 1 at 128; or the two ways never meet."""
    rows = [
        {"queries": q_len, "expanded ms": 10 * ratio, "absorbed ms": 10.0, "expanded / absorbed": ratio}
        for q_len, ratio in zip((1, 64, 256), ratios, strict=True)
    ]
    [found] = latents_crossing.growing_crossing(rows, guess=90)
    assert found["measured"] == (measured and pytest.approx(measured))
    assert (found["guessed"], found["counted"]) == (90, 164)  # 164: the page's count after 4,096 tokens
    latents_crossing.draw_growing(rows, found, tmp_path / "crossing.svg")
    drawn = (tmp_path / "crossing.svg").read_text(encoding="utf-8")
    assert "guessed: 90" in drawn and "counted: 164" in drawn
