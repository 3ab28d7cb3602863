"""Lesson 7. Measures the cost of HTTP: the same load through LLM.generate and through the server, in alternation.

The clients run in a separate process. Each reads its answer, streamed or whole, and only counts its tokens.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from statistics import median

from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard, whole_number

CLIENT = "--client"  # with a URL: this process runs the clients
NO_TEXT = 1  # events of a streamed answer without text: the usage at its end


def load(args: argparse.Namespace) -> tuple[list[list[int]], dict]:
    """Return prompts without common prefixes, and the request parameters."""
    prompts = [[300 + i, *range(40, 55)] for i in range(args.requests)]
    return prompts, {"max_tokens": args.max_new_tokens, "temperature": 0, "ignore_eos": True}


async def one_client(host: str, port: int, body: dict, tokens: int) -> int:
    """Send a request over a new connection, read the whole answer, and check its number of tokens.

    Returns the number of events that carried text; 0 if the answer is not streamed.
    """
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    answer = await reader.read()
    writer.close()
    if b'"completion_tokens":%d' % tokens not in answer:
        raise RuntimeError(f"an answer is incomplete; it ends with {answer[-600:]!r}")
    return answer.count(b'data: {"id"') - NO_TEXT if body.get("stream") else 0


async def clients(args: argparse.Namespace) -> tuple[float, int]:
    """Run all clients at once. Return the seconds until the last one is served, and the events with text."""
    host, port = args.client.removeprefix("http://").split(":")
    prompts, wanted = load(args)
    more = {"stream": True, "stream_options": {"include_usage": True}} if args.stream else {}
    bodies = [{"prompt": prompt} | wanted | more for prompt in prompts]
    started = time.perf_counter()
    events = await asyncio.gather(*(one_client(host, int(port), body, args.max_new_tokens) for body in bodies))
    return time.perf_counter() - started, sum(events)


def over_http(url: str, args: argparse.Namespace, stream: bool) -> tuple[float, int]:
    """Run the clients in a new process; return what `clients` does."""
    options = ["--requests", args.requests, "--max-new-tokens", args.max_new_tokens, *(["--stream"] if stream else [])]
    command = [sys.executable, __file__, CLIENT, url, *map(str, options)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8").stdout.split()
    return float(said[0]), int(said[1])


def measure(args: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return tokens/s of each way, and the events of a streamed round: medians of the rounds after a warm-up round."""
    from mini_engine.assembly.llm import LLM
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.worker import EngineWorker
    from mini_engine.server.app import create_app
    from mini_engine.server.background import in_background
    from mini_engine.server.metrics import Metrics
    from mini_engine.server.server_config import ServerConfig

    llm, metrics = LLM(args.model), Metrics()
    prompts, wanted = load(args)
    seconds: dict[str, list[float]] = {"LLM.generate": [], "HTTP, whole": [], "HTTP, streamed": []}
    events: list[int] = []
    with EngineWorker(llm.engine, llm.tokenizer, args.requests, metrics) as worker:
        metrics.watch(worker)
        app = create_app(worker, ServerConfig(max_waiting=args.requests), metrics)
        with in_background(app) as url:
            for _ in range(args.rounds + 1):
                started = time.perf_counter()
                llm.generate(prompts, SamplingParams(**wanted), progress=False)
                seconds["LLM.generate"].append(time.perf_counter() - started)
                seconds["HTTP, whole"].append(over_http(url, args, stream=False)[0])
                streamed, sent = over_http(url, args, stream=True)
                seconds["HTTP, streamed"].append(streamed)
                events.append(sent)
    tokens = args.requests * args.max_new_tokens
    return {way: tokens / median(taken[1:]) for way, taken in seconds.items()}, median(events[1:])


def run(args: argparse.Namespace) -> int:
    if args.client:
        print(*asyncio.run(clients(args)))
        return 0
    speed, events = measure(args)
    if args.json:
        print_json(speed | {"events": events})
        return 0
    print_speed(speed)
    print(f"{args.requests * args.max_new_tokens:,} tokens streamed in {events:,.0f} events")
    return 0


def print_speed(speed: dict[str, float]) -> None:
    from rich.console import Console

    from lessons._course.tables import Column, show

    rows = [[way, f"{tokens:,.0f}", f"{tokens / speed['LLM.generate']:.0%}"] for way, tokens in speed.items()]
    show(Console(highlight=False), [Column("", is_text=True), Column("tokens/s"), Column("of LLM.generate")], rows)


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    parser.add_argument(
        "--requests", type=whole_number(1), default=50, metavar="N", help="concurrent requests (default: 50)"
    )
    parser.add_argument("--max-new-tokens", type=whole_number(1), default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=3, metavar="N", help="default: 3, after a warm-up round"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(CLIENT, metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
