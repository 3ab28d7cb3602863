"""Open WebUI: the calls of its backend, as they leave it, and its way of reading a stream, without its package.

From backend/open_webui/routers/openai.py at commit 671f5772: the list of models (`get_models`), and what
`generate_chat_completion` makes of a chat: `metadata` is taken out, max_completion_tokens becomes max_tokens, a model's
own parameters (utils/payload.py, apply_model_params_to_body_openai) are added. The page asks for usage where a model is
marked as reporting it (src/lib/components/chat/Chat.svelte). The chat's title, its tags and its follow-ups are calls of
their own, not streamed (routers/tasks.py at 074d4883).
"""

import json
import sys
import urllib.request

url = sys.argv[1]
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is the capital of France?"}
PARAMS = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 20, "frequency_penalty": 0.0, "seed": 1, "stop": []}
CHAT = {"stream": True, "model": "pocket", "messages": [SYSTEM, ASK], "stream_options": {"include_usage": True}}
TITLE = {"model": "pocket", "messages": [ASK], "stream": False, "max_tokens": 100}
TAGS = {"model": "pocket", "messages": [ASK], "stream": False}


def send(path, body=None):
    """Send a request as the backend does."""
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url + path, data, HEADERS), timeout=60)


with send("/models") as response:
    models = json.load(response)
    assert [model["id"] for model in models["data"]] == ["pocket"] and models["object"] == "list"
with send("/chat/completions", CHAT | PARAMS) as response:
    assert "text/event-stream" in response.headers["Content-Type"]
    text, usage = "", None
    for line in map(bytes.decode, response):
        if not line.strip() or not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        if choices := chunk.get("choices"):
            text += choices[0].get("delta", {}).get("content") or ""
    assert "Paris" in text and usage["completion_tokens"], (text, usage)
for body in (TITLE, TAGS):
    with send("/chat/completions", body) as response:
        assert json.load(response)["choices"][0]["message"]["content"]
print("PASS")
