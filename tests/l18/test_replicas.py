"""Lesson 18. Both ways at once: two replicas in Ray Serve, each a model in the shares of two ranks."""

import asyncio
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from tests.processes import spawned_by
from tests.shared.fleet_server import FleetServer
from tests.shared.replica_answers import PROMPTS, answer, asked, expected

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'distributed'"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks' processes in /proc"),
]
expected = expected  # one engine's tokens: the fixture of the replicas' own tests


def test_replicas_of_ranks_give_the_tokens_of_one_engine_and_outlive_a_rank(expected):
    with FleetServer("--tp", "2", "--num-blocks", "200", "--max-num-seqs", "8") as server:
        server.wait_until_all_alive()

        async def ask_all() -> list[list[int]]:
            return [each["token_ids"] for each in await asyncio.gather(*(answer(server, asked(p)) for p in PROMPTS))]

        assert asyncio.run(ask_all()) == expected
        server.wait_for("both replicas' processes are named", lambda: len(server.replica_pids()) == 2)
        replicas = server.replica_pids()
        ranks = [spawned_by(replica) for replica in replicas]
        assert [len(others) for others in ranks] == [1, 1], "each replica has one other rank"
        os.kill(ranks[0][0], signal.SIGKILL)
        server.wait_for("the replica that lost a rank ends", lambda: not Path(f"/proc/{replicas[0]}").exists())
        server.wait_for("another one takes its place", lambda: len(server.replica_pids()) == 2)
        server.wait_until_all_alive()
        assert asyncio.run(ask_all()) == expected, "its successor answers as it did"
        left = [rank for replica in server.replica_pids() for rank in spawned_by(replica)]
    server.wait_for("no rank outlives its server", lambda: not any(Path(f"/proc/{rank}").exists() for rank in left))
