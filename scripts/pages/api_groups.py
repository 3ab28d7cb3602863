"""Course machinery. The groups of the API, one page each: which classes and functions of the engine they show.

Each part below begins with the name of its page in lessons/api/ and its title, then a sentence; its links are relative
to that page. The lines after it name a file of the engine and what is shown of it, in order.
"""

from dataclasses import dataclass

PARTS = """
## text: Text in, text out
Text, token ids or conversations in, answers out, and the errors raised on the way. \
[Lessons 5](../l5_scheduler/README.md) and [6](../l6_text/README.md).
assembly/llm.py: LLM Stream
assembly/engine_config.py: EngineConfig
engine/sampling_params.py: SamplingParams
engine/answer.py: TextDelta
engine/request.py: FinishReason
text/tokenizer.py: Tokenizer
engine/offline.py: generate_all Completion
base/errors.py: UserError OutOfBlocks CacheFull
## engine: Step by step
The engine underneath: requests arrive, steps run, tokens come out. [Lesson 5](../l5_scheduler/README.md).
engine/engine.py: Engine StepResult
engine/scheduler_config.py: SchedulerConfig
engine/scheduler.py: Scheduler
engine/request.py: Request Ending
engine/sampler.py: sample
## readers: Many readers
An engine in its own thread, for servers. [Lessons 6](../l6_text/README.md) and [7](../l7_server/README.md).
engine/worker.py: EngineWorker Observer QueueFull EngineStopped
engine/jobs.py: Job Answers
## models: Models
Load a checkpoint into a model. [Lesson 0](../l0_the_loop/README.md).
families/qwen3.py: load_model
checkpoint/config.py: Qwen3Config
families/family.py: Family
model/causal_lm.py: CausalLM
model/qwen3.py: qwen3_model KvStore
engine/loop.py: generate
## stores: Stores
Where K and V are kept, stage by stage. Each answers `set_kv` and `attend`, with a plan of its own.
kv/no_cache.py: NoCache
kv/contiguous.py: ContiguousKv CachedSequence reusable_prefix
kv/token_flat.py: FlatKvPool
kv/block_tensor.py: KvPool ForwardMeta
## attention: Attention
One contract, several kernels. [Lesson 3](../l3_block_tensor/README.md).
attention/registry.py: load_kernel windowed
attention/contract.py: Batch Kernel check_inputs
attention/blockwise.py: attend_blocks
attention/reference.py: paged_attention
attention/dense.py: causal_attention
## blocks: Blocks and tables
Numbers only: no tensors. [Lessons 2](../l2_token_flat/README.md), [3](../l3_block_tensor/README.md) and \
[8](../l8_radix/README.md).
kv/allocator.py: BlockAllocator
kv/refcount.py: RefCountedAllocator
kv/block_table.py: BlockTable fragmentation_ratio waste_ratio
## manager: The manager and its seams
Admits requests, grows their tables, and lets later lessons join in. [Lessons 5](../l5_scheduler/README.md), \
[8](../l8_radix/README.md) and [12](../l12_tiers/README.md).
kv/manager.py: KvCacheManager BlocksByState
kv/coordinator.py: KvCoordinator Cost
kv/cache_coordinator.py: CacheCoordinator caching_manager
kv/memory.py: CacheMemory
kv/connector.py: KvConnector Matched Load
## prefixes: The tree of prefixes
Finds what is computed, locks it, and evicts. [Lesson 8](../l8_radix/README.md).
kv/radix.py: RadixTree HitStats
kv/radix_node.py: Match
kv/prefix_cache.py: PrefixCache
kv/prefixes.py: Found Stored SharedPrefix
kv/eviction.py: EvictionPolicy LRU LFU FIFO
## hybrid: Hybrid models
Layers that keep a state instead of K and V, and their slots. [Lesson 11](../l11_hybrid/README.md).
hybrid/hybrid_config.py: HybridConfig
hybrid/model.py: hybrid_model HybridStore
hybrid/delta_rule.py: recurrent_step chunk_scan
hybrid/gdn_pool.py: GdnPool
hybrid/store.py: HybridKv HybridMeta
hybrid/memory.py: StateMemory StateHold
hybrid/checkpoints.py: Checkpoints
## windows: Windows
Layers that see only the last tokens, and tables with holes. [Lesson 15](../l15_windows/README.md).
windows/window_config.py: WindowConfig
windows/groups.py: Place places_of
windows/window_table.py: WindowTable
windows/memory.py: WindowMemory WindowHold
windows/kept.py: KeptWindows
windows/store.py: GroupedKv GroupedMeta
## latents: Latents
One small vector for each token, from which all heads compute K and V. [Lesson 16](../l16_latents/README.md).
latents/latent_config.py: LatentConfig
latents/contract.py: LatentKernel
latents/reading.py: absorbed_attention expanded_attention expand multiplications expanding_pays
latents/attention.py: RunningSums
latents/store.py: LatentKv
## bits: Fewer bits
K and V in 8 or 4 bits, and measures of the loss. [Lesson 17](../l17_bits/README.md).
quantized/rows.py: quantize
quantized/int4_rows.py: quantize4 joined
quantized/rotation.py: hadamard rotate
quantized/formats.py: RowFormat
quantized/kernels.py: RowKernel
quantized/pool.py: RowKvPool
## tiers: Below the pool
Blocks that leave the pool are kept in host memory and on disk. [Lesson 12](../l12_tiers/README.md).
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
## replicas: More than one machine
Chooses the replica that answers. [Lesson 13](../l13_machines/README.md).
distributed/routing/policy.py: PrefixScore RoundRobin Policy
distributed/routing/seen.py: SeenBlocks
distributed/routing/retry.py: with_retries ReplicaLost
## ranks: One model, several processes
Tensor parallelism: a model cut into shares, and their exchanges. [Lesson 18](../l18_ranks/README.md).
distributed/tensor_parallel/processes.py: Ranks
distributed/tensor_parallel/shard.py: share_of part_of RankCut bytes_per_step gathered_bytes_per_step
distributed/tensor_parallel/vocabulary.py: CutEmbedding GatheredHead
distributed/tensor_parallel/collectives.py: Collectives Traffic
## handover: Hand-over
Prompts computed by another process, and the ownership of buffers. [Lesson 19](../l19_handover/README.md).
handover/stage.py: State Event Buffers Stage BrokenProtocol
handover/protocol.py: Layout Ask Cancel Filled Ended
handover/sender.py: SendingConnector
handover/transfers.py: Transfer Transfers
handover/receiver.py: ReceivingConnector Senders
handover/either.py: EitherConnector
## agents: Agents
Eviction policies that know more than ages, events, and exact routing. [Lesson 20](../l20_agents/README.md).
agents/policies.py: SLRU TLRU
agents/session.py: Limits Session SessionStats
agents/sessions.py: Sessions
agents/longest_prefix.py: LongestPrefixFirst
agents/events.py: BlockStored BlockRemoved AllBlocksCleared EventBatch EventLog
agents/publisher.py: Publisher
agents/index.py: BlockIndex ExactScore
## speculation: More than one token a step
Guesses from the text itself, and their verification. [Lesson 14](../l14_speculation/README.md).
speculation/options.py: Speculation
speculation/speculator.py: speculator_of Speculator
speculation/lookup.py: Drafter LookupDrafter find_continuation copy_from
speculation/tree_lookup.py: TreeDrafter continuation
speculation/verify.py: num_emitted sample_rows with_drafts DraftRow
speculation/adapt.py: Adaptive share_of_rows
## commands: Commands and routes
`python -m mini_engine COMMAND --help` shows the same in a terminal. [Lessons 6](../l6_text/README.md) and \
[7](../l7_server/README.md).
"""


@dataclass(frozen=True)
class Group:
    """A page of the API. says: a sentence in Markdown. files: (file below mini_engine/, names) in order."""

    slug: str
    title: str
    says: str
    files: tuple[tuple[str, tuple[str, ...]], ...]


def _read(part: str) -> Group:
    head, says, *lines = part.splitlines()
    slug, _, title = head.partition(": ")
    split = (line.partition(": ") for line in lines)
    return Group(slug, title, says, tuple((file, tuple(names.split())) for file, _, names in split))


GROUPS = {group.slug: group for group in map(_read, PARTS.split("## ")[1:])}
