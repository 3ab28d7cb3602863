"""Lesson 16. Latents with what other lessons add: guesses, log probabilities, grammars, tenants, front doors."""

import asyncio
import json
import random
import shutil

import pytest
import torch

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine import LLM, SamplingParams
from mini_engine.__main__ import main
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.kv.block_tensor import KvPool
from mini_engine.latents.store import LatentKv
from mini_engine.pocket import POCKET_DIR
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from tests.l14.toys import Always
from tests.l16.models import (
    FOUND,
    LONG,
    NEW,
    PROMPTS,
    ask,
    check_answers,
    check_nothing_is_lost,
    drain,
    each_kernel,
    greedy,
    hugging_face,
    latents,
    model,
    needs_kernel,
    write,
)
from tests.support import hf_greedy

pytestmark = pytest.mark.reference
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}
PADDED = {"capture": no_graph}
IN_CHUNKS = SchedulerConfig(chunked_prefill_size=16, watermark=0.0)


# ---------------------------------------------------------------- guesses


def guessing(right=0.7, **options):
    """Return an engine whose drafter knows Hugging Face's answers and is wrong now and then."""
    limits, speculation = options.pop("scheduler_config", SchedulerConfig()), Speculation(5)

    def guess(request, count):
        at, answer = len(request.output_ids), greedy(tuple(request.prompt_ids))
        known = answer[at : at + count]
        return [token if random.Random(at + i).random() < right else 1 for i, token in enumerate(known)]

    built = latents(scheduler_config=limits, speculate=speculation, **options)
    scheduler = Scheduler(built.scheduler.manager, limits)
    return Engine(built.config, scheduler, built.runner, Speculator(speculation, Always(guess)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        TIERS,
        {"scheduler_config": IN_CHUNKS, "num_blocks": 22},
        {"block_size": 1, "num_blocks": 1500},
        PADDED,
        pytest.param({"kernel": "cpu"}, marks=needs_kernel),
    ],
    ids=["cached", "uncached", "tiers", "tight", "blocks of 1", "padded", "cpu"],
)
def test_guesses_that_are_taken_back_leave_no_trace(options):
    engine, drafted, accepted = guessing(**options), 0, 0
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        while engine.has_unfinished:
            stats = engine.step().stats
            drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
        check_answers(requests, when)
    assert drafted > accepted > 0, "this test wants guesses of both kinds"
    check_nothing_is_lost(engine)


# ---------------------------------------------------------------- log probabilities


@torch.inference_mode()
def log_probs(ids):
    return hugging_face()(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_log_probabilities_behind_cached_latents_are_hugging_faces():
    engine = latents()
    for found in (0, FOUND[-1]):
        [request] = ask(engine, [LONG], logprobs=2)
        drain(engine)
        assert check_answers([request], "with logprobs") == [found]
        theirs = log_probs([*LONG, *request.output_ids])[len(LONG) - 1 : -1]
        expected = theirs.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
        got = torch.tensor([one.chosen for one in request.logprobs])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- who shares, who waits, who leaves


@pytest.mark.parametrize("options", [{}, TIERS], ids=["tree", "tiers"])
def test_a_namespace_sees_its_own_latents_only(options):
    engine, found = latents(**options), []
    for turn, namespace in enumerate(("a", "b", "a", "b", None)):
        if turn == 2 and options:
            engine.scheduler.manager.coordinator.clear()
        params = SamplingParams(temperature=0, max_tokens=NEW)
        request = engine.add_request(str(turn), list(LONG), params, namespace=namespace)
        drain(engine)
        found += check_answers([request], f"namespace {namespace}")
    assert found == [0, 0, FOUND[-1], FOUND[-1], 0]
    check_nothing_is_lost(engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, TIERS, PADDED],
    ids=["", "uncached", "tiers", "padded"],
)
def test_a_pool_that_is_too_small_preempts_and_changes_no_token(options):
    engine = latents(num_blocks=24, scheduler_config=IN_CHUNKS, **options)
    requests = ask(engine, PROMPTS * 2)
    drain(engine)
    check_answers(requests, "preempted")
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"
    check_nothing_is_lost(engine)


@each_kernel
def test_padded_steps(kernel):
    """Rows of padding belong to no sequence: their attention is 0, and they write into the null block."""
    engine = latents(capture=no_graph, kernel=kernel)
    requests = ask(engine)
    drain(engine)
    check_answers(requests, "padded")
    check_nothing_is_lost(engine)


def test_lesson_10s_loop_with_its_own_pool():
    config, page, size = model().config, 4, 304
    blocks = KvPool(config, size // page + 1, page, load_kernel("torch", latents=True))
    for layer in (*blocks.K, *blocks.V):
        layer.fill_(float("nan"))
    table, allocator = ReqToTokenPool(len(PROMPTS), 144), TokenToKVPoolAllocator(size, page)
    kv = DeviceKv(table, allocator, SlotPool(blocks), LatentKv(config, blocks))
    for _ in range(2):
        assert generate_on_device(model(), kv, PROMPTS, NEW) == [greedy(ids) for ids in PROMPTS]
    assert allocator.available_size() == size, "all slots are free again"


# ---------------------------------------------------------------- front doors


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """Return a random checkpoint with the pocket model's tokenizer."""
    folder = tmp_path_factory.mktemp("with a tokenizer")
    vocab_size = json.loads((POCKET_DIR / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    write(folder, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(POCKET_DIR / name, folder)
    return folder


def answer_of(folder, ids):
    """Return Hugging Face's answer of a checkpoint that is no family's."""
    from transformers import AutoModelForCausalLM

    return hf_greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids, NEW)


def test_llm_and_the_command_line_run_it(with_tokenizer, capsys):
    with LLM(with_tokenizer, num_blocks=64) as llm:
        ids = llm.encode("Once upon a time")
        [answer] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=NEW), progress=False)
        assert answer.token_ids == answer_of(with_tokenizer, ids)
        [chat] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=3), progress=False)
        assert len(chat.token_ids) == 3
    options = ["--model", str(with_tokenizer), "--max-tokens", str(NEW), "--temperature", "0", "--num-blocks", "64"]
    assert main(["generate", *options, "Once upon a time"]) == 0
    assert answer.text.strip() in capsys.readouterr().out


def test_a_replica_answers_as_hugging_face_does(with_tokenizer):
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from mini_engine.distributed.replicas.replica import Replica
    from mini_engine.engine.jobs import Job
    from tests.l13.replicas import options

    replica = Replica(options("--model", str(with_tokenizer), "--dtype", "float32"), max_waiting=8, name="0")
    job = Job(list(LONG), SamplingParams(temperature=0, max_tokens=NEW))

    async def answered():
        tokens = []
        async for item in replica.answer([job], []):
            assert item is None or isinstance(item, tuple), item
            tokens += item[1].token_ids if item else []
        return tokens

    try:
        assert asyncio.run(answered()) == asyncio.run(answered()) == answer_of(with_tokenizer, list(LONG))
    finally:
        replica.worker.close()


def test_a_grammar_holds_with_guesses_and_behind_cached_latents(with_tokenizer):
    pytest.importorskip("llguidance")
    from mini_engine.assembly.build import build_engine
    from mini_engine.assembly.loading import load
    from mini_engine.grammars.compiler import GrammarCompiler
    from mini_engine.grammars.output_forms import OutputForm
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(with_tokenizer)
    compiler = GrammarCompiler(tokenizer, len(tokenizer.token_bytes), (0,))
    schema = {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "integer", "maximum": 999}}
    grammar = compiler.compile_sync(OutputForm(schema))
    prompt, answers = tokenizer.encode("Three numbers, as a list: [1, 2, 3], [4, 5, 6]. " * 2), []
    for speculate in (None, 4):
        loaded = load(with_tokenizer, "float32", "cpu")
        engine = build_engine(loaded, num_blocks=64, block_size=8, speculate=speculate)
        for turn in range(2):
            [request] = ask(engine, [prompt], 24, name=str(turn), grammar=grammar)
            while engine.has_unfinished:
                engine.step()
                engine.conclude(request, request.ending(stopped=False))
            assert request.num_cached_tokens == turn * ((len(prompt) - 1) // 8 * 8)
            answers.append(request.output_ids)
    assert answers == answers[:1] * 4, "guesses and cached latents change no token"
    assert tokenizer.decode(answers[0]).lstrip().startswith("[")
