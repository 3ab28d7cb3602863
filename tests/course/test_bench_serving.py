"""Course machinery. Suite `serving`: its clients measure what a server does, its checkpoint gives every id a text.

Protects readers of server against server from a client that counts wrongly, and from events that never come.
"""

import asyncio
import json
import threading
from argparse import Namespace
from contextlib import contextmanager

from scripts.bench import serving, shared_parts
from scripts.bench.histories import history_bytes
from scripts.bench.kernel import make_batch
from scripts.bench.peers import behind, room_of
from scripts.bench.serving_client import Load, Seen, closed, figures, quantile

import pytest

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.model.kinds import Full, Window
from mini_engine.text.tokenizer import Tokenizer
from tests.support import write_checkpoint

GAP = 0.05  # seconds between a stand-in's events


@contextmanager
def stand_in(tokens: int, status: str = "200 OK"):
    """Yield the address of a server that streams `tokens` events, and how many it serves at once at most."""
    most = {"now": 0, "most": 0, "bodies": []}

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        most["bodies"].append(json.loads(await reader.readexactly(length)))
        most["now"] += 1
        most["most"] = max(most["most"], most["now"])
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        for _ in range(tokens):
            await asyncio.sleep(GAP)
            writer.write(b'data: {"choices": [{"text": " t1"}]}\n\n')
            await writer.drain()
        writer.write(b'data: {"choices": [{"text": ""}]}\n\n')
        writer.write(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % tokens)
        most["now"] -= 1
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", most
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()


def test_a_client_sees_each_event_when_it_comes():
    with stand_in(5) as (url, seen):
        found = figures(url, Load([([1, 2], 5)] * 6, at_once=2), most_first=60, most_token=60)
    assert seen["most"] == 2 and len(seen["bodies"]) == 6, "two clients, who ask again when answered"
    assert seen["bodies"][0]["prompt"] == [1, 2] and seen["bodies"][0]["ignore_eos"] is True
    assert found["first token, p50 ms"] >= 1e3 * GAP and found["gap, p50 ms"] >= 0.9e3 * GAP
    assert found["good a second"] == pytest.approx(found["tokens/s"] / 5)


def test_arrivals_wait_for_nobody():
    with stand_in(4) as (url, seen):
        figures(url, Load([([1], 4)] * 5, rate=1000.0), most_first=0, most_token=0)
    assert seen["most"] > 2, "an open loop sends whether or not the server has answered"


@pytest.mark.parametrize(("tokens", "status", "why"), [(3, "200 OK", "3 came"), (4, "503 Busy", "503 Busy")])
def test_an_answer_that_is_not_whole_is_no_figure(tokens, status, why):
    with stand_in(tokens, status) as (url, _), pytest.raises(UserError, match=why):
        asyncio.run(closed(url, Load([([1], 4)], at_once=1)))


def test_what_is_told_of_an_answer():
    seen = Seen(asked=10.0, events=[10.5, 10.6, 11.0], tokens=6)
    assert seen.first == 0.5 and seen.per_token == pytest.approx(0.1) and seen.gaps == pytest.approx([0.1, 0.4])
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.75, 0.99)] == [2.0, 3.0, 4.0]
    assert quantile([], 0.5) == 0.0


def test_every_id_has_a_text_of_its_own(tmp_path):
    plain = write_checkpoint(tmp_path / "random")
    folder = serving.with_texts(plain)
    count = Qwen3Config.from_dir(plain).vocab_size
    tokenizer = Tokenizer(folder)
    assert len({tokenizer.decode([i]) for i in range(count)}) == count
    assert serving.with_texts(plain) == folder


def test_rounds_find_nothing_of_the_rounds_before():
    (load, *_) = serving.loads_of(2048, quick=True).values()
    prompts = [tuple(ids) for number in (1, 2, 3) for ids, _ in serving.fresh(load, number).jobs]
    assert len(set(prompts)) == len(prompts) and all(0 <= token < 2048 for ids in prompts for token in ids)


def test_without_vllm_the_report_says_why(monkeypatch):
    monkeypatch.delenv("MINI_ENGINE_VLLM_PYTHON", raising=False)
    with pytest.raises(UserError, match="--vllm-python"):
        serving.commands(serving.VLLM, Namespace(vllm_python=None, dtype="bfloat16", step_tokens=[64]), None, 1)


def test_each_limit_of_tokens_a_step_has_a_server_of_its_own(tmp_path):
    args = Namespace(dtype="bfloat16", step_tokens=[2048, 256, 2048])
    assert serving.ours(args) == {"ours": 2048, "ours, 256 a step": 256}
    for name, limit in serving.ours(args).items():
        command, _ = serving.commands(name, args, tmp_path, 1)
        limits = [
            command[command.index(option) + 1] for option in ("--max-num-batched-tokens", "--chunked-prefill-size")
        ]
        assert limits == [str(limit)] * 2


def test_long_texts_get_room_in_every_engine():
    room = room_of(Namespace(behind=[(8, 4096), (1, 16384)]))
    assert room["longest"] >= 16384 + 64 and room["pool_gib"] * 9362 >= 8 * 4160
    assert room_of(Namespace(behind=[])) == {"pool_gib": 1, "longest": 2048}
    loads = behind([(2, 100)], 50)
    ((name, jobs),) = loads.items()
    assert name == "decode, 2 behind 100" and [len(ids) for ids, _ in jobs] == [100, 100]


def test_the_steps_of_the_shared_load_make_up_the_load():
    part = shared_parts.Part(1, 528, 2.0, {"matrices": 1.5, "attention": 0.25})
    decode = shared_parts.Part(15, 0, 1.0, {"matrices": 0.5, "attention": 0.25})
    rows = shared_parts.rows_of([{shared_parts.KINDS[0]: part, shared_parts.KINDS[2]: decode}] * 3)
    assert [row["ms"] for row in rows] == [2000, 1000] and sum(row["% of load"] for row in rows) == pytest.approx(100)
    assert [row["the rest"] for row in rows] == pytest.approx([250, 250])


def test_a_batch_may_share_its_first_blocks():
    batch = make_batch(3, 40, block_size=4, shared=18)
    assert (batch.block_table[:, :4] == batch.block_table[0, :4]).all(), "whole blocks of the first 18 keys"
    assert len(batch.block_table[:, 4].unique()) == 3 and batch.k[1, :16].equal(batch.k[0, :16])


def test_a_window_s_history_is_what_its_layers_see():
    class Windows:
        layers = (Window(100), Window(100), Window(100), Full())
        kv_bytes_per_token = staticmethod(lambda dtype: 8)

    class Plain:
        layers, kv_bytes_per_token = (Full(),), staticmethod(lambda dtype: 8)

    def engine(config):
        return Namespace(config=config, runner=Namespace(model=Namespace(dtype=None)))

    assert history_bytes(engine(Plain), 1000) == 8000
    assert history_bytes(engine(Windows), 1000) == 2 * 1000 + 6 * 100 and history_bytes(engine(Windows), 50) == 400
