"""Lesson 20. Sessions from Python and from the command line: LLM, options, `chat`, and what replicas get."""

import argparse
import asyncio
import pickle
from functools import partial

import pytest

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.layout import eviction_policy
from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import UserError
from mini_engine.cli import chat
from mini_engine.cli.arguments import ENGINE_OPTIONS, add_engine_options
from mini_engine.cli.parser import OneLineParser
from mini_engine.engine.engine import Engine
from mini_engine.engine.jobs import Job
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.cache_coordinator import cache_of, caching_manager
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.support import must_raise, random_model

pytestmark = pytest.mark.reference  # no task is about this

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = list(range(100, 120))
TURN = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET_DIR)


@pytest.fixture
def llm(tokenizer):
    """A small random model whose engine knows sessions."""
    model = random_model(vocab_size=len(tokenizer.token_bytes), max_position_embeddings=512)
    manager = partial(caching_manager, policy=Sessions(Limits.of_pool(200)))
    with LLM.for_engine(Engine.for_model(model, num_blocks=200, block_size=4, manager=manager), tokenizer) as llm:
        yield llm


def open_sessions(llm):
    """Return the names of the sessions that the engine knows."""
    return {name for _, name in cache_of(llm.engine.scheduler.manager).prefixes.tree.policy.sessions}


# ---------------------------------------------------------------- LLM


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate(PROMPT, GREEDY, progress=False, session_id="agent"),
        lambda llm: llm.generate([PROMPT, [1, 2]], GREEDY, progress=False, session_id=["agent", None]),
        lambda llm: llm.chat(TURN, GREEDY, progress=False, session_id="agent"),
        lambda llm: list(llm.stream(PROMPT, GREEDY, session_id="agent")),
        lambda llm: list(llm.stream(TURN, GREEDY, session_id="agent")),
    ],
    ids=["generate", "several", "chat", "stream", "stream a chat"],
)
def test_every_call_names_its_session(llm, ask):
    ask(llm)
    assert open_sessions(llm) == {"agent"}
    assert [llm.close_session("agent") for _ in range(2)] == [True, False], "an unknown session is no error"


def test_a_stream_that_is_left_early_ends_its_turn_and_not_its_session(llm):
    with llm.stream(PROMPT, GREEDY, session_id="agent") as deltas:
        next(deltas)
    assert open_sessions(llm) == {"agent"} and llm.close_session("agent")


@pytest.mark.parametrize("wrong", ["", 5, ["a", "b", "c"], ["a", 5], ["a", ""], {"a": 1}], ids=repr)
def test_what_is_no_session_is_refused_before_anything_runs(llm, wrong):
    with must_raise(UserError, "a name that is none must not be taken for one") as caught:
        llm.generate([PROMPT, PROMPT], GREEDY, progress=False, session_id=wrong)
    assert caught.value.param == "session_id" and open_sessions(llm) == set()
    if not (isinstance(wrong, list) and len(wrong) == 3):
        with must_raise(UserError, "nor to close one"):
            llm.close_session(wrong)


def test_an_engine_without_sessions_takes_the_name_and_ignores_it(tokenizer):
    model = random_model(vocab_size=len(tokenizer.token_bytes))
    with LLM.for_engine(Engine.for_model(model, num_blocks=20, block_size=4), tokenizer) as llm:
        assert llm.generate(PROMPT, GREEDY, progress=False, session_id="agent")[0].error is None
        assert llm.close_session("agent") is False


@pytest.mark.ci
def test_with_prefill_workers_the_sessions_are_the_receiver_s():
    """The worker computes the prompt; the text that the next turn needs is in the tree of the engine that decodes."""
    options = dict(num_blocks=60, prefill_workers=1, handover_min_tokens=0, enable_sessions=True)
    with LLM(dtype="float32", device="cpu", **options) as llm:
        [first] = llm.generate(PROMPT, GREEDY, progress=False, session_id="agent")
        [second] = llm.generate([*PROMPT, *first.token_ids], GREEDY, progress=False, session_id="agent")
        assert second.num_cached_tokens == 16 and llm.close_session("agent")


# ---------------------------------------------------------------- commands


def options(*argv):
    """Return the engine's config as a command makes it of these options."""
    parser = OneLineParser(prog="serve")
    add_engine_options(parser)
    args = parser.parse_args(argv)
    return EngineConfig(**{name: getattr(args, name) for name in ENGINE_OPTIONS})


def test_options_choose_the_policy():
    usual = eviction_policy(options(), 100)
    assert type(usual).__name__ == "LRU", "without options, nothing of this lesson is needed"
    chosen = options("--sessions", "--eviction-policy", "tlru", "--tlru-threshold", "64", "--longest-prefix-first")
    policy = eviction_policy(chosen, 100)
    assert isinstance(policy, Sessions) and type(policy.policy).__name__ == "TLRU"
    assert policy.policy.budget == 4 and chosen.longest_prefix_first, "64 tokens in blocks of 16"
    with must_raise(UserError, "tlru without a threshold is LRU, or worse"):
        options("--eviction-policy", "tlru")


def test_the_terminal_s_conversation_is_a_session_until_it_is_cleared(llm, capsys):
    args = argparse.Namespace(
        max_tokens=2, temperature=0.0, top_k=None, top_p=None, seed=None, stop=[], chat_template_kwargs={}, system=None,
        stats=False,
    )  # fmt: skip
    session = chat.Session(llm, args)
    session.take("Hi")
    assert open_sessions(llm) == {chat.SESSION}
    session.take("/reset")
    assert open_sessions(llm) == set(), "a cleared conversation has no next turn"
    capsys.readouterr()


# ---------------------------------------------------------------- replicas


def test_a_session_travels_to_a_replica():
    job = Job(PROMPT, GREEDY, "theirs", 3, "agent")
    assert pickle.loads(pickle.dumps(job)) == job and job.session == "agent"


def test_a_replica_knows_a_session_and_closes_it():
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from mini_engine.cli import serve
    from mini_engine.distributed.replicas.cluster import Cluster
    from mini_engine.distributed.replicas.replica import Replica

    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    args = parser.parse_args(["--num-blocks", "60", "--sessions"])
    replica = Replica(args, max_waiting=8, name="0")
    cluster = Cluster(replica.worker.tokenizer, replica.limits(), 8, replica.answer, replica.close_session)

    async def ask():
        answers = await cluster.submit([Job(PROMPT, GREEDY, "theirs", session="agent")])
        async for _ in answers:
            pass
        asked = [("agent", None), ("agent", "theirs"), ("agent", "theirs")]
        return [await cluster.close_session(*each) for each in asked]

    assert asyncio.run(ask()) == [False, True, False]
    assert b"mini_engine_sessions 0.0" in replica.scrape()[1], "each replica counts its own"
    replica.worker.close()
    assert asyncio.run(cluster.close_session("agent", "theirs")) is False, "what a lost replica knew is forgotten"
