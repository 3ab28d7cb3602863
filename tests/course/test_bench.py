"""Course machinery. The benchmarks' output, their protocol with other engines, and what they count.

Protects readers of the ladder and of `scripts/bench.py` from figures of runs whose tokens differ, of rungs that do
other work than their lesson, and from wrong counts and limits. Nothing here depends on the clock.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

from scripts import ROOT, make_random_qwen3
from scripts.bench import (
    block_size,
    blocks,
    command,
    kernel,
    ladder,
    peer_protocol,
    peers,
    plot,
    prefill_parts,
    routers,
    rungs,
    runs,
    step,
)
from scripts.bench.common import Report
from scripts.bench.kv_quality import PIECE, compare, text_of
from scripts.bench.turns import Timing, take_turns
from scripts.pages import ladder as ladder_page

import pytest
import torch

from mini_engine.attention.registry import KERNEL_NAMES
from mini_engine.base.errors import UserError
from mini_engine.distributed.routing.policy import RoundRobin
from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from tests.course.threads import wait_policy
from tests.support import checkpoint, write_checkpoint

LADDER = ladder.FOLDER
FAMILY = "two, tied, wide heads"


# ---------------------------------------------------------------- the ladder's page


@pytest.fixture(scope="module")
def committed() -> Report:
    return ladder_page.read_report(LADDER / "ladder.json")


def test_the_ladders_page_says_what_its_figures_say(committed):
    page = (LADDER / "README.md").read_text(encoding="utf-8")
    assert ladder_page.filled(page, committed) == page, "run `python scripts/bench.py ladder --write`, or undo the edit"


def test_the_ladders_picture_is_drawn_from_its_figures(committed, tmp_path):
    pytest.importorskip("matplotlib")
    ladder_page.draw_ladder(committed.rows, tmp_path / "ladder.svg")
    drawn, kept = ((folder / "ladder.svg").read_text(encoding="utf-8") for folder in (tmp_path, LADDER))
    assert drawn == kept, "the picture is older than the figures or than the code that draws it"
    assert "prefers-color-scheme: dark" in drawn and 'aria-label="What each lesson bought' in drawn


def test_the_committed_ladder_rises(committed):
    rows = {int(row["lesson"].split()[0]): row for row in committed.rows}
    assert list(rows) == sorted(rows) and {0, 1, 2, 3, 5, 8, 9} <= set(rows), (
        "every lesson that changes how work is done"
    )
    for lesson, before in ((1, 0), (3, 2), (5, 3), (8, 5), (9, 8)):
        assert rows[lesson]["new tokens/s"] > rows[before]["new tokens/s"], f"lesson {lesson} is made for speed"
    assert rows[2]["waste %"] < rows[1]["waste %"] / 4, "blocks are there to leave little empty"
    assert rows[8]["KiB a request"] < rows[5]["KiB a request"], "a shared beginning is kept once"
    assert rows[0]["prefill tokens"] > rows[1]["prefill tokens"] > rows[8]["prefill tokens"]


def test_a_page_that_has_lost_a_place_is_refused_before_anything_is_written(committed, tmp_path):
    (tmp_path / "README.md").write_text("# Empty\n", encoding="utf-8")
    with pytest.raises(UserError, match="no <!-- ladder: "):
        ladder_page.write_page(committed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


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


def test_a_rung_gives_the_same_when_run_again(small):
    model, load = small
    for lesson, run in all_rungs(model, load).items():
        first, second = run(load), run(load)
        assert first.answers == second.answers and first.fed == second.fed, f"lesson {lesson} left something behind"


def test_the_load_is_the_same_at_every_call_and_its_prompts_begin_alike():
    one, two = (rungs.make_load(6, 100, common=8, own=20, answer=10, share=0.4) for _ in range(2))
    assert one == two
    assert len({tuple(prompt[:8]) for prompt, _ in one.jobs}) == 1 and len({tuple(p) for p, _ in one.jobs}) == 6
    assert max(len(prompt) + wanted for prompt, wanted in one.jobs) <= one.longest


def test_a_batch_of_lesson_3_fits_into_the_pool():
    load = rungs.make_load(20, 100, common=8, own=90, answer=40, share=0.3)
    found = rungs.batches(load)
    assert [job for batch in found for job in batch] == load.jobs and len(found) > 1
    for batch in found:
        assert sum(-(-(len(prompt) + wanted - 1) // 16) for prompt, wanted in batch) <= load.pool_blocks


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


def test_threads_wait_as_in_use_while_a_suite_measures():
    """The smoke scripts' setting, which suits a busy machine, would change the figures."""
    assert wait_policy("from scripts.bench.command import main; main(['ladder', '--quick'])") == "None"


def test_contenders_take_turns_and_the_warm_up_is_not_counted():
    called, now = [], iter(range(100))
    runs_of = {name: lambda name=name: called.append(name) for name in "ab"}
    timings = take_turns(runs_of, 3, "", clock=lambda: float(next(now)))
    assert "".join(called) == "ab" * 4, "a warm-up, then round by round"
    assert [timing.seconds for timing in timings.values()] == [[1.0] * 3] * 2


# ---------------------------------------------------------------- pictures


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot.check_plot(Path("x.svg"))


# ---------------------------------------------------------------- engines in processes of their own

FAKE = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "load":
        print(json.dumps({"version": "1", "pool_bytes": 0}), flush=True)
    elif asked["do"] == "quit":
        print(json.dumps({"peak_bytes": 7}), flush=True)
    elif asked.get("how") == "refuse":
        print(json.dumps({"error": "I would rather not"}), flush=True)
    elif asked.get("how") == "die":
        sys.stderr.write("first words\\nlast words\\n"); sys.stderr.flush(); os._exit(3)
    elif asked.get("how") == "babble":
        print("hello", flush=True)
    elif asked.get("how") == "sleep":
        time.sleep(60)
    else:
        print(json.dumps({"seconds": 2.0, "decode_tokens": 6, "decode_seconds": 1.0}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE, encoding="utf-8")
    return (str(worker),)


def test_a_peer_answers_and_ends(fake):
    with peer_protocol.Peer("fake", worker=fake) as peer:
        assert peer.ask({"do": "load"})["version"] == "1"
        assert peer.ask({"do": "run", "jobs": []})["decode_tokens"] == 6
        assert peer.quit() == 7
    assert peer.process.poll() is not None, "no process stays behind"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuse", "I would rather not"),
        ("die", "its process ended; it last said: last words"),
        ("babble", "which is not JSON"),
        ("sleep", "did not answer within 1 s"),
    ],
)
def test_a_failure_of_a_peer_is_one_sentence(fake, how, said):
    with peer_protocol.Peer("fake", worker=fake) as peer, pytest.raises(peer_protocol.PeerError, match=said):
        peer.ask({"do": "run", "how": how}, timeout=1 if how == "sleep" else 60)
    assert peer.process.poll() is not None, "no process stays behind"


def test_a_missing_interpreter_is_one_sentence(fake):
    with pytest.raises(peer_protocol.PeerError, match="nowhere/python cannot be started"):
        peer_protocol.Peer("fake", python="nowhere/python", worker=fake)


class Scripted:
    """A peer that answers a given number of times, then fails."""

    def __init__(self, often: int) -> None:
        self.often, self.asked, self.closed = often, 0, False

    def ask(self, what):
        self.asked += 1
        if self.asked > self.often:
            raise peer_protocol.PeerError("enough")
        return {"seconds": 2.0, "decode_tokens": 6, "decode_seconds": 1.0}

    def close(self):
        self.closed = True


def test_an_engine_that_fails_is_dropped_and_the_others_continue(monkeypatch):
    monkeypatch.setattr(peers, "memory_reader", lambda: lambda: None)
    monkeypatch.setattr(peers, "PAUSE", 0)
    good, bad, notes = Scripted(9), Scripted(1), []
    ready = {"ours": good, "bad": bad}
    found = peers.rounds_of(ready, [([1, 2], 3)], 3, notes)
    assert good.asked == 3 and bad.asked == 2 and bad.closed and list(ready) == ["ours"]
    assert notes == ["left out from here on: bad; enough"] and set(found) == {"", "ours"}
    [row] = peers.rows_of("ragged, 1 requests", [([1, 2], 3)], found, 100)
    assert row["tokens/s"] == 1.5 and row["ours is ×"] == 1.0 and row["% of memory"] is None


def test_what_a_speed_counts_depends_on_the_load():
    figures = {"seconds": 2.0, "decode_tokens": 6, "decode_seconds": 0.5}
    jobs = [([1, 2, 3, 4], 4), ([1, 2], 4)]
    assert peers.speed("decode, 2 at once", jobs, figures) == 12.0, "decoding alone, without the prefill"
    assert peers.speed("ragged, 2 requests", jobs, figures) == 4.0, "all answers over all the time"
    assert peers.speed("prefill, 2", jobs, figures) == 3.0, "prompt tokens over all the time"


def test_the_watch_counts_decoding_from_when_all_have_begun():
    seen = runs.Watch([([1], 3), ([1], 2)])
    for when, tokens in enumerate(({0: [5]}, {0: [5, 6], 1: [7]}, {0: [5, 6, 7], 1: [7, 8, 9]}), 1):
        seen.note(runs.Step(seen.begun + when, tokens))
    assert seen.figures() == pytest.approx({"seconds": 3.0, "decode_tokens": 2, "decode_seconds": 1.0})
    assert seen.first_tokens == pytest.approx([1, 2]) and seen.answers == [[5, 6, 7], [7, 8]], "none beyond the wanted"
    unfinished = runs.Watch([([1], 3)])
    unfinished.note(runs.Step(0.0, {0: [1, 2]}))
    with pytest.raises(RuntimeError, match="3 tokens were wanted and 2 came"):
        unfinished.figures()


def test_ours_and_transformers_give_the_same_tokens_and_each_run_begins_with_an_empty_cache(tmp_path):
    directory = write_checkpoint(tmp_path, num_hidden_layers=1)
    engine = Engine.for_model(load_model(directory), num_blocks=32, manager=caching_manager)
    ways = [runs.ours(engine), runs.padded(runs.load_hf(directory, "float32"))]
    jobs = [(list(range(1, 40)), 4), ([5], 2)]
    for way in ways:
        first, again = (runs.watch(way, [jobs, jobs]) for _ in range(2))
        assert [len(answer) for answer in first[0].answers] == [4, 2]
        assert [seen.prefill_tokens for seen in first] == [seen.prefill_tokens for seen in again], (
            "the cache was cleared"
        )
    assert runs.watch(ways[0], [jobs])[0].answers == runs.watch(ways[1], [jobs])[0].answers
    assert first[0].prefill_tokens > 0


@pytest.mark.nightly
def test_our_engine_and_transformers_answer_in_processes_of_their_own(tmp_path):
    model = write_checkpoint(tmp_path, num_hidden_layers=1)
    for name in ("ours", "transformers generate"):
        with peer_protocol.Peer(name) as peer:
            asked = {"do": "load", "engine": name, "model": str(model), "dtype": "float32", "threads": 1}
            asked |= peers.room_of(Namespace(behind=[]))
            assert peer.ask(asked)["version"]
            found = peer.ask({"do": "run", "jobs": [[[1, 2, 3], 4], [[5], 2]]})
            assert found["decode_tokens"] == 4, "six tokens, and the two first ones come from the prefill"
            assert "error" not in found and found["seconds"] >= found["decode_seconds"] > 0
            with pytest.raises(peer_protocol.PeerError, match="KeyError"):
                peer.ask({"do": "load", "engine": "nobody", "threads": 1})
            assert peer.quit() >= 0


def test_a_load_has_the_same_prompts_at_every_call():
    one, two = (peers.loads_of(1000, quick=False) for _ in range(2))
    assert one == two
    assert [len(jobs) for jobs in one.values()] == [1, 8, 16, 32, 24, 16, 8]
    shared = next(jobs for name, jobs in one.items() if name.startswith("shared"))
    assert len({tuple(ids[:512]) for ids, _ in shared}) == 1 and {len(ids) for ids, _ in shared} == {528}


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_each_weight_once_and_an_embedding_not_at_all(tmp_path, tied):
    directory = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    parameters = {name: p.numel() for name, p in load_model(directory).named_parameters()}
    expected = sum(n for name, n in parameters.items() if tied or name != "model.embed_tokens.weight")
    assert peers.weight_bytes(directory, 2) == 2 * expected


# ---------------------------------------------------------------- a step's parts


def test_a_prefill_steps_parts_and_rests_make_up_the_step():
    parts = {"matrices": 6.0, "attention": 2.0, "waiting": 0.5}
    rounds = [prefill_parts.Round(parts, model=9.0, step=10.0, onednn=5.0)] * 3
    rows = {row["part"]: row for row in prefill_parts.rows_of(rounds)}
    assert sum(row["% of step"] for part, row in rows.items() if part != "whole step") == pytest.approx(100)
    assert rows["head and Python"]["ms"] == pytest.approx(500) and rows["matrices"]["× oneDNN"] == pytest.approx(1.2)
    said = prefill_parts.verdict(rounds)
    assert "1.200 times oneDNN's" in said and "33.3 % of the model's" in said


def test_a_steps_parts_make_up_the_step():
    times = {"step": 10, "model": 8, "linears": 5, "attention": 2, "sampling": 0.5, "schedule and plan": 0.5}
    parts = step.parts_of({name: Timing([value]) for name, value in times.items()})
    assert list(parts) == list(step.PARTS) and sum(parts.values()) == 10
    assert parts["rest of the model"] == 1 and parts["rest of the engine"] == 1


def test_int8_stays_close_on_a_file_that_the_model_cannot_predict():
    model, texts = text_of(ROOT / "LICENSE")
    assert max(map(len, texts)) <= PIECE, "long files are cut into pieces"
    found = compare(model, texts)
    assert 1e-5 < found["int8"].kl < 1e-3 and found["plain int4"].kl > 5e-3, "measured: 9e-5 and 0.018"
    assert found["int8"].kl < found["int4"].kl < found["plain int4"].kl


def test_a_limit_is_bytes_or_arithmetic_whichever_takes_longer():
    config = load_model(checkpoint(FAMILY)).config
    rates = SimpleNamespace(read=1e9, matrix={"bfloat16": 1e12})
    one, many = (step.limits(config, 10**6, n, 100, rates, torch.bfloat16)["linears"] for n in (1, 4000))
    assert one == pytest.approx(1e-3), "few rows: the weights must be read"
    assert many == pytest.approx(4000 * 10**6 / 1e12), "many rows: two operations for each weight and row"


def test_the_linears_of_a_model_are_found_with_the_head():
    model = load_model(checkpoint(FAMILY))
    found = step.linears_of(model)
    assert len(found) == 7 * model.config.num_hidden_layers + 1
    for linear, inputs in found:
        assert linear(torch.zeros(2, inputs)).shape[0] == 2


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


def test_a_checkpoint_is_replaced_only_on_request_and_then_completely(tmp_path, capsys):
    assert make(tmp_path) == 0
    (tmp_path / "m" / "model-00001-of-00002.safetensors").touch()
    assert make(tmp_path) == 2 and "is not empty; give another --out, or --overwrite" in capsys.readouterr().err
    assert make(tmp_path, "--overwrite") == 0
    left = {path.name for path in (tmp_path / "m").iterdir()}
    assert left == {"config.json", "model.safetensors"}, "no shard and no index of the old one stays behind"


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make_random_qwen3.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert make(tmp_path) == 2
    err = capsys.readouterr().err
    assert "the weights take" in err and err.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors")) and not (tmp_path / "m").exists()


def test_the_public_shapes_have_their_public_sizes():
    """Parameters as the models' cards give them, in billions."""
    for shape, billions in {"0.6B": 0.596, "1.7B": 1.72, "4B": 4.02, "8B": 8.19}.items():
        sizes = make_random_qwen3.SHAPES[shape]
        hidden, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
        q, kv = sizes["num_attention_heads"] * 128, sizes["num_key_value_heads"] * 128
        heads = 1 if sizes.get("tie_word_embeddings", True) else 2
        count = layers * (2 * hidden * (q + kv) + 3 * hidden * inner) + heads * sizes["vocab_size"] * hidden
        assert count / 1e9 == pytest.approx(billions, rel=0.01)


# ---------------------------------------------------------------- lesson 13's routers


def test_the_routers_suite_counts_what_real_servers_found(monkeypatch):
    pytest.importorskip("fastapi", reason="the server is an extra")
    monkeypatch.setattr(routers, "SERVERS", 1)
    found = routers.measured(lambda urls: routers.ours(urls, RoundRobin()), [[1, 2, 3]] * 2)
    assert found["max / mean"] == 1 and 0 <= found["cached %"] < 100


# ---------------------------------------------------------------- lesson 3's kernels and blocks


def test_both_layouts_of_blocks_do_the_same_work(monkeypatch):
    for name, size in {"BLOCKS": 6, "PARTS": 4, "PART": (8, 1, 2)}.items():
        monkeypatch.setattr(blocks, name, size)
    ways = blocks.contenders([3, 1])

    def copied(layout: str) -> torch.Tensor:
        found = [run for (task, name), run in ways.items() if task == blocks.COPY and name.startswith(layout)]
        outs = [run()[0]._base.clone() for run in found]  # every copy goes into one tensor
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0]

    assert torch.equal(copied(blocks.APART), copied(blocks.TOGETHER)) and copied(blocks.APART).all()
    for (task, _), run in ways.items():
        if task == blocks.CLEAR:
            run()
    assert not copied(blocks.APART).any() and not copied(blocks.TOGETHER).any()
    for (task, _), run in ways.items():
        if task == blocks.WRITE:
            run()
    assert torch.equal(copied(blocks.APART), copied(blocks.TOGETHER))
    assert copied(blocks.APART).flatten(3).any(-1).nonzero()[:, 2].unique().tolist() == [5], "one token of each block"


def test_larger_blocks_leave_more_slots_empty():
    shares = [block_size.wasted(size) for size in (1, *block_size.SIZES)]
    assert shares[0] == 0 and shares == sorted(shares), "a block of one slot is never partly empty"
    assert shares[2] == pytest.approx(7.5 / (500.5 + 7.5), rel=0.1), "half a block of 16 less a slot, for each request"


def test_the_kernel_suite_measures_every_kernel_that_runs_on_a_cpu():
    ready = kernel.prepare(kernel.make_batch(2, 9, block_size=4), quick=True)
    assert {f"our {name}" for name in KERNEL_NAMES} - set(ready) <= {"our auto", "our triton", "our cpu"}
    assert ("our cpu" in ready) == ("our scalar C++" in ready), "both or none, as there is a compiler"
