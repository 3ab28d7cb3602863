"""Lesson 7. The server on a free port, asked by OpenAI's own client, all prompts at once: the tokens are equal."""

import asyncio
import sys

from scripts.smoke.arguments import make_parser
from scripts.smoke.report import equal_prefix
from scripts.smoke.run import Outcome, run_smoke

from mini_engine.base.errors import UserError
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.text.tokenizer import Tokenizer

MISSING = 'this lesson needs {}: make setup ARGS="--extras server", or pip install -e ".[server]" --group test'


def generate(model, prompts, args) -> Outcome:
    """Answer every prompt over HTTP twice, streamed and whole: the two must agree, and equal Hugging Face's."""
    try:
        import openai  # noqa: F401

        from mini_engine.engine.worker import EngineWorker
        from mini_engine.server.app import create_app
        from mini_engine.server.background import in_background
        from mini_engine.server.metrics import Metrics
        from mini_engine.server.server_config import ServerConfig
    except ModuleNotFoundError as error:
        raise UserError(MISSING.format(error.name)) from None
    engine, tokenizer = Engine.for_model(model, num_blocks=args.num_blocks), Tokenizer.load(args.model)
    config, metrics = ServerConfig(max_waiting=2 * len(prompts) + 1), Metrics()
    with EngineWorker(engine, tokenizer, config.max_waiting, metrics) as worker:
        metrics.watch(worker)
        with in_background(create_app(worker, config, metrics)) as url:
            whole, streamed = asyncio.run(ask_all(url, prompts, args.max_new_tokens))
    outputs = [one[: equal_prefix(one, other)] for one, other in zip(whole, streamed, strict=True)]
    blocks = engine.scheduler.manager.blocks_by_state
    kv = {"layout": "block-tensor", "blocks": blocks.free + blocks.held, "free_at_end": blocks.free}
    return Outcome(outputs, kv | {"requests": 2 * len(prompts), "whole_equals_streamed": whole == streamed})


async def ask_all(url: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of every prompt's answer, whole and streamed, all requested at the same time."""
    import openai

    def ids_of(choice) -> list[int]:
        return choice.model_extra["token_ids"]  # unknown to OpenAI's client but kept by it

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        more = {"model": "pocket", "max_tokens": max_tokens, "temperature": 0, "extra_body": {"return_token_ids": True}}

        async def whole(prompt: list[int]) -> list[int]:
            answer = await client.completions.create(prompt=prompt, **more)
            return ids_of(answer.choices[0])

        async def streamed(prompt: list[int]) -> list[int]:
            chunks = await client.completions.create(prompt=prompt, stream=True, **more)
            return [token async for chunk in chunks for token in ids_of(chunk.choices[0])]

        try:
            found = await asyncio.gather(*map(whole, prompts), *map(streamed, prompts))
        except openai.BadRequestError as error:
            raise UserError(error.body["message"] if isinstance(error.body, dict) else str(error)) from error
    return found[: len(prompts)], found[len(prompts) :]


def arguments():
    parser = make_parser(__doc__)
    blocks = {"type": whole_number(2), "default": 1024, "metavar": "N"}
    parser.add_argument("--num-blocks", **blocks, help="of 16 tokens (default: 1024)")
    return parser


def main(argv=None) -> int:
    return run_smoke(7, generate, arguments(), argv)


if __name__ == "__main__":
    sys.exit(main())
