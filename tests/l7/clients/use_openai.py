"""openai: chat, stream, `.parse`, tools, logprobs, errors."""

import json
import sys

import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "What is the capital of France?"}]


class Sum(BaseModel):
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


class Town(BaseModel):
    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


TOOLS = [openai.pydantic_function_tool(Sum, name="add")]
asked = dict(model="pocket", messages=ASK, temperature=0)
calls = asked | dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100)
assert "Paris" in client.chat.completions.create(**asked, max_tokens=20).choices[0].message.content
stream = client.chat.completions.create(**asked, max_tokens=20, stream=True, stream_options={"include_usage": True})
*chunks, last = stream
assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks) and last.usage.completion_tokens

parsed = client.chat.completions.parse(**asked, response_format=Town, max_tokens=100)
assert isinstance(parsed.choices[0].message.parsed, Town), parsed
found = client.chat.completions.create(**asked, response_format={"type": "json_object"}, max_tokens=200)
assert found.choices[0].finish_reason == "length" or isinstance(json.loads(found.choices[0].message.content), dict)

called = client.chat.completions.parse(**calls)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {"a", "b"}
assert isinstance(call.function.parsed_arguments.a, int)
with client.chat.completions.stream(**calls) as stream:
    final = stream.get_final_completion()
assert json.loads(final.choices[0].message.tool_calls[0].function.arguments).keys() == {"a", "b"}

turn = called.choices[0].message.model_dump(exclude={"parsed"})
for one in turn["tool_calls"]:
    one["function"].pop("parsed_arguments", None)
answer = {"role": "tool", "tool_call_id": call.id, "content": "7"}
client.chat.completions.create(**(asked | {"messages": [*ASK, turn, answer]}), tools=TOOLS, max_tokens=10)
developer = [{"role": "developer", "content": "Be brief."}, *ASK]
neutral = dict(store=False, metadata={"a": "b"}, service_tier="auto", logit_bias={}, n=1, user="me")
client.chat.completions.create(**(asked | {"messages": developer}), **neutral, max_tokens=5)
scored = client.completions.create(model="pocket", prompt="Paris is", echo=True, logprobs=1, max_tokens=0)
assert scored.choices[0].logprobs.token_logprobs[0] is None and scored.choices[0].text == "Paris is"
respond = dict(model="pocket", input=ASK, temperature=0, instructions="Be brief.", store=False)
answered = client.responses.create(**respond)
assert "Paris" in answered.output_text and answered.status == "completed" and answered.usage.output_tokens
with client.responses.stream(**respond) as stream:
    pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == stream.get_final_response().output_text == answered.output_text
print("PASS", openai.__version__)
