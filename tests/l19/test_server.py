"""Lesson 19. Prefill workers behind the server: answers, metrics, restarts, the drain.

`test_faults.py` has workers that die and requests that are aborted.
"""

import asyncio
import os
import signal
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from prometheus_client import generate_latest

from mini_engine.assembly.llm import LLM
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.connector import TierStats
from mini_engine.server.metrics import TierMetrics
from tests.processes import is_alive, posix, spawned_by
from tests.shared.service import PATIENCE, exchange, read_answer
from tests.shared.serving import Process, serving

nightly = pytest.mark.nightly
pytestmark = pytest.mark.reference  # no task is about this

OPTIONS = ("--num-blocks", "400", "--block-size", "8", "--handover-min-tokens", "0")
NUM_TOKENS = 16
MANY = [[100 + index, *range(300, 300 + 40 * index)] for index in range(1, 9)]
EVENTS = {"transfers", "tokens", "bytes", "milliseconds", "cancelled", "fallbacks", "losses"}


def asked(prompt, **more):
    fixed = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return fixed | {"prompt": prompt} | more


def events(text: str) -> dict[str, int]:
    """The events of the tier "prefill" in the text of /metrics."""
    begin = 'mini_engine_tier_events_total{event="'
    lines = [line.removeprefix(begin) for line in text.splitlines() if line.startswith(begin) and '"prefill"' in line]
    return {line.partition('"')[0]: int(float(line.rpartition(" ")[2])) for line in lines}


def test_a_gauge_says_how_many_workers_are_away():
    stats = TierStats("prefill", 0, {"losses": 5}, {"workers_away": 2})
    text = generate_latest(TierMetrics(SimpleNamespace(coordinator=SimpleNamespace(stats=[stats])))).decode()
    assert "\nmini_engine_prefill_workers_away 2.0\n" in text


@pytest.fixture(scope="module")
def expected():
    """The answers of an engine without workers, one after another, by prompt."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(dtype="float32", device="cpu", backend="reference", num_blocks=400, enable_prefix_caching=False) as llm:
        answers = [llm.generate([prompt], params, progress=False)[0].token_ids for prompt in MANY]
    return {tuple(prompt): (200, tokens) for prompt, tokens in zip(MANY, answers, strict=True)}


@nightly
@posix
def test_sighup_replaces_all_workers_and_no_request_fails(expected):
    with serving("--prefill-workers", "2", *OPTIONS, "--grace-seconds", "30") as server:
        before = set(spawned_by(server.process.pid))
        assert len(before) == 2

        async def scene():
            server.process.send_signal(signal.SIGHUP)
            server.process.send_signal(signal.SIGHUP)  # does nothing: a restart is under way
            found, salts = [], iter(range(10**6))
            while not before.isdisjoint(spawned_by(server.process.pid)):
                asks = [exchange(server, asked(prompt, cache_salt=str(next(salts)))) for prompt in MANY[::2]]
                found += zip(MANY[::2], await asyncio.gather(*asks), strict=True)
            return found

        found = asyncio.run(asyncio.wait_for(scene(), 2 * PATIENCE))
        assert server.process.stdout.readline() == "replaced all prefill workers\n"
        assert len(found) >= 4
        wrong = [prompt for prompt, (status, text) in found if (status, tokens(text)) != expected[tuple(prompt)]]
        assert not wrong, "every request was answered, by an old worker, a new one, or the server itself"
        after = set(spawned_by(server.process.pid))
        assert len(after) == 2 and before.isdisjoint(after)
        counts = events(asyncio.run(metrics(server)))
        assert set(counts) == EVENTS and counts["losses"] == 0 and counts["transfers"] > 0
        check_drain(server, after, expected)


def tokens(text: str) -> list[int]:
    return read_answer(text)["token_ids"]


def check_drain(server: Process, workers: set[int], expected) -> None:
    """SIGTERM while prompts wait for a worker: they are answered, then all processes end."""
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)

    async def scene():
        asks = [asyncio.create_task(exchange(server, asked(prompt, cache_salt="drain"))) for prompt in MANY]
        while 'tier_bytes{tier="prefill"} 0.0' in await metrics(server):
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        while " 503 " not in (await get(server, "/v1/models")).partition("\r\n")[0]:  # until it drains
            await asyncio.sleep(0.02)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        return await asyncio.gather(*asks)

    found = asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert [(status, tokens(text)) for status, text in found] == [expected[tuple(prompt)] for prompt in MANY]
    code, errors = server.end()
    assert (code, errors) == (0, "")
    assert not any(map(is_alive, workers)), "no worker outlives its server"


async def metrics(server: Process) -> str:
    """The text of /metrics."""
    return await get(server, "/metrics")


async def get(server: Process, path: str) -> str:
    """The whole response."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    return text


@nightly
@posix
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'distributed'")
def test_each_replica_has_workers_of_its_own(expected):
    from tests.shared.fleet_server import FleetServer

    with FleetServer("--prefill-workers", "1", *OPTIONS) as server:
        server.wait_until_all_alive()

        async def ask_all():
            return await asyncio.gather(*(exchange(server, asked(prompt)) for prompt in MANY))

        found = asyncio.run(asyncio.wait_for(ask_all(), PATIENCE))
        assert [(status, tokens(text)) for status, text in found] == [expected[tuple(prompt)] for prompt in MANY]
        server.wait_for("both replicas' processes are named", lambda: len(server.replica_pids()) == 2)
        workers = [spawned_by(replica) for replica in server.replica_pids()]
        assert [len(each) for each in workers] == [1, 1]
        assert set(server.by_replica("tier_events_total", tier="prefill", event="transfers")) == {"0", "1"}
    server.wait_for("no worker outlives its server", lambda: not any(is_alive(pid) for each in workers for pid in each))
