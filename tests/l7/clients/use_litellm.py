"""litellm: completion, stream, response_format, tools."""

import json
import sys
from importlib.metadata import version

import litellm

litellm.telemetry = False
ASK = dict(
    model="hosted_vllm/pocket",
    api_base=sys.argv[1],
    api_key="none",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=150,
    num_retries=0,
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look up.", "parameters": SCHEMA}}
for name in ("hosted_vllm/pocket", "openai/pocket"):
    ask = ASK | {"model": name}
    assert "Paris" in litellm.completion(**ask).choices[0].message.content
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True))
    form = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(litellm.completion(**ask, response_format=form).choices[0].message.content)) == {"name"}
    called = litellm.completion(**ask, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}})
    assert set(json.loads(called.choices[0].message.tool_calls[0].function.arguments)) == {"name"}
print("PASS", version("litellm"))
