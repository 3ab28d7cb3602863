"""llm: the command line tool, with this server as an extra OpenAI model."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

MODELS = """- model_id: pocket
  model_name: pocket
  api_base: "{url}"
  supports_schema: true
  supports_tools: true
"""
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(MODELS.format(url=sys.argv[1]), encoding="utf-8")
    environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def ask(*args: str) -> str:
        """What the command prints."""
        command = [sys.executable, "-m", "llm", *args]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = ("-m", "pocket", "-o", "temperature", "0", "-o", "max_tokens", "60", "What is the capital of France?")
    assert "Paris" in ask(*asked)
    assert "Paris" in ask("--no-stream", *asked)
    schema = (
        '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}'
    )
    assert '"n"' in ask("--schema", schema, *asked)
print("PASS", version("llm"))
