"""guidellm: a short benchmark of ten requests, streamed, with usage in every chunk."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

url, tokenizer = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model=pocket",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=10",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    totals = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 10 and not totals["errored"], totals
print("PASS", version("guidellm"))
