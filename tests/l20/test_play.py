"""Lesson 20. `play evictor`: a student's evictor is scored, its mistakes are named, and none breaks the tree."""

import json
from dataclasses import replace

import pytest

from lessons._course import cli
from lessons.l20_agents import contest as module
from lessons.l20_agents.contest import YOURS, contest, seed_of
from lessons.l20_agents.guarded import EXAMPLE, Guarded, is_whole, load_evictor
from lessons.l20_agents.replay import Replay
from mini_engine.base.errors import UserError
from mini_engine.kv.radix import RadixTree
from tests.l20.loads import turns

HEAD = "from mini_engine.kv.eviction import EvictionPolicy\n\n\nclass Evictor(EvictionPolicy):\n"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A load and a pool for which a contest takes milliseconds."""
    monkeypatch.setattr(module, "LOAD", replace(module.LOAD, agents=3, sessions=1, turns=(5.0, 0.3), scale=20.0))
    monkeypatch.setattr(module, "POOL", 60)


def evictor(tmp_path, body, head=HEAD):
    path = tmp_path / "mine.py"
    path.write_text(head + body, encoding="utf-8")
    return path


def guarded_run(path, num_blocks=45):
    """Replay with a file's evictor; return the guard and the replay."""
    made = []

    def make(replay):
        made.append(Guarded(load_evictor(path), path, replay.num_blocks, lambda: replay.now))
        return made[0]

    replay = Replay(turns(3), make, num_blocks)
    made[0].tree = replay.tree
    replay.run()
    return made[0], replay


def test_the_example_plays(tmp_path):
    path = evictor(tmp_path, "", EXAMPLE)
    rows = {row["policy"]: row for row in contest(path, 1).rows}
    assert set(rows) == {YOURS, "LRU", "SLRU", "TLRU", "sessions", "Belady"}
    assert rows["Belady"]["day: of Belady's %"] == 100


def test_lru_written_by_a_student_has_lrus_score(tmp_path):
    path = evictor(tmp_path, "    def rank(self, leaf):\n        return (leaf.last_used,)\n")
    rows = {row["policy"]: row for row in contest(path, 1).rows}
    assert {**rows[YOURS], "policy": ""} == {**rows["LRU"], "policy": ""}


def test_each_file_has_another_load_kept_back(tmp_path):
    """Choosing a seed of a day must not choose this load, and an edit must draw another one."""
    first = contest(evictor(tmp_path, "    pass\n"), 1)
    same_file = contest(evictor(tmp_path, "    pass\n"), 2)
    edited = contest(evictor(tmp_path, "    pass  # edited\n"), 1)
    assert first.kept_back == same_file.kept_back != edited.kept_back
    assert seed_of(b"a") != seed_of(b"b")


WRONG = {
    "raises": ("    def rank(self, leaf):\n        return (1 // 0,)\n", r"line 6: rank raised ZeroDivisionError"),
    "no tuple": ("    def rank(self, leaf):\n        return leaf.last_used\n", "rank returned .*; return a tuple"),
    "no numbers": ("    def rank(self, leaf):\n        return ('a',)\n", "rank returned .*; return a tuple of numbers"),
    "not comparable": ("    def rank(self, leaf):\n        return (float('nan'),)\n", "return a tuple of numbers"),
    "nothing ready": ("    def num_ready(self, leaf):\n        return 0\n", "num_ready returned 0; return a whole"),
    "no leaves": ("    def fallen(self):\n        return [1]\n", "fallen returned .*; return the leaves"),
    "no list": ("    def fallen(self):\n        return 1\n", "fallen raised TypeError"),
    "a hook": ("    def ended(self, prefix):\n        self.what\n", "line 6: ended raised AttributeError"),
    "arguments": ("    def __init__(self, one):\n        pass\n", "__init__ raised TypeError"),
    "super": ("    def began(self, prefix):\n        raise KeyError\n", "began raised KeyError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence_and_breaks_nothing(tmp_path, name):
    body, said = WRONG[name]
    guard, replay = guarded_run(evictor(tmp_path, body))
    with pytest.raises(UserError, match=said):
        raise UserError(guard.mistake)
    assert "\n" not in guard.mistake
    assert is_whole(replay.tree) and not replay.manager.fault, "LRU must take over"


def test_a_rank_that_falls_without_a_report_is_named(tmp_path):
    """The queue would evict in another order than the evictor believes."""
    body = (
        "    turns = 0\n\n    def ended(self, prefix):\n        self.turns += 1\n\n"
        "    def rank(self, leaf):\n        return (-self.turns,)\n"
    )
    path = evictor(tmp_path, body)
    guard = Guarded(load_evictor(path), path, 45, lambda: 0.0)
    tree = guard.tree = RadixTree(1, policy=guard)
    tree.insert([1, 2], [1, 2])
    guard.policy.turns = 3
    guard.check_queue(reported=set())
    assert "fell from (0,) to (-3,)" in guard.mistake and "fallen did not report it" in guard.mistake


def test_a_rank_that_differs_at_each_call_is_named(tmp_path):
    """Without that, the queue would look for the first leaf for ever."""
    body = "    calls = 0\n\n    def rank(self, leaf):\n        self.calls -= 1\n        return (self.calls,)\n"
    guard, _ = guarded_run(evictor(tmp_path, body))
    assert "other ranks at each call" in guard.mistake


def test_a_tree_that_an_evictor_has_changed_is_noticed(tmp_path):
    _, replay = guarded_run(evictor(tmp_path, "    pass\n"))
    assert is_whole(replay.tree)
    next(iter(replay.tree.root.children.values())).blocks.append(7)
    assert not is_whole(replay.tree), "a node has a block that the tree does not count"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "has no class named Evictor"),
        ("class Evictor:\n    pass\n", "is no EvictionPolicy"),
        ("class Evictor(:\n", "line 1: .*; Python cannot read the file"),
        ("x = 1\ny = 1 / 0\n", "line 2: ZeroDivisionError"),
        ("exit()\n", "line 1: SystemExit"),
    ],
)
def test_a_file_that_is_no_evictor_is_one_sentence(tmp_path, capsys, source, said):
    path = evictor(tmp_path, source, "")
    assert cli.main(["play", "evictor", str(path)]) == 2
    out = capsys.readouterr().err.strip()
    with pytest.raises(UserError, match=said):
        raise UserError(out)
    assert "\n" not in out and "Traceback" not in out


def test_json_has_the_rows_and_both_seeds(tmp_path, capsys):
    assert cli.main(["play", "evictor", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 5 and found["kept_back"] == seed_of(b"")
    assert found["rows"][0]["policy"] == "LRU"


def test_the_example_is_written_once(tmp_path, capsys):
    path = tmp_path / "mine.py"
    assert cli.main(["play", "evictor", "--example", str(path)]) == 0
    assert cli.main(["play", "evictor", "--example", str(path)]) == 2
    assert "exists and is unchanged" in capsys.readouterr().err
