"""Lesson 6. Tools in a conversation whose chat template knows none: they are described in the system message.

The form is Hermes', which Qwen's own templates use: tools as JSON inside <tools>, a call inside <tool_call>, and its
result inside <tool_response>, in a user's turn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

ABOUT_TOOLS = """You may call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


def tools_as_text(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[dict[str, str]]:
    """Return messages with nothing but a role and a text each, and the tools in the system message."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    about = ABOUT_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{about}"}, *plain[1:]]
    return [{"role": "system", "content": about}, *plain]


def call_as_text(call: Mapping[str, Any]) -> str:
    """A call that the assistant made, as it wrote it."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _plain(message: Message) -> dict[str, str]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    parts = [message["content"], *map(call_as_text, message.get("tool_calls") or ())]
    return {"role": message["role"], "content": "\n".join(part for part in parts if part)}
