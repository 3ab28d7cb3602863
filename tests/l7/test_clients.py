"""Lesson 7. Client libraries against `mini-engine serve`, as their users run them.

Each script in tests/l7/clients runs in a process of its own, with the Python that KV_COURSE_CLIENTS names or else this
one, and is skipped where its library is not installed:

    python -m venv clients
    clients/bin/pip install openai instructor langchain-openai litellm llm lm-eval[api] guidellm pydantic-ai-slim
    KV_COURSE_CLIENTS=clients/bin/python pytest -m nightly tests/l7/test_clients.py

vLLM's benchmark, Aider and Open WebUI are large programs: their scripts send what the programs send, and read what they
read, and name the file and the commit that this was taken from.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_engine.pocket import POCKET_DIR

PYTHON = os.environ.get("KV_COURSE_CLIENTS", sys.executable)
SCRIPTS = Path(__file__).with_name("clients")
MODULES = {
    "curl": "json",
    "openai": "openai",
    "instructor": "instructor",
    "langchain": "langchain_openai",
    "litellm": "litellm",
    "llm": "llm",
    "lm_eval": "lm_eval",
    "guidellm": "guidellm",
    "pydantic_ai": "pydantic_ai",
    "aider": "litellm",
    "vllm_bench": "json",
    "open_webui": "json",
}
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The pocket model, served by the command."""
    command = [sys.executable, "-m", "mini_engine", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[3]  # serving pocket at URL
        finally:
            server.terminate()


def is_installed(module: str) -> bool:
    """Whether the clients' Python can find a module."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([PYTHON, "-c", program, module], check=False).returncode == 0


def test_every_script_is_run():
    assert {path.stem for path in SCRIPTS.glob("use_*.py")} == {f"use_{name}" for name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_a_client_works_out_of_the_box(url, name):
    if not is_installed(MODULES[name]):
        pytest.skip(f"{PYTHON} has no {MODULES[name]}")
    command = [PYTHON, SCRIPTS / f"use_{name}.py", url, POCKET_DIR]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "SKIP" in done.stdout:
        pytest.skip(done.stdout)
    assert "PASS" in done.stdout
