"""Lesson 13. Two replicas in Ray Serve, for real: their tokens, their cache, and what is lost when they end."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

import torch

from mini_engine.pocket import POCKET_DIR
from tests.shared.fleet_server import PATIENCE, FleetServer
from tests.shared.replica_answers import MOST_TOKENS, PROMPTS, answer, asked
from tests.shared.service import raw_request, read_answer, read_events
from tests.support import hf_greedy

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'distributed'"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the replicas' processes in /proc"),
]
OPTIONS = ("--num-blocks", "400", "--max-num-seqs", "8", "--grace-seconds", "60")


@pytest.fixture(scope="module")
def server():
    with FleetServer(*OPTIONS) as server:
        yield server


@pytest.fixture
def both(server):
    """The server with both replicas alive and idle, before and after a test."""
    server.wait_until_all_alive()
    yield server
    server.wait_for("no replica has a request or holds a block", lambda: server.is_idle)


async def keep_asking(server, seed: int, stop: asyncio.Event) -> list[tuple[int, dict]]:
    """Send one request after another until `stop`: each one's prompt, by its number, and its answer."""
    chance, done = random.Random(seed), []
    while not stop.is_set():
        number = chance.randrange(len(PROMPTS))
        done.append((number, await answer(server, asked(PROMPTS[number]))))
    return done


async def under_load(server, work) -> list[tuple[int, dict]]:
    """Do `work` in a thread while twelve clients ask; return all that they were answered."""
    stop = asyncio.Event()
    clients = [asyncio.create_task(keep_asking(server, seed, stop)) for seed in range(12)]
    try:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(work)
    finally:
        stop.set()
        found = await asyncio.gather(*clients)
    return [one for client in found for one in client]


# ---------------------------------------------------------------- answers


def test_tokens_are_those_of_one_engine_and_of_hugging_face(both, expected):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(POCKET_DIR, dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        body = both.post("/v1/completions", asked(prompt) | {"stream": False}).body
        theirs = hf_greedy(model, prompt, MOST_TOKENS)  # ends where the model would
        assert body["choices"][0]["token_ids"] == tokens and tokens[: len(theirs)] == theirs
        assert read_answer(both.post("/v1/completions", asked(prompt)).body)["token_ids"] == tokens


def test_both_replicas_answer_and_metrics_name_them(both):
    async def main():
        await asyncio.gather(*(answer(both, asked([number] * 5, 8)) for number in range(30)))

    asyncio.run(main())
    steps = both.by_replica("steps_total")
    assert set(steps) == {"0", "1"} and all(steps.values()), f"one replica did all the work: {steps}"
    assert both.get("/health").body == {"status": "ok", "replicas": 2, "alive": 2}


def test_a_stream_comes_piece_by_piece(both):
    with both.connect(asked([5] * 10, 200)) as client:
        first = client.recv(65536)
        assert b"HTTP/1.1 200" in first and b"[DONE]" not in first


def test_200_clients_a_third_of_which_hang_up(both, expected):
    aborted = sum(both.by_replica("aborts_total").values())

    async def hang_up(number: int) -> str:
        _, writer = await asyncio.open_connection(*both.address)
        writer.write(raw_request(asked(PROMPTS[number % len(PROMPTS)], 300)))
        await asyncio.sleep(random.Random(number).random())
        writer.transport.abort()
        return "hung up"

    async def read_on(number: int) -> str:
        index = number % len(PROMPTS)
        found = await answer(both, asked(PROMPTS[index]))
        assert found["token_ids"] == expected[index], found
        return "served"

    async def main() -> Counter:
        return Counter(await asyncio.gather(*((read_on, hang_up, read_on)[n % 3](n) for n in range(200))))

    assert asyncio.run(main()) == {"served": 133, "hung up": 67}
    both.wait_for("no replica has a request or holds a block", lambda: both.is_idle)
    assert sum(both.by_replica("aborts_total").values()) > aborted, "a replica never heard of a client that hung up"


# ---------------------------------------------------------------- the cache


def found_in_cache(server) -> float:
    """Hold six conversations, a turn of each in turn; return which share of their prompts was in a replica's cache."""
    chance = random.Random(3)
    conversations = [[chance.randrange(2000) for _ in range(64)] for _ in range(6)]
    total = found = 0
    for _ in range(6):
        for conversation in conversations:
            body = server.post("/v1/completions", asked(conversation, 4) | {"stream": False}).body
            total += body["usage"]["prompt_tokens"]
            found += body["usage"]["prompt_tokens_details"]["cached_tokens"]
            conversation += [chance.randrange(2000) for _ in range(48)]
    return found / total


def test_the_score_finds_more_than_rays_own_router(both):
    score = found_in_cache(both)
    with FleetServer(*OPTIONS, "--router", "default") as other:
        default = found_in_cache(other)
    assert score > default, f"found in a cache: {score:.0%} with the score, {default:.0%} with Ray's router"


# ---------------------------------------------------------------- replicas that end


def test_a_killed_replica_costs_only_answers_that_had_begun(both, expected):
    slow = [asked([number % 2000, *range(1, 400)], 200) for number in range(40)]

    async def main() -> list[dict]:
        reading = [asyncio.create_task(answer(both, body)) for body in slow]
        await asyncio.to_thread(
            both.wait_for, "requests wait", lambda: min(both.by_replica("requests_waiting").values())
        )
        os.kill(both.replica_pids()[0], signal.SIGKILL)
        return await asyncio.gather(*reading)

    found = asyncio.run(main())
    whole = [one for one in found if one["finish_reason"] == "length"]
    broken = [one for one in found if one["finish_reason"] is None]
    assert len(whole) + len(broken) == 40 and len(broken) <= 8, "only eight at a time had begun there"
    assert all(len(one["token_ids"]) == 200 and not one["errors"] for one in whole)
    assert all(one["errors"] and one["token_ids"] for one in broken), "nothing was said, so it could have been retried"


def test_without_any_replica_clients_wait_for_a_new_one_and_open_answers_end(both, expected):
    pids = both.replica_pids()  # finding them takes time, in which an answer may end

    async def main() -> tuple[str, dict]:
        reader, writer = await asyncio.open_connection(*both.address)
        writer.write(raw_request(asked([5] * 10, 5000)))
        await asyncio.wait_for(reader.readuntil(b"token_ids"), PATIENCE)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        rest = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        return rest.decode(), await answer(both, asked(PROMPTS[0]))

    rest, later = asyncio.run(main())
    assert '"error"' in rest and "replica" in rest, f"the stream ended with {rest[-300:]!r}"
    assert '"error"' in read_events(rest)[-1] and "[DONE]" not in rest
    assert later["token_ids"] == expected[0]


def test_a_rolling_restart_loses_nothing(both, expected):
    before = both.replica_pids()

    def restart() -> None:
        both.process.send_signal(signal.SIGHUP)
        both.read_until("replaced 2 replicas")

    for index, found in asyncio.run(under_load(both, restart)):
        assert found["token_ids"] == expected[index] and not found["errors"], found
    both.wait_for("the old replicas have ended", lambda: not set(before) & set(both.replica_pids()))
    both.wait_for("two new ones run", lambda: len(both.replica_pids()) == 2)


def test_sigterm_finishes_what_is_open_and_says_nothing(server):
    """The last test: it ends the server."""
    server.wait_until_all_alive()

    async def main() -> list[dict]:
        reading = [asyncio.create_task(answer(server, asked([number] * 9, 300))) for number in range(6)]
        await asyncio.to_thread(
            server.wait_for, "all run", lambda: sum(server.by_replica("requests_running").values()) == 6
        )
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*reading)

    found = asyncio.run(main())
    assert [len(one["token_ids"]) for one in found] == [300] * 6 and not any(one["errors"] for one in found)
    assert server.process.wait(PATIENCE) == 0
    server.printed += list(server.process.stdout)
    beginnings = {line.split()[0] for line in server.printed}
    assert beginnings <= {"serving", "replaced"}, f"Ray said something: {server.printed}"
