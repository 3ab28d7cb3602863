"""Lesson 13. What replicas are asked by the tests, and the answers that one engine gives."""

import asyncio

import pytest

from mini_engine.assembly.llm import LLM
from mini_engine.engine.sampling_params import SamplingParams
from tests.shared.fleet_server import PATIENCE
from tests.shared.service import exchange, read_answer

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [42], list(range(700, 740)), [9] * 17, [1000, 3]]
MOST_TOKENS = 24


@pytest.fixture(scope="module")
def expected():
    """The tokens of one engine in this process, by prompt."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, ignore_eos=True)
    with LLM() as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, params, progress=False)]


def asked(prompt, max_tokens: int = MOST_TOKENS, **more) -> dict:
    """A streamed greedy completion."""
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return fixed | {"prompt": prompt, "max_tokens": max_tokens} | more


async def answer(server, body: dict) -> dict:
    """Send a request and read all of its stream."""
    status, content = await asyncio.wait_for(exchange(server, body), PATIENCE)
    assert status == 200, f"{status}: {content}"
    return read_answer(content)
