"""Lesson 13. Shared by several of its tests: one replica in this process, and what an engine alone answers."""

import pytest


@pytest.fixture(scope="module")
def replica():
    """A replica with the pocket model and 59 blocks."""
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from mini_engine.distributed.replicas.replica import Replica
    from tests.l13.replicas import options

    replica = Replica(options(), max_waiting=8, name="0")
    yield replica
    replica.worker.close()


@pytest.fixture(scope="module")
def expected():
    """The tokens of an engine without replicas."""
    from mini_engine.assembly.llm import LLM
    from tests.l13.replicas import GREEDY, PROMPT

    with LLM(num_blocks=60) as llm:
        return llm.generate(PROMPT, GREEDY, progress=False)[0].token_ids
