"""Lesson 8. Suite `timing`: what the time of an answer reveals to a client about another client's prompts."""

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from urllib.parse import urlsplit

from scripts.bench.common import Report
from scripts.bench.options import add_model

KEYS = ("one", "two")
PROMPT_TOKENS = 128
RIGHT, WRONG = "the same prompt", "another prompt"
SALTED, OTHER_KEY = "the same prompt, with a salt of its own", "the same prompt, with another key"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_model(parser)


@contextmanager
def serving(model: str | None) -> Iterator[tuple[Callable, int]]:
    """Serve a model with two keys. Yield `ask(key, prompt, salt) -> (seconds, cached tokens)`, and its vocabulary."""
    from mini_engine.assembly.llm import LLM
    from mini_engine.engine.worker import EngineWorker
    from mini_engine.server.app import create_app
    from mini_engine.server.background import in_background
    from mini_engine.server.metrics import Metrics
    from mini_engine.server.server_config import ServerConfig

    with LLM(model) as llm, EngineWorker(llm.engine, llm.tokenizer) as worker:
        app = create_app(worker, ServerConfig(api_keys=KEYS), Metrics())
        with in_background(app) as url:
            client = http.client.HTTPConnection(urlsplit(url).netloc)

            def ask(key: str, prompt: list[int], salt: str | None = None) -> tuple[float, int]:
                body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt})
                began = time.perf_counter()
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                client.request("POST", "/v1/completions", body, headers)
                usage = json.loads(client.getresponse().read())["usage"]
                return time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]

            yield ask, worker.limits.vocab_size


def run(args) -> Report:
    """In each round, let one client send a new prompt and another one time each of its own prompts."""
    chance = random.Random(0)
    rounds = args.rounds or (3 if args.quick else 25)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in (RIGHT, WRONG, SALTED, OTHER_KEY)}
    with serving(args.model) as (ask, vocab_size):
        for number in range(rounds + 1):
            secret, other = (chance.choices(range(vocab_size), k=PROMPT_TOKENS) for _ in range(2))
            ask(KEYS[0], secret)
            tries = {
                RIGHT: (KEYS[0], secret),
                WRONG: (KEYS[0], other),
                SALTED: (KEYS[0], secret, f"salt {number}"),
                OTHER_KEY: (KEYS[1], secret),
            }
            for name in chance.sample(list(tries), k=len(tries)):
                found[name].append(ask(*tries[name]))
    rows = [
        {
            "the second client sends": name,
            "ms": median(seconds for seconds, _ in taken[1:]) * 1e3,  # the first round warms up
            "cached tokens": taken[-1][1],
        }
        for name, taken in found.items()
    ]
    note = f"prompts of {PROMPT_TOKENS} tokens that a first client has just sent; medians of {rounds} rounds, in turns"
    return Report("timing", rows, [note])
