"""Course machinery. Trains a pocket model: small and genuine, next-token loss, Muon for the matrices."""

import itertools
import random
from collections.abc import Callable, Iterator

from scripts.pocket.chats import END_OF_TEXT, TURN_END
from scripts.pocket.hybrid import denormals_are_zero, hybrid_config, start_time_steps
from scripts.pocket.latent import latent_config
from scripts.pocket.newton_schulz import muon_in_float32
from scripts.pocket.plan import MAX_POSITIONS, Plan
from scripts.pocket.saved_run import SavedRun

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

GRADIENT_LIMIT = 1.0
LONG_EVERY = 10


def model_config(plan: Plan, tokenizer: Tokenizer) -> Qwen3Config:
    """Return the config: grouped-query heads (4 and 2), and a head_dim of 64, which is not hidden_size / heads."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.hidden_size * 8 // 3,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
    )


def row(documents: Iterator[list[int]], length: int) -> list[int]:
    """Return `length` + 1 tokens, beginning at a document's start. The last document may be cut, in this pass only."""
    tokens: list[int] = []
    while len(tokens) <= length:
        tokens += next(documents)
    return tokens[: length + 1]


def batches(documents: list[list[int]], plan: Plan) -> Iterator[torch.Tensor]:
    """Yield [rows, length + 1] int64 batches forever, every document once per pass, in an order set by the seed.

    Every tenth batch is one long row of the same number of tokens, which teaches the model to attend far back.
    """
    chooser = random.Random(plan.seed)
    stream = (document for _ in itertools.count() for document in chooser.sample(documents, len(documents)))
    for step in itertools.count(1):
        long = step % LONG_EVERY == 0
        count, length = (1, plan.batch_size * plan.row_length) if long else (plan.batch_size, plan.row_length)
        yield torch.tensor([row(stream, length) for _ in range(count)])


def make_optimizers(plan: Plan, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan, 2024) for the layers' matrices, and AdamW for the embedding and the norms.

    Muon learns these facts from about a third of the tokens that AdamW needs, which matters on two cores.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        torch.optim.Muon(matrices, lr=plan.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_of(model: nn.Module, batch: torch.Tensor, float32: bool) -> torch.Tensor:
    """Return the mean next-token loss in nats. batch: [rows, length + 1] int64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not float32):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def new_model(plan: Plan, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return a model of the plan's kind with random weights, or with those of `plan.start_from`."""
    if plan.start_from:
        return AutoModelForCausalLM.from_pretrained(plan.start_from, dtype=torch.float32)
    if plan.kind == "qwen3":
        return Qwen3ForCausalLM(model_config(plan, tokenizer))
    if plan.kind == "latent":
        return DeepseekV3ForCausalLM(latent_config(plan, tokenizer))
    model = Qwen3_5ForCausalLM(hybrid_config(plan, tokenizer))
    start_time_steps(model)
    return model


def train(
    plan: Plan,
    documents: list[str],
    tokenizer: Tokenizer,
    report: Callable[[float], None],
    saved: SavedRun | None = None,
) -> PreTrainedModel:
    """Train a new model, calling `report` with each step's loss. The same plan and threads give the same weights.

    Args:
        saved: the file in which the run saves itself as it goes; an interrupted run continues from there.
    """
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.threads)
    model = new_model(plan, tokenizer).train()
    optimizers = make_optimizers(plan, model)
    schedules = [LambdaLR(optimizer, plan.rate_factor) for optimizer in optimizers]
    parts = [model, *optimizers, *schedules]
    done = saved.restore(plan, parts, report) if saved else 0
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([text + END_OF_TEXT for text in documents])]
    with denormals_are_zero(plan.kind == "hybrid"), muon_in_float32(plan.float32):
        for batch in itertools.islice(batches(encoded, plan), plan.first_step + done, plan.first_step + plan.steps):
            loss = loss_of(model, batch, plan.float32)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_LIMIT)
            for stepper in [*optimizers, *schedules]:
                stepper.step()
            report(loss.item())
            if saved:
                saved.note(loss.item(), plan, parts)
    return model.eval()
