"""Lesson 7. A step or a disk that hangs: /health says so, and the process ends within its grace all the same."""

import signal
import socket
import sys
import threading
import urllib.request

import pytest

from tests.shared.service import LONG, PATIENCE, Service, raw_request
from tests.shared.serving import Process, serving

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to handle")
HANG = "import threading; hang = lambda *given, **options: threading.Event().wait();"
STUCK_STEP = HANG + "from mini_engine.engine.engine import Engine; Engine.step = hang;"
STUCK_WRITE = HANG + "from mini_engine.tiers.disk import DiskTier; DiskTier.put = hang;"
PROMPT = "Once upon a time there was a little river that ran from the mountains to the sea, and it sang all day long."


def test_health_says_why_when_a_step_does_not_return():
    with Service() as service:
        gate, step = threading.Event(), service.engine.step
        service.engine.step = lambda: gate.wait() and step()
        service.worker.stuck_seconds = 0.0  # any step that has not returned
        try:
            with service.connect({"prompt": [1, 2, 3], "max_tokens": 1}) as client:
                service.wait_until("the step has begun", lambda: service.worker.stuck)
                found = service.get("/health")
                gate.set()
                client.recv(1)
        finally:
            gate.set()
        assert found.status == 503 and "step" in found.body["status"], f"nothing is answered, and /health says {found}"
        service.wait_until("steps return again", lambda: not service.worker.stuck)
        assert service.get("/health").status == 200


def ask_and_terminate(server: Process, wait_for_answer: bool) -> tuple[int, str]:
    """Send a prompt, then SIGTERM. Return the exit code and what the server wrote to stderr."""
    with socket.create_connection(server.address) as client:
        client.sendall(raw_request({"prompt": PROMPT, "max_tokens": 4, "temperature": 0}))
        if wait_for_answer:
            client.recv(1)
        else:
            while not running(server):
                pass
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
        return server.end()


def running(server: Process) -> bool:
    """Whether the request has arrived at the engine."""
    with urllib.request.urlopen("http://{}:{}/metrics".format(*server.address)) as answer:
        text = answer.read().decode()
    return any(f"mini_engine_requests_{state} 1.0" in text for state in ("waiting", "running"))


@LONG
@pytest.mark.ci
@posix
def test_a_step_that_hangs_does_not_outlive_the_grace():
    with serving("--grace-seconds", "2", before=STUCK_STEP) as server:
        code, errors = ask_and_terminate(server, wait_for_answer=False)
    assert code == 1 and errors and "Traceback" not in errors, errors


@LONG
@pytest.mark.nightly
@posix
def test_a_disk_that_hangs_while_it_is_written_does_not_outlive_the_grace(tmp_path):
    options = ("--grace-seconds", "2", "--kv-cache-dir", str(tmp_path), "--kv-always")
    with serving(*options, before=STUCK_WRITE) as server:
        code, errors = ask_and_terminate(server, wait_for_answer=True)
    assert (code, errors) == (0, ""), "everything was answered; records that cannot be written are no error"
