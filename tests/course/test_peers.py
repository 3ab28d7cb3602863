"""Course machinery. The other engines of `bench.py peers`: a missing one is named, and their tokens are counted once.

Protects the comparison from an engine that silently takes no part, from tokens that are counted twice or lost on the
way out of a server, and the machine from servers that outlive the bench.
"""

import json
import os
import sys
import time
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from scripts.bench.peer_llama import llama
from scripts.bench.peer_places import PLACES, place_of
from scripts.bench.peer_protocol import Peer, PeerError
from scripts.bench.runs import watch

import pytest


class LlamaServer(BaseHTTPRequestHandler):
    """Answers as llama.cpp's server does: an event for each token, the last one without tokens."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if "/slots/" in self.path:
            return
        for token in range(asked["n_predict"]):
            self.event([asked["prompt"][0] + token], stop=False)
        self.event([], stop=True)

    def event(self, tokens: list[int], stop: bool) -> None:
        self.wfile.write(f"data: {json.dumps({'tokens': tokens, 'stop': stop})}\n\n".encode())

    def log_message(self, *_) -> None:
        pass


def test_every_token_of_llama_cpps_server_reaches_its_request_once():
    with ThreadingHTTPServer(("127.0.0.1", 0), LlamaServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        [seen] = watch(llama(server.server_port, num_slots=2), [[([10, 1], 3), ([20], 5)]])
        server.shutdown()
    assert seen.answers == [[10, 11, 12], [20, 21, 22, 23, 24]], "tokens are added to their own answer, in order"
    assert seen.figures()["decode_tokens"] <= 8 - 2, "the first token of each answer is not decode"


@pytest.mark.parametrize("name", PLACES)
def test_an_engine_without_a_place_says_how_to_give_one(name, monkeypatch):
    place = PLACES[name]
    monkeypatch.delenv(place.variable, raising=False)
    with pytest.raises(PeerError, match=f"use {place.option} {place.metavar} or set {place.variable}"):
        place_of(name, Namespace())
    monkeypatch.setenv(place.variable, "/there")
    assert place_of(name, Namespace()) == "/there"


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_a_server_that_an_engine_started_ends_with_the_engine():
    code = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid, flush=True); input()"
    peer = Peer("one", worker=("-c", code))
    child = int(peer.lines.get(timeout=60))
    peer.close()
    assert ended(child), f"process {child} still runs: close() must kill the whole group"


def ended(number: int) -> bool:
    """Return whether a process has ended within a few seconds; one that waits to be collected has."""
    for _ in range(100):
        try:
            os.kill(number, 0)
            state = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
