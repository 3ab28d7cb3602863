"""Lesson 13. Suite `routers`: cached prompt tokens of real servers, by router; sglang-router included.

Several lesson 7 servers run in this process, on free loopback ports, with small caches. The same chats are sent through
each router, with a few requests in flight. `--sglang-router PYTHON` names a Python that has that package.
"""

import json
import random
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock

from scripts.bench.common import Report
from scripts.bench.server_process import free_port, started
from scripts.bench.traffic import Chats
from scripts.bench.turns import with_progress

from mini_engine.assembly.llm import LLM
from mini_engine.cli.parser import at_least
from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin
from mini_engine.kv.cache_coordinator import cache_of

SERVERS, BLOCKS, IN_FLIGHT = 4, 160, 8  # blocks of 16 tokens for each server; requests in flight
LETTERS = 32  # in a block of the trace; a router sees only this text
CHATS = Chats(num_requests=400, continues=0.75, opening=(6.0, 0.6), turn=(2.0, 0.6), gap=(24.0, 0.6))
ANSWER_SECONDS = 60.0
ASKED = ("model", "prompt", "max_tokens", "temperature")
PEER_POLICIES = ("round_robin", "cache_aware")
Send = Callable[[Sequence[int]], dict]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument(
        "--beta", type=at_least(0), nargs="+", default=[1.0, 0.3], help="weight of load in our score (default: 1 0.3)"
    )
    parser.add_argument("--sglang-router", metavar="PYTHON", help="a Python with sglang-router, to compare with it")


def run(args: Namespace) -> Report:
    """Return a row for each router."""
    requests = CHATS.generate()[: 60 if args.quick else CHATS.num_requests]
    contenders: dict[str, Callable] = {
        "round robin": lambda urls: ours(urls, RoundRobin()),
        "affinity": lambda urls: ours(urls, PrefixScore(0.0)),
    }
    for beta in args.beta:
        contenders[f"score, beta {beta:g}"] = lambda urls, beta=beta: ours(urls, PrefixScore(beta))
    if args.sglang_router:
        for policy in PEER_POLICIES:
            contenders[f"sglang-router {policy}"] = lambda urls, policy=policy: peer(urls, args.sglang_router, policy)
    rows = [
        {"router": name} | measured(contender, requests)
        for name, contender in with_progress(contenders.items(), "routers")
    ]
    notes = [
        f"{len(requests)} requests of chats under one system prompt, {IN_FLIGHT} in flight",
        f"{SERVERS} servers of the pocket model on one machine, {BLOCKS} blocks of 16 tokens each",
        "max / mean: prompt tokens computed by the busiest server, and on average",
    ]
    return Report("routers", rows, notes)


def measured(contender: Callable, requests: Sequence[Sequence[int]]) -> dict[str, float]:
    """Send the requests through a router to new servers; return their cache hits and the balance of work."""
    with servers() as (urls, llms), contender(urls) as send:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            usages = list(pool.map(send, requests))
        computed = [computed_tokens(llm) for llm in llms]
    found = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    return {
        "cached %": 100 * found / sum(one["prompt_tokens"] for one in usages),
        "max / mean": max(computed) * len(computed) / sum(computed),
    }


def computed_tokens(llm: LLM) -> int:
    """Return the number of prompt tokens that an engine did not find in its cache."""
    stats = cache_of(llm.engine.scheduler.manager).prefixes.stats
    return stats.asked_tokens - stats.found_tokens


def text_of(keys: Sequence[int]) -> str:
    """Return a prompt: the same letters for the same block."""
    return "".join("".join(random.Random(key).choices("etaoin shrdlu", k=LETTERS)) for key in keys)


def ask(url: str, keys: Sequence[int]) -> dict:
    """Send one request; return its usage."""
    body = json.dumps({"model": "pocket", "prompt": text_of(keys), "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)["usage"]


@contextmanager
def servers() -> Iterator[tuple[list[str], list[LLM]]]:
    """Run lesson 7's server several times; yield the addresses and the engines behind them."""
    from mini_engine.engine.worker import EngineWorker
    from mini_engine.server.background import in_background
    from mini_engine.server.metrics import Metrics
    from mini_engine.server.server_config import ServerConfig
    from mini_engine.server.service import Service

    with ExitStack() as stack:
        llms = [LLM(num_blocks=BLOCKS) for _ in range(SERVERS)]
        workers = [stack.enter_context(EngineWorker(llm.engine, llm.tokenizer)) for llm in llms]
        apps = [plain_app()(Service(worker, ServerConfig(), Metrics().scrape)) for worker in workers]
        yield [stack.enter_context(in_background(app)) for app in apps], llms


def plain_app() -> type:
    """Return lesson 7's app, which keeps only the parameters that `ask` sent.

    sglang-router adds every parameter of SGLang's, and lesson 7's server refuses unknown ones.
    """
    from starlette.requests import Request

    from mini_engine.server.app import ServerApp

    class PlainApp(ServerApp):
        async def __call__(self, scope, receive, send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                return await super().__call__(scope, receive, send)
            sent = await Request(scope, receive).json()
            asked = {name: value for name, value in sent.items() if name in ASKED}
            body = json.dumps(asked).encode()
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            scope = dict(scope) | {"headers": [*headers, (b"content-length", str(len(body)).encode())]}
            first = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def again():
                return next(first, None) or await receive()

            await super().__call__(scope, again, send)

    return PlainApp


@contextmanager
def ours(urls: Sequence[str], policy: Policy[str]) -> Iterator[Send]:
    """Let a policy of lesson 13 choose; the answer's usage is the replica's report."""
    mutex, loads = Lock(), dict.fromkeys(urls, 0.0)

    def send(keys: Sequence[int]) -> dict:
        with mutex:
            url = policy.choose(keys, loads)
            policy.sent(url, keys)
            loads[url] += 1
        usage = ask(url, keys)
        with mutex:
            loads[url] -= 1
            share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
            policy.found(url, keys, round(share * len(keys)))
        return usage

    yield send


@contextmanager
def peer(urls: Sequence[str], python: str, policy: str) -> Iterator[Send]:
    """Let sglang-router choose, with its defaults."""
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--policy", policy, "--worker-urls", *urls]
    with started("sglang-router", command, f"http://127.0.0.1:{port}", "/readiness") as (url, _):
        yield lambda keys: ask(url, keys)
