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
from pathlib import Path

import pytest

from mini_engine.__main__ import main
from tests.shared.service import LONG, PATIENCE, Service, exchange, read_answer
from tests.shared.serving import ROOT, Process, path_with, serving

# At its end the process says how many objects the garbage collector leaves alone, and whether it met llguidance.
REPORT = "str(gc.get_freeze_count()), str('llguidance' in sys.modules)"
AT_END = f"import atexit, gc, sys; atexit.register(lambda: sys.stderr.write(' '.join(({REPORT}))));"


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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["serve", "--port", str(taken.getsockname()[1]), "--num-blocks", "8"]
        assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert "127.0.0.1:" in errors and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize("port", ["99999", "-1", "0x1f90"])
def test_a_port_that_cannot_be_is_told_with_the_options(options, port, capsys):
    with pytest.raises(SystemExit) as caught:
        options("--port", port)
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


def test_no_thread_is_left_behind():
    def ours():
        return {thread.name for thread in threading.enumerate()} & {"engine", "server"}

    with Service():
        assert ours() == {"engine", "server"}
    assert not ours(), f"threads that should have ended: {ours()}"
