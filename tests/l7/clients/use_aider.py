"""Aider: its calls of litellm, without its package, which asks for a Python older than 3.13.

From aider/models.py, Model.send_completion, and aider/coders/chat_chunks.py, ChatChunks.add_cache_control, at commit
5dc9490b: one completion, streamed or not, at temperature 0, whose fixed parts may be marked for a cache; the names of
commits come from a second call.
"""

import json
import sys
import urllib.request

import litellm

url = sys.argv[1]
MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Act as an expert developer."} | MARK]}
FILES = {"role": "user", "content": [{"type": "text", "text": "These are the files: none."} | MARK]}
MESSAGES = [
    SYSTEM,
    FILES,
    {"role": "assistant", "content": "Ok."},
    {"role": "user", "content": "What is the capital of France?"},
]

for name in ("openai/pocket", "hosted_vllm/pocket"):
    asked = dict(model=name, temperature=0, api_base=url, api_key="none", timeout=600)
    stream = litellm.completion(**asked, stream=True, messages=MESSAGES)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream), name
    found = litellm.completion(**asked, stream=False, messages=MESSAGES[:1] + MESSAGES[-1:])
    assert found.choices[0].message.content and found.usage.completion_tokens, name

# litellm leaves the marks out for these two providers; others, and proxies, pass them on
body = {"model": "pocket", "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
request = urllib.request.Request(
    f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request, timeout=60) as response:
    assert json.load(response)["choices"][0]["message"]["content"]
print("PASS", litellm.__name__)
