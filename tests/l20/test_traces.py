"""Lesson 20. Loads: the generator's statistics are the published ones, and a file's sessions are those of its texts."""

import json
from collections import Counter
from statistics import median

import pytest

from lessons.l20_agents.agents import Load
from lessons.l20_agents.traces import TRACE_BLOCK, read_mooncake
from mini_engine.base.errors import UserError
from tests.l20.loads import turns


@pytest.fixture(scope="module")
def published():
    """The calls of a hundred agents with the defaults, without the crowd."""
    return Load(agents=100, sessions=1, crowd=0).generate(0)


def test_medians_are_the_published_ones(published):
    """AgentX: 43 turns a session, 142,000 tokens in and 444 out a turn."""
    lengths = Counter(call.session for call in published if "+" not in call.session)
    assert median(lengths.values()) == pytest.approx(43, rel=0.1)
    assert median(len(call.prompt) for call in published) * TRACE_BLOCK == pytest.approx(142_000, rel=0.1)
    assert median(call.output_tokens for call in published) == pytest.approx(444, rel=0.1)


def test_tools_take_the_published_times(published):
    """86 % of next turns come within 1 s, 95 % within 10 s, and the tail lasts minutes."""
    waits = [call.wait for call in published if call.after is not None]
    assert sum(wait <= 1 for wait in waits) / len(waits) == pytest.approx(0.86, abs=0.02)
    assert sum(wait <= 10 for wait in waits) / len(waits) == pytest.approx(0.95, abs=0.02)
    assert 300 < max(waits) <= 540


def test_where_nothing_is_evicted_96_percent_of_an_agents_tokens_are_found(published):
    """The published figure; it must follow from what a turn adds, because the generator does not set it."""
    seen, found = set(), 0
    for call in published:
        found += sum(block in seen for block in call.prompt)
        seen.update(call.text)
    assert found / sum(len(call.prompt) for call in published) == pytest.approx(0.96, abs=0.01)


def test_a_turn_continues_its_session_or_leaves_it_for_good():
    """A text grows, loses its last answer, or is compacted to its system prompt and a summary."""
    systems = {}
    last = {}
    for call in turns(1):
        if call.group != "agents":
            assert call.session is None
            continue
        systems.setdefault(call.prompt[0], None)
        if before := last.get(call.session):
            kept = call.prompt[: len(before.prompt)] == before.prompt
            assert kept or call.prompt[0] in systems, f"call {call.id} neither continues {call.session} nor restarts it"
        last[call.session] = call


def test_a_fork_is_a_session_of_its_own_with_the_same_history():
    calls = turns(4)
    firsts = {}
    for call in calls:
        firsts.setdefault(call.session, call)
    forks = [call for name, call in firsts.items() if name and "+" in name]
    assert forks, "this seed's load must have a fork"
    for fork in forks:
        before = calls[fork.after].text
        assert fork.prompt[: len(before)] == before


def written(tmp_path, *requests):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in requests), encoding="utf-8")
    return path


def test_mooncakes_sessions_are_those_of_the_texts(tmp_path):
    """A request continues the session whose whole blocks it begins with: the last block of a prompt is not full."""
    path = written(
        tmp_path,
        {"timestamp": 0, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 2000, "output_length": 6, "hash_ids": [0, 7, 8]},
        {"timestamp": 1000, "output_length": 7, "hash_ids": [0, 1, 2, 4, 5]},
        {"timestamp": 3000, "output_length": 8, "hash_ids": [0, 1, 2, 9]},
    )
    calls = read_mooncake(path)
    assert [call.seconds for call in calls] == [0, 1, 2, 3], "requests must be in the order of their times"
    assert calls[1].session == calls[0].session, "the second in time continues the first"
    assert calls[2].session != calls[0].session, "only a system prompt in common: that is no session"
    assert calls[3].session not in {call.session for call in calls[:3]}, "a second continuation is a fork"


@pytest.mark.parametrize(
    "line", ["no json", "{}", '{"hash_ids": []}', '{"hash_ids": [-1]}', '{"hash_ids": [1.5]}', "3"]
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=r"line 2 of .* is not a request; give"):
        read_mooncake(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_mooncake(tmp_path / "none.jsonl")
