"""Lesson 7. Rough days: clients that hang up, dawdle and talk nonsense, and nobody else notices."""

import asyncio
import gc
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.shared.service import LONG, PATIENCE, Service, exchange, greedy, raw_request, read_answer

pytestmark = pytest.mark.reference  # no task is about this

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [42], list(range(700, 740)), [9] * 17, [1000, 3]]
CLIENTS, REQUESTS = 50, 4
MOST_TOKENS = 16
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions\r\n\r\n",
    b"\x00" * 99,
]


def asked(chance: random.Random) -> dict:
    """A streamed completion."""
    return {
        "prompt": chance.choice(PROMPTS),
        "max_tokens": chance.randint(2, MOST_TOKENS),
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }


async def hang_up(service: Service, chance: random.Random) -> str:
    """Ask, read a little, and go."""
    reader, writer = await asyncio.open_connection(*service.address)
    try:
        writer.write(raw_request(asked(chance)))
        await asyncio.sleep(chance.random() * 0.05)
        await asyncio.wait_for(reader.read(chance.randint(1, 2000)), PATIENCE)
    finally:
        writer.transport.abort()
    return "hung up"


async def talk_nonsense(service: Service, chance: random.Random) -> str:
    """Send what is no HTTP, or no JSON, and see the server survive it."""
    reader, writer = await asyncio.open_connection(*service.address)
    try:
        body = raw_request({"prompt": 1}).replace(b'"prompt"', b"prompt")
        writer.write(chance.choice([*GARBAGE, body]))
        writer.write_eof()
        status = await asyncio.wait_for(reader.read(100), PATIENCE)
        assert b" 50" not in status[:20], f"garbage was answered with {status!r}"
    finally:
        writer.transport.abort()
    return "nonsense"


async def read_to_the_end(service: Service, chance: random.Random) -> str:
    """Ask and read: every token must be Hugging Face's, whatever the others do."""
    body = asked(chance)
    status, content = await exchange(service, body)
    assert status == 200, f"{status}: {content}"
    answer = read_answer(content)
    expected = greedy(tuple(body["prompt"]), MOST_TOKENS)[: body["max_tokens"]]
    assert answer["token_ids"] == expected, f"{body} was answered with {answer}"
    return "served"


async def one_client(service: Service, seed: int) -> Counter:
    """Some requests, one after the other, each of a kind that chance decides."""
    chance, done = random.Random(seed), Counter()
    for _ in range(REQUESTS):
        kind = chance.choices([read_to_the_end, hang_up, talk_nonsense], [12, 7, 1])[0]
        done[await kind(service, chance)] += 1
    return done


async def dawdle(service: Service) -> None:
    """Ask for the longest answer there is, and read a byte a second."""
    reader, writer = await asyncio.open_connection(*service.address, limit=1)
    try:
        writer.write(raw_request({"prompt": [5], "max_tokens": 500, "stream": True, "ignore_eos": True, "n": 4}))
        while True:
            await reader.readexactly(1)
            await asyncio.sleep(1)
    finally:
        writer.transport.abort()


async def one_round(service: Service, number: int, num_clients: int = CLIENTS) -> Counter:
    """All clients at once, beside one that dawdles and is still reading when the others are done."""
    slow = asyncio.create_task(dawdle(service))
    clients = (one_client(service, 1000 * number + seed) for seed in range(num_clients))
    done = sum(await asyncio.gather(*clients), Counter())
    assert not slow.done(), "the slow client was to read on"
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    return done


def resident_bytes() -> int:
    """Memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


def rounds(service: Service, count: int) -> list[int]:
    """Run them; after each, nobody is left and every block is free. The memory held after each."""
    held = []
    for number in range(count):
        done = asyncio.run(one_round(service, number))
        assert done.total() == CLIENTS * REQUESTS and done["served"] > 80 and done["hung up"] > 40, done
        service.wait_until_idle()
        service.wait_until("no request is in flight", lambda: service.app.drain.num_in_flight == 0)
        gc.collect()
        held.append(resident_bytes() if sys.platform == "linux" else 0)
    return held


def test_clients_that_hang_up_leave_nothing_behind(service: Service):
    done = asyncio.run(one_round(service, 0, num_clients=10))
    assert done["served"] and done["hung up"], f"this run tests too little: {done}"
    service.wait_until_idle()
    service.wait_until("no request is in flight", lambda: service.app.drain.num_in_flight == 0)


@pytest.mark.nightly
@LONG
def test_ten_such_rounds_leave_no_memory_behind(service: Service):
    held = rounds(service, 10)
    grown = (held[-1] - held[2]) / 2**20
    assert grown < 4, f"{grown:.1f} MiB more after ten rounds than after three: {[size // 2**20 for size in held]}"
