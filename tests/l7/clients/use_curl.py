"""curl: a plain request, a stream, and a request id."""

import json
import shutil
import subprocess
import sys

curl = shutil.which("curl")
if curl is None:
    print("SKIP curl is not installed")
    raise SystemExit


def post(body: dict, *options: str) -> str:
    """What curl prints."""
    command = [curl, "-sS", "-N", f"{sys.argv[1]}/completions", "-H", "Content-Type: application/json", *options]
    command += ["-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout


asked = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
assert "Paris" in json.loads(post(asked))["choices"][0]["text"]
assert "data: [DONE]" in post(asked | {"stream": True})
assert "x-request-id: mine-1" in post(asked, "-i", "-H", "X-Request-Id: mine-1").lower()
print("PASS")
