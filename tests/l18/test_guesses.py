"""Lesson 18. Guesses over ranks: rank 0 guesses and verifies, and all ranks feed what it guessed."""

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.pocket import POCKET_DIR
from tests.l18.ranks import Wire, engine_over, follow, started
from tests.l18.test_parallel import OPTIONS, PROMPTS, nightly
from tests.l18.test_steps import NotingHybrid, check_states, hybrid

POCKET_HYBRID_DIR = shipped_checkpoint("pocket-hybrid")

pytestmark = pytest.mark.reference


def answers(engine):
    """Answer all prompts together; return their tokens, and how many guesses were made and how many steps saved."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [engine.add_request(str(i), ids, params) for i, ids in enumerate(PROMPTS)]
    drafted = accepted = 0
    while engine.has_unfinished:
        stats = engine.step().stats
        drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.output_ids for request in requests], drafted, accepted


def test_another_rank_keeps_the_states_that_stand():
    wire, other = Wire(hybrid()), NotingHybrid()
    engine = engine_over(wire, max_track_slots=2, checkpoint_interval=8, speculate=3, **OPTIONS)
    found, drafted, accepted = answers(engine)
    assert found == answers(build_engine(hybrid(), backend="reference", **OPTIONS))[0]
    assert drafted > accepted > 0, "some guesses were right, some wrong"
    follow(wire.sent, other)
    check_states(engine, other.pools[0])


@nightly
@pytest.mark.parametrize("path", [POCKET_DIR, POCKET_HYBRID_DIR], ids=["Qwen3", "hybrid"])
def test_guesses_change_no_token_over_two_processes(path):
    expected = answers(build_engine(load(path, "float32", "cpu"), **OPTIONS))[0]
    tight = {"num_blocks": 16, "block_size": 8, "max_track_slots": 2, "checkpoint_interval": 8}
    with started(path) as ranks:
        for options in (OPTIONS | {"speculate": 4}, tight | {"speculate": 2}):
            engine = engine_over(ranks, **options)
            for _ in range(2):
                found, drafted, accepted = answers(engine)
                assert found == expected and drafted > accepted > 0
