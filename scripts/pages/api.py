"""Course machinery. The text of the API page: the engine's public API, extracted from the source's syntax tree.

`scripts.website.api_page` puts it into lessons/api.md when the website is built. This file only lists which names are
shown, and in which order. Everything else (signatures, fields, defaults, docstrings, the commands' options, the
server's routes) comes from the source, without torch, so it cannot go stale.
"""

import ast
import re
import textwrap
from importlib import import_module
from typing import Any, TypeGuard

from scripts import ROOT

SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")
FIELD = re.compile(r"([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (\S.*)", re.DOTALL)
LONGEST_LINE = 80

# The page's sections: a heading, a sentence, and the classes and functions of each file of the engine.
PARTS = """
## Text in, text out
The front door: text, token ids or conversations in, answers out. [Lesson 6](l6_text/README.md).
assembly/llm.py: LLM Stream
assembly/engine_config.py: EngineConfig
engine/sampling_params.py: SamplingParams
engine/answer.py: TextDelta
engine/request.py: FinishReason
text/tokenizer.py: Tokenizer
## Token ids in, token ids out
All prompts at once, all answers at the end, over an engine. [Lesson 5](l5_scheduler/README.md).
engine/offline.py: generate_all Completion
## Step by step
The engine underneath: requests arrive, steps run, tokens come out. [Lesson 5](l5_scheduler/README.md).
engine/engine.py: Engine StepResult
engine/scheduler_config.py: SchedulerConfig
engine/scheduler.py: Scheduler
engine/request.py: Request Ending
engine/sampler.py: sample
## Many readers
An engine in its own thread, for servers. [Lessons 6](l6_text/README.md) and [7](l7_server/README.md).
engine/worker.py: EngineWorker Observer QueueFull EngineStopped
engine/jobs.py: Job Answers
## Models
Load a checkpoint into a model. [Lesson 0](l0_the_loop/README.md).
families/qwen3.py: load_model
checkpoint/config.py: Qwen3Config
families/family.py: Family
model/causal_lm.py: CausalLM
model/qwen3.py: qwen3_model KvStore
engine/loop.py: generate
## Stores
Where K and V are kept, stage by stage. Each answers `set_kv` and `attend`, with a plan of its own.
kv/no_cache.py: NoCache
kv/contiguous.py: ContiguousKv CachedSequence reusable_prefix
kv/token_flat.py: FlatKvPool
kv/block_tensor.py: KvPool ForwardMeta
## Attention
One contract, several kernels. [Lesson 3](l3_block_tensor/README.md).
attention/registry.py: load_kernel windowed
attention/contract.py: Batch Kernel check_inputs
attention/blockwise.py: attend_blocks
attention/reference.py: paged_attention
attention/dense.py: causal_attention
## Blocks, prefixes and their holders
Numbers only: no tensors. [Lessons 2](l2_token_flat/README.md), [3](l3_block_tensor/README.md), \
[5](l5_scheduler/README.md) and [8](l8_radix/README.md).
kv/allocator.py: BlockAllocator
kv/block_table.py: BlockTable fragmentation_ratio waste_ratio
kv/manager.py: KvCacheManager BlocksByState
kv/prefix_cache.py: PrefixCache
kv/coordinator.py: KvCoordinator Cost
kv/cache_coordinator.py: CacheCoordinator caching_manager
kv/prefixes.py: Found Stored SharedPrefix
kv/memory.py: CacheMemory
kv/connector.py: KvConnector Matched Load
kv/radix.py: RadixTree HitStats
kv/radix_node.py: Match
kv/refcount.py: RefCountedAllocator
kv/eviction.py: EvictionPolicy LRU LFU FIFO
## Hybrid models
Layers that keep a state instead of K and V, and their slots. [Lesson 11](l11_hybrid/README.md).
hybrid/hybrid_config.py: HybridConfig
hybrid/model.py: hybrid_model HybridStore
hybrid/delta_rule.py: recurrent_step chunk_scan
hybrid/gdn_pool.py: GdnPool
hybrid/store.py: HybridKv HybridMeta
hybrid/memory.py: StateMemory StateHold
hybrid/checkpoints.py: Checkpoints
## Windows
Layers that see only the last tokens, and tables with holes. [Lesson 15](l15_windows/README.md).
windows/window_config.py: WindowConfig
windows/groups.py: Place places_of
windows/window_table.py: WindowTable
windows/memory.py: WindowMemory WindowHold
windows/kept.py: KeptWindows
windows/store.py: GroupedKv GroupedMeta
## Latents
One small vector for each token, from which all heads compute K and V. [Lesson 16](l16_latents/README.md).
latents/latent_config.py: LatentConfig
latents/contract.py: LatentKernel
latents/reading.py: absorbed_attention expanded_attention expand multiplications expanding_pays
latents/attention.py: RunningSums
latents/store.py: LatentKv
## Fewer bits
K and V in 8 or 4 bits, and measures of the loss. [Lesson 17](l17_bits/README.md).
quantized/rows.py: quantize
quantized/int4_rows.py: quantize4 joined
quantized/rotation.py: hadamard rotate
quantized/formats.py: RowFormat
quantized/kernels.py: RowKernel
quantized/pool.py: RowKvPool
## Below the pool
Blocks that leave the pool are kept in host memory and on disk. [Lesson 12](l12_tiers/README.md).
tiers/keys.py: Identity chain
tiers/records.py: Record Wanted Kind unpack
tiers/host.py: HostTier
tiers/disk.py: DiskTier
tiers/tiers.py: Tiers
tiers/break_even.py: BreakEven
tiers/store.py: BlockStore MinTokens
tiers/connector.py: TierConnector
tiers/companions.py: Companion
tiers/states.py: StateCompanion
## More than one machine
Chooses the replica that answers. [Lesson 13](l13_machines/README.md).
distributed/routing/policy.py: PrefixScore RoundRobin Policy
distributed/routing/seen.py: SeenBlocks
distributed/routing/retry.py: with_retries ReplicaLost
## One model, several processes
Tensor parallelism: a model cut into shares, and their exchanges. [Lesson 18](l18_ranks/README.md).
distributed/tensor_parallel/processes.py: Ranks
distributed/tensor_parallel/shard.py: share_of part_of RankCut bytes_per_step gathered_bytes_per_step
distributed/tensor_parallel/vocabulary.py: CutEmbedding GatheredHead
distributed/tensor_parallel/collectives.py: Collectives Traffic
## Hand-over
Prompts computed by another process, and the ownership of buffers. [Lesson 19](l19_handover/README.md).
handover/stage.py: State Event Buffers Stage BrokenProtocol
handover/protocol.py: Layout Ask Cancel Filled Ended
handover/sender.py: SendingConnector
handover/transfers.py: Transfer Transfers
handover/receiver.py: ReceivingConnector Senders
handover/either.py: EitherConnector
## Agents
Eviction policies that know more than ages, events, and exact routing. [Lesson 20](l20_agents/README.md).
agents/policies.py: SLRU TLRU
agents/session.py: Limits Session SessionStats
agents/sessions.py: Sessions
agents/longest_prefix.py: LongestPrefixFirst
agents/events.py: BlockStored BlockRemoved AllBlocksCleared EventBatch EventLog
agents/publisher.py: Publisher
agents/index.py: BlockIndex ExactScore
## More than one token a step
Guesses from the text itself, and their verification. [Lesson 14](l14_speculation/README.md).
speculation/options.py: Speculation
speculation/speculator.py: speculator_of Speculator
speculation/lookup.py: Drafter LookupDrafter find_continuation copy_from
speculation/tree_lookup.py: TreeDrafter continuation
speculation/verify.py: num_emitted sample_rows with_drafts DraftRow
speculation/adapt.py: Adaptive share_of_rows
## Errors
A user's mistake is reported in one sentence. A call that fails changes nothing.
base/errors.py: UserError OutOfBlocks CacheFull
"""
COMMANDS = (
    ("generate", "mini_engine/cli/generate.py"),
    ("chat", "mini_engine/cli/chat.py"),
    ("serve", "mini_engine/cli/serve.py"),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(tree: ast.Module) -> list[ast.ClassDef | Function]:
    """Return the classes and functions at the top of a module."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef | Function)]


def find(tree: ast.Module, name: str) -> ast.ClassDef | Function:
    """Return the class or function `name`. Raises LookupError if there is none."""
    for node in definitions(tree):
        if node.name == name:
            return node
    raise LookupError(f"there is no {name}")


def signature(node: Function) -> str:
    """Return `def name(…) -> …` without a body, one argument per line if one line would be too long."""
    flat = ast.unparse(ast.FunctionDef(node.name, node.args, [ast.Pass()], [], node.returns, lineno=0))
    flat = flat.removesuffix("pass").rstrip().removesuffix(":")
    flat = ("async " if isinstance(node, ast.AsyncFunctionDef) else "") + flat.replace("'", '"')
    flat = re.sub(r"(: [^=(),]+(?:\[[^=]*\])?[^=(),]*)=(?=\S)", r"\1 = ", flat)  # as ruff writes it
    if len(flat) <= LONGEST_LINE:
        return flat
    head, _, rest = flat.partition("(")
    inside, _, back = rest.rpartition(")")
    arguments = [f"    {part}," for part in split_arguments(inside)]
    return "\n".join([f"{head}(", *arguments, f"){back}"])


def split_arguments(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        quote = "" if sign == quote else quote or (sign if sign in "'\"" else "")
        depth += 0 if quote else (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """Return the docstring, or "" if there is none."""
    return ast.get_docstring(node) or ""


def is_public(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, Function) and not node.name.startswith("_")


def class_code(node: ast.ClassDef) -> str:
    """Return an object's construction: a dataclass's fields, an enum's values, or `__init__`."""
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    lines = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list] + [f"class {node.name}{bases}:"]
    fields = [ast.unparse(item).replace("'", '"') for item in node.body if isinstance(item, ast.AnnAssign | ast.Assign)]
    fields = [field for field in fields if not field.startswith("_")]
    made = next((item for item in node.body if isinstance(item, Function) and item.name == "__init__"), None)
    if made is not None:
        fields = signature(made).splitlines()
    return "\n".join(lines + [f"    {field}" for field in fields]) if fields else lines[-1].removesuffix(":")


def prose(docstring: str) -> list[str]:
    """Convert a docstring to Markdown: paragraphs unchanged, fields and sections as lists, indented text as blocks."""
    summary, *more = docstring.split("\n\n")
    out = [" ".join(summary.split())] if summary else []
    for paragraph in more:
        lines = paragraph.splitlines()
        if SECTION.match(lines[0]):
            out += [f"**{lines[0].rstrip(':')}**", bullets(textwrap.dedent("\n".join(lines[1:])).splitlines())]
        elif all(line.startswith("    ") for line in lines):
            out.append("```text\n" + textwrap.dedent(paragraph) + "\n```")
        elif FIELD.match(lines[0]):
            out.append(bullets(lines))
        else:
            out.append(paragraph if paragraph.startswith("- ") else " ".join(paragraph.split()))
    return out


def bullets(lines: list[str]) -> str:
    """Convert `name: words` lines to a list, joining continued lines. Several fields on one line stay together."""
    items: list[str] = []
    for line in lines:
        if FIELD.match(line) or not items:
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    told = (FIELD.match(item) for item in items)
    return "\n".join(f"- `{m[1]}`: {m[2]}" if m else f"- {item}" for item, m in zip(items, told, strict=True))


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def told(file: str, name: str, tree: ast.Module) -> list[str]:
    """Return the Markdown of one class, with its methods and properties, or one function."""
    node, module = find(tree, name), file.removesuffix(".py").replace("/", ".")
    parts = [f"### {name}", f"`from {module} import {name}` · [source](../{file})"]
    if not isinstance(node, ast.ClassDef):
        return [*parts, code(signature(node)), *prose(docstring(node))]
    parts += [code(class_code(node)), *prose(docstring(node))]
    methods = [item for item in node.body if is_public(item)]
    marks = {item.name: [ast.unparse(decorator) for decorator in item.decorator_list] for item in methods}
    properties = [item for item in methods if "property" in marks[item.name]]
    if properties:
        rows = [f"- `{item.name}`: {' '.join(docstring(item).split())}" for item in properties]
        parts += ["**Properties**", "\n".join(rows)]
    methods = [item for item in methods if item not in properties]
    if methods:
        names = ", ".join(f"<code>{item.name}</code>" for item in methods)
        parts.append(f'<details markdown="1"><summary>Methods: {names}</summary>')
        for item in methods:
            parts.append(f'<h4 id="{slug(name)}.{item.name}"><code>{name}.{item.name}</code></h4>')
            above = "".join(f"@{mark}\n" for mark in marks[item.name])
            parts += [code(above + signature(item)), *prose(docstring(item))]
        parts.append("</details>")
    return parts


def slug(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


class Options:
    """Stands in for a command's parser and keeps the options that are added to it, as rows of a table."""

    def __init__(self) -> None:
        self.rows = ["| option | what it does |", "| --- | --- |"]

    def add_argument(self, *names: str, help: str = "", metavar: str = "", **given: Any) -> None:
        """Add a row: the spelling of an option, and its help or choices."""
        default = f" (default: {given['default']})" if "default" in given else ""
        words = (help or ", ".join(given.get("choices", ())) + default).replace("|", "\\|")
        shown = f"{', '.join(names)} {metavar}".strip()
        self.rows.append(f"| `{shown}` | {words} |")


def commands() -> list[str]:
    """Return the commands and their options."""
    parts = ["## Commands", "`python -m mini_engine COMMAND --help` shows the same in a terminal."]
    for name, file in COMMANDS:
        command, options = import_module(file.removesuffix(".py").replace("/", ".")), Options()
        command.add_arguments(options)
        said = (command.__doc__ or "").split(". ", 1)[1].split("\n\n")[0]
        parts += [f"### The command {name}", f"{' '.join(said.split())} · [source](../{file})", "\n".join(options.rows)]
    return [*parts, *routes()]


def routes() -> list[str]:
    """Return the server's routes, from the decorators in app.py."""
    rows = ["| route | what it returns |", "| --- | --- |"]
    sources = [(ROOT / "mini_engine/server" / name).read_text(encoding="utf-8") for name in ("app.py",)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    for function in (node for node in nodes if isinstance(node, Function)):
        for call in function.decorator_list:
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and ast.unparse(call.func.value) == "app"
            ):
                method, path = call.func.attr.upper(), ast.literal_eval(call.args[0])
                rows.append(f"| `{method} {path}` | {docstring(function)} |")
    return [
        "### Routes",
        "The routes of `serve`. [Lesson 7](l7_server/README.md) describes the errors.",
        "\n".join(rows),
    ]


def contract() -> list[str]:
    """Return the docstring of attention/contract.py: the contract that every kernel implements."""
    tree = ast.parse((ROOT / "mini_engine/attention/contract.py").read_text(encoding="utf-8"))
    _, _, rest = docstring(tree).partition("\n\n")
    shown = []
    for part in rest.split("\n\n"):
        head, _, listed = part.partition("\n- ")
        shown += [*prose("\n\n" + head), *(["- " + listed] if listed else [])]
    return ["### The contract", "From [`attention/contract.py`](../mini_engine/attention/contract.py):", *shown]


def text() -> str:
    """Return all of the page that comes from the source, as Markdown."""
    parts: list[str] = []
    for section in PARTS.split("## ")[1:]:
        title, words, *files = section.splitlines()
        parts += [f"## {title}", words, *(contract() if title == "Attention" else [])]
        for line in files:
            file, names = f"mini_engine/{line.partition(':')[0]}", line.partition(":")[2].split()
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            parts += [text for name in names for text in told(file, name, tree)]
    return "\n\n".join([*parts, *commands()]) + "\n"
