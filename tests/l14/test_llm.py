"""Lesson 14. Speculation from the front door: LLM(speculate=…), stop strings, metrics, the command line."""

import functools

from scripts.l14_smoke import asked_twice

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.cli.parser import OneLineParser
from mini_engine.engine.request import FinishReason
from mini_engine.engine.scheduler import Decoding
from mini_engine.engine.stats import StepStats, Summary
from mini_engine.engine.worker import EngineWorker, Observer
from mini_engine.speculation.options import Speculation

QUESTION = asked_twice("What is a KV cache?")


@functools.cache
def llm(speculate):
    return LLM(speculate=speculate, num_blocks=128)


def params(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 32} | changes)


def test_nothing_is_guessed_unless_asked_for():
    assert type(llm(None).engine.decoding) is Decoding


@pytest.mark.parametrize("stop", ["values", "keys and", " of all", "tokens.", "not there"])
def test_a_stop_string_inside_a_step_ends_the_answer_where_it_ends_without_guesses(stop):
    [want] = llm(None).generate(QUESTION, params(stop=stop, logprobs=1), progress=False)
    [found] = llm(8).generate(QUESTION, params(stop=stop, logprobs=1), progress=False)
    assert (found.text, found.token_ids, found.finish_reason) == (want.text, want.token_ids, want.finish_reason)
    assert len(found.logprobs or []) == len(found.token_ids), "a token behind the stop string was kept"


def test_a_stop_string_counts_even_if_the_same_step_reached_max_tokens():
    [full] = llm(None).generate(QUESTION, params(stop="values"), progress=False)
    longest = len(full.token_ids) + 2
    [found] = llm(8).generate(QUESTION, params(stop="values", max_tokens=longest), progress=False)
    assert (found.token_ids, found.finish_reason) == (full.token_ids, FinishReason.STOP)


def test_streamed_deltas_add_up_and_stop_alike():
    for stop in ("", "computes"):
        asked = params(stop=stop or ())
        [want] = llm(None).generate(QUESTION, asked, progress=False)
        stream = llm(8).stream(QUESTION, asked)
        deltas = list(stream)
        assert "".join(delta.text for delta in deltas) == want.text
        assert [token for delta in deltas for token in delta.token_ids] == want.token_ids == stream.request.output_ids
        assert deltas[-1].finish_reason == want.finish_reason and len(deltas) < len(want.token_ids)


def test_the_thread_of_a_server_gives_the_same_text_and_reports_guesses():
    class Counting(Observer):
        def __init__(self):
            self.drafted = self.accepted = 0
            self.ended_with = []

        def stepped(self, stats):
            self.drafted, self.accepted = self.drafted + stats.num_drafted, self.accepted + stats.num_accepted

        def ended(self, request):
            self.ended_with.append(list(request.output_ids))

    [want] = llm(None).generate(QUESTION, params(stop="reads"), progress=False)
    speaking, seen = LLM(speculate=8, num_blocks=128), Counting()
    with EngineWorker(speaking.engine, speaking.tokenizer, observer=seen) as worker:
        deltas = list(worker.stream_sync(speaking.encode(QUESTION), params(stop="reads")))
    assert "".join(delta.text for delta in deltas) == want.text
    assert seen.ended_with == [want.token_ids], "usage counts the tokens that the client got"
    assert 0 < seen.accepted <= seen.drafted


def test_the_tree_is_asked_if_that_is_wanted():
    again = LLM(speculate=Speculation(use_tree=True), num_blocks=128)
    for _ in range(2):
        [found] = again.generate("Once upon a time", params(), progress=False)
    stats = []
    request = again.engine.add_request("x", again.encode("Once upon a time"), params())
    while again.engine.has_unfinished:
        stats.append(again.engine.step().stats)
    assert request.output_ids == found.token_ids
    assert sum(one.num_accepted for one in stats) >= len(found.token_ids) // 2, "its answer is in the tree"


def test_summaries_add_up_guesses():
    summary = Summary()
    assert "guesses" not in str(summary)
    for _ in range(2):
        summary.add_step(StepStats(num_drafted=5, num_accepted=3))
    assert (summary.num_drafted, summary.num_accepted) == (10, 6)
    assert "6 of 10 guesses accepted" in str(summary)


def test_metrics_count_guesses():
    pytest.importorskip("prometheus_client")
    from mini_engine.server.metrics import Metrics

    metrics = Metrics()
    metrics.stepped(StepStats(num_drafted=5, num_accepted=3))
    lines = metrics.text().decode().splitlines()
    assert "mini_engine_draft_tokens_total 5.0" in lines
    assert "mini_engine_accepted_draft_tokens_total 3.0" in lines


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize(("given", "k"), [([], None), (["--speculate"], 8), (["--speculate", "3"], 3)])
def test_every_command_takes_the_option(command, given, k):
    from mini_engine.cli import chat, generate, serve

    parser = OneLineParser()
    {"generate": generate, "chat": chat, "serve": serve}[command].add_arguments(parser)
    words = ["a prompt", *given] if command == "generate" else given
    assert parser.parse_args(words).speculate == k
