"""Course machinery. The cells of "What works with what": each feature of the engine, alone and with each other one.

A cell builds an engine with one or two features, asks it the same prompts in two rounds, and compares the tokens with
Hugging Face's; under a grammar, which `generate` does not have, with those of lesson 0's layers alone. int4 has a bound
instead, because it decides close calls in its own way: full precision must find its tokens nearly as likely as its own.
"""

import argparse
import functools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, takewhile
from statistics import fmean
from typing import Any

from scripts.smoke.hugging_face import hf_generate, load_hf

from mini_engine import LLM, SamplingParams, SchedulerConfig
from mini_engine.engine.offline import Completion
from mini_engine.engine_config import EngineConfig
from mini_engine.errors import UserError
from mini_engine.loading import load

MODELS = {
    "Qwen3": "pocket",
    "hybrid": "pocket-hybrid",
    "windows": "pocket-windows",
    "latents": "pocket-latent",
}
PROMPTS = (
    "Once upon a time there was a small robot. The capital of France is",
    "Once upon a time there was a small robot. The opposite of hot is",
    "1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3,",
)
MAX_TOKENS = 24
GROUPS = {"windows": 3}  # a block has K and V of one of them, so the same memory has more blocks
NEAR = 0.02  # the largest difference of a log probability; with int8 LOOSE, with int4 LOOSE on average
LOOSE = 0.5
BEHIND = 0.5  # int4: how much less likely than full precision's own choices its tokens may be on average, in nats


@dataclass(frozen=True)
class Feature:
    """One thing that an engine can do, or a setting that changes how it does everything else.

    options: fields of EngineConfig. limits: fields of SchedulerConfig. params: fields of SamplingParams; "grammar"
        stands for a JSON schema. needs_folder: its tier keeps files. restarts: another engine answers the second round.
        is_padded: decode steps run as lesson 10 captures them, padded to one of a few sizes; no GPU is needed for that.
        hands_over: K and V of prompts must come from a worker, and no worker may be lost.
    """

    name: str
    lesson: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    needs_folder: bool = False
    restarts: bool = False
    is_padded: bool = False
    hands_over: bool = False


class NotExercised(Exception):
    """An engine has not done what a feature is named for, so its tokens are no evidence."""


FEATURES = (
    Feature("small chunks", "l5_scheduler", limits={"chunked_prefill_size": 7, "max_num_batched_tokens": 16}),
    Feature("a tiny pool", "l5_scheduler", {"num_blocks": 12, "block_size": 8, "max_track_slots": 2}),
    Feature("grammar", "l7_server", params={"grammar": True}),
    Feature("logprobs", "l4_sampler", params={"logprobs": 2}),
    Feature("prompt logprobs", "l4_sampler", params={"prompt_logprobs": 1}),
    Feature("no prefix caching", "l8_radix", {"enable_prefix_caching": False}),
    Feature("reference layers", "l0_the_loop", {"backend": "reference"}),
    Feature("torch layers", "l9_speed", {"backend": "torch"}),
    Feature("padded steps", "l10_device", is_padded=True),
    Feature("int8", "l17_bits", {"kv_dtype": "int8"}),
    Feature("int4", "l17_bits", {"kv_dtype": "int4"}),
    Feature("host tier", "l12_tiers", {"kv_host_bytes": 2**24, "kv_always": True}),
    Feature("disk tier", "l12_tiers", {"kv_host_bytes": 2**18, "kv_always": True}, needs_folder=True),
    Feature("restart", "l12_tiers", {"kv_host_bytes": 2**18, "kv_always": True}, needs_folder=True, restarts=True),
    Feature("two ranks", "l18_ranks", {"tensor_parallel_size": 2}),
    Feature("speculation", "l14_speculation", {"speculate": 4}),
    Feature(
        "hand-over",
        "l19_handover",
        {"prefill_workers": 1, "handover_min_tokens": 0, "block_size": 8},  # each prompt fills a block of 8
        hands_over=True,
    ),
)
# pairs that are two answers to one question
EITHER = {
    ("reference layers", "torch layers"),
    ("int8", "int4"),
    ("host tier", "disk tier"),
    ("host tier", "restart"),
    ("disk tier", "restart"),
}


@dataclass(frozen=True)
class Cell:
    """One feature, or two. `names` are in the order of FEATURES."""

    model: str
    features: tuple[Feature, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The features' names."""
        return tuple(feature.name for feature in self.features)

    @property
    def key(self) -> str:
        """What the cell is called in the file of results."""
        return f"{self.model}: {' × '.join(self.names)}"

    def merged(self, what: str) -> dict[str, Any]:
        """The features' options, limits or params together."""
        together: dict[str, Any] = {}
        for feature in self.features:
            together |= getattr(feature, what)
        return together


def cells() -> Iterator[Cell]:
    """Yield every feature alone and every pair, for each model. Tiers are prefix caching, so they need it."""
    for model in MODELS:
        for feature in FEATURES:
            yield Cell(model, (feature,))
        for pair in combinations(FEATURES, 2):
            cell = Cell(model, pair)
            tiers = [feature.name for feature in pair if "kv_host_bytes" in feature.options]
            if cell.names not in EITHER and not (tiers and "no prefix caching" in cell.names):
                yield cell


def run(cell: Cell) -> str:
    """Run a cell. Returns "equal", the sentence with which it is refused, or how it differs, after "differs: "."""
    options: dict[str, Any] = {"num_blocks": 96} | cell.merged("options")
    options["num_blocks"] *= GROUPS.get(cell.model, 1)
    if limits := cell.merged("limits"):
        options["scheduler_config"] = SchedulerConfig(max_num_seqs=8, **limits)
    with tempfile.TemporaryDirectory() as folder:
        if any(feature.needs_folder for feature in cell.features):
            options["kv_cache_dir"] = folder
        try:
            rounds = two_rounds(cell, options)
        except UserError as error:
            return str(error).replace(folder, "DIR")
        except NotExercised as error:
            return f"differs: {error}"
    return next((wrong for answers in rounds if (wrong := difference(cell, answers))), "equal")


def two_rounds(cell: Cell, options: Mapping[str, Any]) -> list[list[Completion]]:
    """Ask everything, forget what the pool caches, and ask again: tiers must bring it back."""
    rounds, events = [], Counter()
    num_engines = 2 if any(feature.restarts for feature in cell.features) else 1
    for _ in range(num_engines):
        with llm_of(cell, options) as llm:
            for _ in range(2 // num_engines):
                rounds.append(llm.generate(PROMPTS, params_of(cell), progress=False))
                llm.engine.scheduler.manager.prefixes.clear()
            events.update(handed_over(llm))
    if any(feature.hands_over for feature in cell.features):
        check_handed_over(cell, events)
    return rounds


def handed_over(llm: LLM) -> Mapping[str, int]:
    """Return what has happened between an engine and its prefill worker; without one, nothing."""
    stats = llm.engine.scheduler.manager.tier_stats
    return next((tier.events for tier in stats if tier.name == "prefill"), {})


def check_handed_over(cell: Cell, events: Mapping[str, int]) -> None:
    """Raise NotExercised unless prompts were handed over, if they can be: prompt logprobs need them computed here.

    After a restart, the disk may have them all.
    """
    if events["losses"]:
        raise NotExercised("a prefill worker was lost")
    if not events["transfers"] and "prompt logprobs" not in cell.names:
        raise NotExercised("nothing was handed over")


def llm_of(cell: Cell, options: Mapping[str, Any]) -> LLM:
    """Return the cell's engine behind its front door."""
    from mini_engine.build import open_engine
    from mini_engine.gpu.graphs import no_graph
    from mini_engine.text.tokenizer import Tokenizer

    model, capture = MODELS[cell.model], no_graph if any(feature.is_padded for feature in cell.features) else None
    engine = open_engine(model, EngineConfig.of(options), "float32", "cpu", capture)
    return LLM.for_engine(engine, Tokenizer.load(model))


def params_of(cell: Cell) -> SamplingParams:
    """Return the parameters that the cell's requests have."""
    asked = cell.merged("params")
    if asked.get("grammar"):
        asked["grammar"] = grammar(cell.model)
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **asked)


@functools.cache
def grammar(model: str):
    """Return the grammar of a small JSON object."""
    from mini_engine.server.grammars import GrammarCompiler
    from mini_engine.server.output_forms import OutputForm
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer, config = Tokenizer.load(MODELS[model]), load(MODELS[model], "float32", "cpu").config
    words = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
    compiler = GrammarCompiler(tokenizer, config.vocab_size, tuple(config.eos_token_ids))
    return compiler.compile_sync(OutputForm(schema=words))


@functools.cache
def expected(model: str, with_grammar: bool) -> list[list[int]]:
    """Return the tokens that every cell must give: Hugging Face's, or under a grammar those of lesson 0's layers."""
    if with_grammar:
        return [done.token_ids for done in plain(model, "grammar")]
    hf = load_hf(MODELS[model], argparse.Namespace(dtype="float32", device="cpu"))
    with LLM(MODELS[model], num_blocks=8) as llm:
        ends = llm.engine.config.eos_token_ids
        return [hf_generate(hf, llm.encode(prompt), MAX_TOKENS, ends) for prompt in PROMPTS]


@functools.cache
def plain(model: str, *names: str) -> list[Completion]:
    """Answer the prompts one by one with nothing but lesson 0's layers, lesson 3's pool and these features."""
    params = params_of(Cell(model, tuple(feature for feature in FEATURES if feature.name in names)))
    options: dict[str, Any] = {"backend": "reference", "enable_prefix_caching": False, "num_blocks": 96}
    with LLM(MODELS[model], dtype="float32", device="cpu", **options) as llm:
        return [llm.generate(prompt, params, progress=False)[0] for prompt in PROMPTS]


@functools.cache
def behind(model: str, prompt: str, token_ids: tuple[int, ...]) -> float:
    """Return by how much full precision finds these tokens less likely than its own choices: the mean, in nats."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    options: dict[str, Any] = {"backend": "reference", "enable_prefix_caching": False, "num_blocks": 96}
    with LLM(MODELS[model], dtype="float32", device="cpu", **options) as llm:
        [done] = llm.generate([[*llm.encode(prompt), *token_ids]], params, progress=False)
    asked = (done.prompt_logprobs or [])[-len(token_ids) :]
    return fmean(one.top[0][1] - one.chosen for one in asked)


def difference(cell: Cell, answers: list[Completion]) -> str:
    """Say how answers differ from what is expected; "" if they do not.

    int4 may choose another token where full precision is not sure either; from there on, texts differ.
    """
    grammar = "grammar" in cell.names
    for prompt, answer, token_ids in zip(PROMPTS, answers, expected(cell.model, grammar), strict=True):
        if answer.error:
            return f"differs: {answer.error}"
        if answer.token_ids == token_ids:
            continue
        if "int4" in cell.names and behind(cell.model, prompt, tuple(answer.token_ids)) < BEHIND:
            continue
        return f"differs: {answer.token_ids} instead of {token_ids}"
    asked = [name for name in cell.names if name in ("grammar", "logprobs", "prompt logprobs")]
    for answer, other in zip(answers, plain(cell.model, *asked), strict=True):
        pairs = zip(answer.token_ids, other.token_ids, strict=False)
        equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for kind, last in (("logprobs", equal), ("prompt_logprobs", None)):
            ours, theirs = (getattr(one, kind) or [] for one in (answer, other))
            ours, theirs = ours[:last], theirs[:last]
            off = [abs(a.chosen - b.chosen) for a, b in zip(ours, theirs, strict=False)]
            if len(ours) != len(theirs) or not is_near(cell, off):
                return f"differs: other {kind.replace('_', ' ')}"
    return ""


def is_near(cell: Cell, off: list[float]) -> bool:
    """Whether log probabilities that are off by so much are near enough: each of them, or with int4 on average."""
    if not off:
        return True
    return fmean(off) < LOOSE if "int4" in cell.names else max(off) <= (LOOSE if "int8" in cell.names else NEAR)
