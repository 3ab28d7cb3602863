"""Lesson 7. The command: it says where it listens, ends gently, and tells a mistake in one line."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from mini_engine.cli import serve
from mini_engine.cli.parser import OneLineParser, guard
from tests.l7.service import LONG, PATIENCE, Service, exchange, read_answer

ROOT = Path(__file__).resolve().parents[2]
SERVE = "from mini_engine.cli import serve; from mini_engine.cli.parser import OneLineParser, guard; import sys;" + (
    "parser = OneLineParser(prog='serve'); serve.add_arguments(parser); sys.exit(guard(parser, serve.run, None))"
)

# At its end the process says how many objects the garbage collector leaves alone, and whether it met llguidance.
REPORT = "str(gc.get_freeze_count()), str('llguidance' in sys.modules)"
AT_END = f"import atexit, gc, sys; atexit.register(lambda: sys.stderr.write(' '.join(({REPORT}))));"


class Process:
    """`serve` in a process of its own. `address` is where it listens."""

    def __init__(self, *arguments: str, before: str = "", **environment: str) -> None:
        usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path_with(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + SERVE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | usual | environment,
            cwd=ROOT,
        )

    def wait_for_address(self) -> tuple[str, int]:
        """From the line that it prints when it is ready."""
        line = self.process.stdout.readline()
        found = re.search(r"http://(127\.0\.0\.1):(\d+)/v1", line)
        assert found, f"it printed {line!r}\n{self.process.stderr.read()}"
        self.address = (found[1], int(found[2]))
        return self.address

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code, and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        unwritten = re.search(r"NotImplementedError: (Lesson \d+, task \d+.*)", errors)
        if unwritten:
            raise NotImplementedError(unwritten[1])
        return self.process.returncode, errors


@contextmanager
def serving(*arguments: str, before: str = ""):
    server = Process("--port", "0", *arguments, before=before)
    try:
        server.wait_for_address()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@LONG
@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to handle")
def test_sigterm_under_load_finishes_what_runs_refuses_what_comes_and_exits_0():
    asked = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
    asked |= {"return_token_ids": True}

    async def scene(server: Process):
        running = [asyncio.create_task(exchange(server, asked)) for _ in range(6)]
        while await health(server, "running") < 6:
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        while (refused := await exchange(server, asked | {"max_tokens": 1}))[0] == 200:
            await asyncio.sleep(0.01)
        return await asyncio.gather(*running), refused

    with serving("--grace-seconds", "40", before=AT_END) as server:
        answers, (status, content) = asyncio.run(asyncio.wait_for(scene(server), PATIENCE))
        code, errors = server.end()
    assert status == 503 and json.loads(content)["error"]["code"] == "shutting_down"
    read = [(status, read_answer(text)) for status, text in answers]
    assert [(status, len(answer["token_ids"]), answer["finish_reason"]) for status, answer in read] == [
        (200, 60, "length")
    ] * 6, "what ran when the signal came must run to its end"
    assert code == 0, f"exit code {code}: {errors}"
    assert re.fullmatch(r"\d+ \w+", errors), f"a gentle end is a silent one: {errors}"
    frozen, met_grammars = errors.split()
    assert int(frozen) > 50_000, "what is loaded at the start is never searched for garbage again"
    assert met_grammars == "False", "an output form must cost nothing where none is asked for, not even an import"


async def health(server: Process, state: str) -> int:
    """A gauge of /metrics."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    return int(float(text.split(f"\nmini_engine_requests_{state} ")[1].split()[0]))


@LONG
def test_a_port_that_is_taken_is_one_line(capsys):
    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = guard(parser, serve.run, ["--port", str(taken.getsockname()[1]), "--num-blocks", "8"])
    errors = capsys.readouterr().err
    assert code == 2 and "127.0.0.1:" in errors and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize("port", ["99999", "-1", "0x1f90"])
def test_a_port_that_cannot_be_is_told_with_the_options(port, capsys):
    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--port", port])
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and port in errors and len(errors.splitlines()) == 1


def test_a_port_that_is_taken_is_told_before_torch_is_imported():
    told = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, errors = Process("--port", port, before=told).end()
    assert code == 2 and port in errors.splitlines()[0] and errors.splitlines()[1:] == ["False"], errors


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("command", ["serve --port 0 --num-blocks 8", "cache list {} --json"])
def test_an_output_that_is_full_is_one_line(command, tmp_path):
    argv = [sys.executable, "-m", "mini_engine", *command.format(tmp_path).split()]
    tmp_path.chmod(0o700)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr, done.stderr


def test_without_the_extra_it_says_how_to_install_it(tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('no fastapi', name='fastapi')", encoding="utf-8")
    code, errors = Process(PYTHONPATH=os.pathsep.join([str(tmp_path), path_with(ROOT)])).end()
    assert code == 2 and len(errors.splitlines()) == 1, errors
    for command in ("pip install 'kv-course[server]'", "pip install -e '.[server]'"):
        assert command in errors, "with the package alone there is no clone to install from"


def test_help_needs_nothing_but_python():
    code, errors = Process("--help").end()
    assert (code, errors) == (0, "")


def test_no_thread_is_left_behind():
    def ours():
        return {thread.name for thread in threading.enumerate()} & {"engine", "server"}

    with Service():
        assert ours() == {"engine", "server"}
    assert not ours(), f"threads that should have ended: {ours()}"
