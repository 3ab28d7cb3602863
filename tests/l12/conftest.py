"""Lesson 12. Shared by its tests: the pocket model, engines over it, and what they answer without a cache."""

from contextlib import ExitStack

import pytest

from tests.shared.tier_cells import PROMPTS
from tests.shared.tier_items import record


@pytest.fixture(scope="session")
def engine_of():
    """Return a function that makes an engine over the pocket model, or over another one."""
    from mini_engine.assembly.build import build_engine
    from mini_engine.assembly.loading import load
    from mini_engine.pocket import POCKET_DIR

    pocket = load(POCKET_DIR, "float32", "cpu")

    def make(over=None, **options):
        return build_engine(over or pocket, **{"backend": "reference", "num_blocks": 60} | options)

    return make


@pytest.fixture(scope="session")
def answers():
    """Return a function that returns the tokens of an engine's answers to three prompts, or to others."""
    from mini_engine.engine.offline import generate_all
    from mini_engine.engine.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def run(engine, prompts=PROMPTS):
        done = generate_all(engine, prompts, greedy, progress=False)
        assert not [one.error for one in done if one.error]
        return [one.token_ids for one in done]

    return run


@pytest.fixture(scope="session")
def cold(engine_of, answers):
    """The answers of an engine that caches nothing."""
    return answers(engine_of(enable_prefix_caching=False))


@pytest.fixture
def opened():
    """Return a function that returns what it is given, which is closed when the test ends."""
    with ExitStack() as stack:

        def note(one):
            stack.callback(one.close)
            return one

        yield note


@pytest.fixture
def tier(tmp_path):
    """A disk tier with room for many records, which has record 1."""
    from mini_engine.tiers.disk import DiskTier

    tier = DiskTier(tmp_path, 10**6)
    tier.put(record(1))
    return tier
