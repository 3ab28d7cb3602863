"""vllm bench serve: its requests, and its way of reading a stream, without its package.

From vLLM's vllm/benchmarks/lib/endpoint_request_func.py at commit 02cfb534, functions async_request_openai_completions
and async_request_openai_chat_completions, and vllm/benchmarks/serve.py at 009e6d4a, which asks /v1/models first, sends
`--ignore-eos` and the sampling options as further parameters, and reads /metrics before and after.
"""

import codecs
import json
import sys
import urllib.request

url = sys.argv[1]
JSON = {"Content-Type": "application/json"}
MORE = {"ignore_eos": True, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "frequency_penalty": 0.0, "n": 1}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {"model": "pocket", "prompt": [5, 6, 7], "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None}
TURN = {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}
CHAT = {"model": "pocket", "messages": [TURN], "max_completion_tokens": 12}


def chunks(path, body):
    """Yield the stream's chunks as the benchmark takes them: whatever has arrived, stripped, and cut at empty lines."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), JSON)
    decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
    with urllib.request.urlopen(request, timeout=60) as response:
        while piece := response.read1(4096):
            held += decoder.decode(piece.strip())
            *events, held = held.split("\n\n")
            tail = held.removeprefix("data: ").strip()
            if tail == "[DONE]" or is_json(tail):  # the strip has taken the empty line at its end
                events, held = [*events, held], ""
            for event in filter(None, map(str.strip, events)):
                if not event.startswith(":") and (data := event.removeprefix("data: ")) != "[DONE]":
                    yield json.loads(data)
    assert not held.strip(), held


def is_json(text):
    """Whether the text is complete."""
    try:
        return bool(text) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


with urllib.request.urlopen(f"{url}/models", timeout=60) as response:
    assert json.load(response)["data"][0]["id"] == "pocket"
for path, body, read in (
    ("/completions", COMPLETION, lambda choice: choice.get("text")),
    ("/chat/completions", CHAT, lambda choice: choice["delta"].get("content")),
):
    text, used = "", None
    for chunk in chunks(path, body | USAGE | MORE):
        if choices := chunk.get("choices"):
            text += read(choices[0]) or ""
        elif usage := chunk.get("usage"):
            used = usage
    assert text and used["completion_tokens"] == 12 and used["prompt_tokens"], (path, text, used)
with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as response:
    assert response.status == 200
print("PASS")
