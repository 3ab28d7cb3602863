"""Course machinery. The small tools in lessons' pages give what the lessons' own code gives.

Protects readers who decide by a calculator: pool sizes, break-even lengths and probabilities are the engine's own.
"""

import json
import math
import random
import re
from functools import partial

from scripts import ROOT
from scripts.pages import tool_data
from scripts.website.browser import PHONE

import pytest
import torch

from lessons.l4_sampler.row import Row
from mini_engine import LLM
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.distributed.routing.policy import PrefixScore
from mini_engine.engine.sampler import process
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.token_flat import pool_slots
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.tiers.break_even import BreakEven
from tests.course.looks import AXE, RUN_AXE

PAGES = {
    "pool": "l2_token_flat/README.md",
    "roofline": "l9_speed/README.md",
    "break-even": "l12_tiers/README.md",
    "sampler": "l4_sampler/README.md",
    "bytes": "l6_text/README.md",
    "interval": "l11_hybrid/README.md",
    "beta": "l13_machines/README.md",
    "replicas": "l13_machines/README.md",
    "launch": "l10_device/README.md",
    "own-chats": "ten-minutes/README.md",
    "bill": "ten-minutes/README.md",
}
WORK = "([tool, values]) => values.map(one => KvTools[tool].work(one))"


@pytest.fixture
def work(visit):
    """Return a function (tool, values) that computes in the page."""
    return lambda tool, values: visit(PAGES[tool]).evaluate(WORK, [tool, values])


def test_the_pool_s_size_is_pool_slots(work):
    chance, dtypes = random.Random(0), {"bfloat16": torch.bfloat16, "float32": torch.float32}
    drawn = [
        {
            "layers": chance.randint(1, 80),
            "heads": chance.randint(1, 16),
            "dim": chance.choice([64, 80, 128]),
            "dtype": chance.choice(list(dtypes)),
            "gib": chance.randint(1, 80),
            "block": chance.choice([1, 8, 16, 24]),
            "tokens": 100,
        }
        for _ in range(50)
    ]
    for given, got in zip(drawn, work("pool", drawn), strict=True):
        config = Qwen3Config(1, 1, 1, given["layers"], given["heads"], given["heads"], given["dim"])
        expected = pool_slots(config, dtypes[given["dtype"]], given["gib"] * 2**30, given["block"])
        assert got["slots"] == expected and got["blocks"] == expected // given["block"], given
        assert got["requests"] == got["blocks"] // -(-100 // given["block"])


def test_the_break_even_is_the_lesson_s(work):
    chance = random.Random(1)
    drawn = [
        {
            "rate": chance.randint(10, 20_000),
            "token": chance.randint(1, 256),
            "bandwidth": chance.randint(1, 5_000),
            "latency": chance.choice([0, 5, 50]),
            "prefix": chance.randint(1, 9_000),
        }
        for _ in range(50)
    ]
    lengths = []
    for given, got in zip(drawn, work("break-even", drawn), strict=True):
        tier = BreakEven(given["rate"], given["token"] * 1024, given["bandwidth"] * 1e6, given["latency"] / 1e3)
        lengths.append(tier.num_tokens)
        assert math.isclose(got["from"], tier.num_tokens, rel_tol=1e-9), given
        assert (got["back"] <= got["again"]) == (given["prefix"] >= tier.num_tokens), given
    assert math.inf in lengths and min(lengths) < math.inf


def test_the_replica_s_score_is_the_policy_s(work):
    chance, names, prompt = random.Random(3), range(3), range(5)
    drawn = [
        {"beta": chance.choice([0, 0.3, 1, 3])}
        | {f"matched{i}": chance.randint(0, 5) for i in names}
        | {f"load{i}": chance.randint(0, 12) for i in names}
        for _ in range(60)
    ]
    for given, got in zip(drawn, work("replicas", drawn), strict=True):
        policy, loads = PrefixScore(given["beta"]), {i: given[f"load{i}"] for i in names}
        policy.choose([], loads)  # now it knows the replicas
        for i in names:
            policy.sent(i, prompt[: given[f"matched{i}"]])
        expected = policy.scores(prompt, loads)
        assert got["scores"] == pytest.approx(list(expected.values())), given
        best = max(names, key=lambda i: (expected[i], -loads[i]))
        assert math.isclose(expected[got["chosen"]], expected[best]), given


def test_a_launched_step_takes_as_long_as_its_kernels_in_turn(work):
    """Host and GPU as two queues: a kernel begins when it is launched and the one before it has ended."""
    given = [{"launch": launch, "kernels": 100, "gpu": gpu} for launch in (0.1, 3, 20) for gpu in (0.05, 0.6, 5)]
    for one, got in zip(given, work("launch", given), strict=True):
        ends = 0.0
        for kernel in range(1, 101):
            ends = max(ends, 0.15 + kernel * one["launch"] / 1e3) + one["gpu"] / 100
        assert math.isclose(got["plain"], ends), one
        assert math.isclose(got["replayed"], 0.15 + one["launch"] / 1e3 + one["gpu"]), one
        assert got["loop"] <= got["replayed"], one


def test_the_roofline_is_the_one_that_was_measured(work):
    report = json.loads((ROOT / "lessons" / "l9_speed" / "step.json").read_text(encoding="utf-8"))
    speeds = dict(re.findall(r"(\d+) at once: memory (?:is )?read at ([\d.]+)", "\n".join(report["notes"])))
    matrix = report["machine"]["matrix_gflop_s"]["bfloat16"]
    rows = [row for row in report["rows"] if row["part"] == "whole step"]
    drawn = [
        {"batch": int(batch), "read": float(speeds[batch]), "matrix": matrix, "weights": 1.192, "history": 256}
        for batch in (row["step"].split()[0] for row in rows)
    ]
    for row, got in zip(rows, work("roofline", drawn), strict=True):
        assert math.isclose(got["seconds"] * 1e3, row["limit, ms"], rel_tol=0.04), row["step"]


def test_the_sampler_s_probabilities_are_those_of_process(work):
    chance = random.Random(2)
    drawn = [
        {
            "temperature": chance.randint(1, 40) / 20,
            "topK": chance.choice([0, 0, 1, 3, 8, 40]),
            "topP": chance.choice([1, 1, chance.randint(1, 19) / 20]),
            "minP": chance.choice([0, 0, chance.randint(1, 20) / 20]),
        }
        for _ in range(60)
    ]
    logits = torch.tensor(tool_data.read_data("sampler")["logits"])
    for given, got in zip(drawn, work("sampler", drawn), strict=True):
        params = SamplingParams(given["temperature"], top_k=given["topK"], top_p=given["topP"], min_p=given["minP"])
        expected = process(logits[None].clone(), [Row(params, [1])])
        assert got["kept"] == int((expected > float("-inf")).sum()), given
        assert torch.allclose(torch.tensor(got["probs"], dtype=torch.float32), expected.softmax(-1)[0], atol=1e-5), (
            given
        )
    (greedy,) = work("sampler", [{"temperature": 0, "topK": 0, "topP": 1, "minP": 0}])
    assert greedy["kept"] == 1 and greedy["probs"][int(logits.argmax())] == 1


TEXTS = [
    "A café: 5 €, 😀",
    "Zoë isn't here.\n\n  Two  spaces, 1234 digits",
    "tabs\tand\r\nlines \n",
    "<|im_start|>user\nHi<|im_end|>é",
    "日本語 и кириллица, ſ'ſ",
    "👩‍👩‍👧 ﬁ ½ ٣",
]


def test_typed_text_has_the_tokenizer_s_tokens_and_shows_what_the_detokenizer_shows(work):
    chance, tokenizer = random.Random(3), Tokenizer(POCKET_DIR)
    letters = "aeinorst THE'sé€😀\n\u00a0\u3000.,!?<|>09½日ß"
    texts = TEXTS + ["".join(chance.choices(letters, k=chance.randint(0, 40))) for _ in range(200)]
    for text, got in zip(texts, work("bytes", [{"text": text} for text in texts]), strict=True):
        ids = tokenizer.encode(text)
        assert [token["id"] for token in got["tokens"]] == ids, repr(text)
        detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        assert [token["text"] for token in got["tokens"]] == [detokenizer.push(token) for token in ids], repr(text)
        shown = [token["bytes"] for token in got["tokens"] if token["id"] not in tokenizer.special_ids]
        assert shown == [list(tokenizer.token_bytes[token]) for token in ids if token not in tokenizer.special_ids]


@pytest.mark.nightly
def test_the_reader_s_chats_find_what_the_engine_finds(work):
    first = {"system": "You are a helpful assistant.", "first": "What is the capital of France?"}
    first |= {"answer": "The capital of France is Paris.", "again": "What is the capital of Japan?"}
    drawn = [
        first | {"b": "What is the opposite of hot?", "c": "Count from one to five."},
        first | {"b": first["first"], "c": "What is the capital of Italy?"},  # B asks what A has asked
        first | {"system": "", "answer": "Hm", "again": "", "b": "é 😀 5 €", "c": "What"},
    ]
    params = SamplingParams(temperature=0, max_tokens=1)
    for given, got in zip(drawn, work("own-chats", drawn), strict=True):
        start = [{"role": "system", "content": given["system"]}]
        said = [{"role": "user", "content": given[name]} for name in ("first", "again", "b", "c")]
        answer = {"role": "assistant", "content": given["answer"]}
        with LLM(num_blocks=128, block_size=4) as llm:
            ask = partial(llm.chat, params=params, progress=False)
            found = ask([*start, said[0]])
            told = Tokenizer(POCKET_DIR).encode_chat([*start, said[0]]) + llm.encode(given["answer"])
            llm.generate([told], params, progress=False)  # the answer's K and V are kept
            found += ask([*start, said[0], answer, said[1]]) + ask([*start, said[2]]) + ask([*start, said[3]])
        expected = [{"tokens": len(done.prompt_token_ids), "found": done.num_cached_tokens} for done in found]
        assert got["chats"] == expected, given


def test_a_chat_s_bill_is_the_sum_of_its_prompts(work):
    chance = random.Random(5)
    names = {"system": 4000, "message": 200, "answer": 900, "messages": 30, "chats": 50}
    drawn = [
        {name: chance.randint(2, most) for name, most in names.items()} | {"price": 5, "share": 10} for _ in range(9)
    ]
    for given, got in zip(drawn, work("bill", drawn), strict=True):
        sent, kept, known = 0, 0, False
        for _ in range(given["chats"]):
            history = given["system"] if known else 0  # tokens of this chat's next prompt that the cache has
            prompt = given["system"]
            for _ in range(given["messages"]):
                prompt += given["message"]
                sent, kept = sent + prompt, kept + history
                prompt += given["answer"]
                history, known = prompt, True
        assert (got["sent"], got["found"]) == (sent, kept), given
        assert got["cached"] == pytest.approx(5e-6 * (sent - 0.9 * kept)) and got["without"] == pytest.approx(
            5e-6 * sent
        )


def test_the_checkpoints_are_those_that_the_manager_makes_and_finds(work):
    chance = random.Random(4)
    drawn = [
        {"every": 2 ** chance.randint(4, 9), "tokens": chance.randint(1, 900), "shared": chance.randint(0, 900)}
        for _ in range(60)
    ]
    for given, got in zip(drawn, work("interval", drawn), strict=True):
        memory = StateMemory(TrackSlots(1, 100), 16, given["every"])
        cache = partial(PrefixCache, memory=memory)
        manager = coordinated(200, 16, prefixes=cache)
        stored = list(range(given["tokens"]))
        at = manager.allocate("stored", stored)
        while at < len(stored):
            at = memory.chunk_end("stored", at, len(stored))
            manager.grow("stored", at)
            manager.commit("stored", stored, at)
        manager.free("stored", stored)
        assert got["checkpoints"] == len(memory.checkpoints.slots), given
        second = [*stored[: given["shared"]], 10_000, 10_001]
        assert got["start"] == manager.allocate("second", second), given
        assert got["again"] == min(given["shared"], len(stored)) - got["start"]


def test_the_tools_numbers_are_those_of_the_pocket_model():
    for name in ("sampler", "bytes"):
        kept, now = tool_data.read_data(name), tool_data.MAKERS[name]()
        rounded = zip(kept.pop("logits", []), now.pop("logits", []), strict=True)
        assert kept == now, f"python -m scripts.pages.tool_data --only {name}"
        assert all(abs(one - other) < 0.01 for one, other in rounded)


@pytest.mark.parametrize("at", range(3))
def test_the_prices_of_load_are_those_that_lesson_13_simulates(at, work):
    kept = tool_data.read_data("beta")
    betas, replicas = kept["betas"], kept["replicas"][at]
    drawn = [{"beta": index, "replicas": str(replicas)} for index in range(len(betas))]
    shown = [[got["found"], got["busiest"], got["wait"]] for got in work("beta", drawn)]
    assert shown == kept["rows"][at]
    price = betas.index(0.3)
    assert shown[price] == tool_data.cell(replicas, betas[price]), "python -m scripts.pages.tool_data --only beta"


@pytest.mark.parametrize("tool", PAGES)
def test_a_tool_answers_when_it_is_changed_and_is_accessible(tool, visit):
    page = visit(PAGES[tool], width=PHONE, reduced_motion="reduce")
    room = page.locator(f".kv-tool[data-tool={tool}]")
    page.evaluate("document.querySelectorAll('details').forEach(box => (box.open = true))")
    before = room.locator("dl").inner_text()
    assert "NaN" not in before and "undefined" not in before
    room.locator("input").first.fill("4" if tool == "interval" else "2")
    assert room.locator("dl").inner_text() != before
    box = room.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert not page.evaluate(RUN_AXE, {"place": f".kv-tool[data-tool={tool}]"})  # test_site looks at the rest
