"""pydantic-ai: run, streams, a pydantic model by tools and by JSON schema, a tool, the Responses API."""

import asyncio
import sys
from importlib.metadata import version

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "What is the capital of France?"
provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
settings = {"temperature": 0, "max_tokens": 150}


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


async def main():
    model = OpenAIChatModel("pocket", provider=provider, settings=settings)
    agent = Agent(model, instructions="Be brief.")
    first = await agent.run(ASK)
    assert "Paris" in first.output and first.usage().output_tokens
    again = await agent.run("And of Japan?", message_history=first.all_messages())
    assert again.output
    async with agent.run_stream(ASK) as stream:
        assert "Paris" in "".join([piece async for piece in stream.stream_text(delta=True)])
    for output in (ToolOutput(Town), NativeOutput(Town)):
        found = (await Agent(model, output_type=output).run("Name a town.")).output
        assert isinstance(found, Town), (output, found)
    called = Agent(model)

    @called.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    assert (await called.run(ASK, usage_limits=UsageLimits(request_limit=5))).output
    responses = Agent(OpenAIResponsesModel("pocket", provider=provider, settings=settings), instructions="Be brief.")
    assert "Paris" in (await responses.run(ASK)).output
    async with responses.run_stream(ASK) as stream:
        assert "Paris" in await stream.get_output()


asyncio.run(main())
print("PASS", version("pydantic-ai-slim"))
