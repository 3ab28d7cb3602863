"""Course machinery. Lesson 4's trace: how one row of real logits becomes a token, and what the draw depends on."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

PROMPT = "This is the word. The"
SHOWN = 11  # the best tokens; all others share one row
MODEL = "mini_engine/model/qwen3.py::Qwen3ForCausalLM.forward"
SAMPLER = "mini_engine/engine/sampler.py"
PROCESSORS = "mini_engine/engine/processors.py"
WISHES = {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 8, "top_p": 0.85, "min_p": 0.5, "seed": 7}
STAGES = {
    "penalise_repetition": "repetition penalty 1.3",
    "divide_by_temperature": "temperature 0.7",
    "keep_top_k": "top-k 8",
    "keep_top_p": "top-p 0.85",
    "keep_min_p": "min-p 0.5",
}


def tape() -> Tape:
    stages = ["logits", *STAGES.values(), "draw"]
    scene = {"stages": stages, "name": "A"}
    return Tape("l4-logits", "l4_sampler/logits.trace.js", "logits", "From logits to a token", scene, 7)


class Row:
    """A request's row of logits, between two steps of the sampler."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.engine.sampling_params import Row, SamplingParams
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        self.tape = tape
        self.tokenizer, self.model = Tokenizer(POCKET_DIR), load_model(POCKET_DIR)
        prompt_ids = self.tokenizer.encode(PROMPT)
        self.answer: list[int] = []
        self.asked = Row(SamplingParams(**WISHES), prompt_ids, self.answer)
        self.model_logits()

    @property
    def position(self) -> int:
        return len(self.asked.prompt_ids) + len(self.asked.output_ids)

    def model_logits(self) -> None:
        """Compute the model's own logits `[1, vocab]` of the next token, and choose the tokens to show."""
        import torch

        from mini_engine.kv.no_cache import NoCache, Recompute

        ids = [*self.asked.prompt_ids, *self.asked.output_ids]
        with torch.inference_mode():
            rows = torch.tensor([len(ids) - 1])
            self.raw = self.model(torch.tensor(ids), NoCache(), Recompute().plan(ids), rows=rows).clone()
        self.logits = self.raw.clone()
        self.shown = self.logits[0].topk(SHOWN).indices.tolist()

    def word(self, token: int) -> str:
        return self.tokenizer.token_bytes[token].decode("utf-8", "replace").strip()

    @property
    def probs(self) -> list[float]:
        return self.logits.softmax(dim=-1)[0].tolist()

    @property
    def kept(self) -> int:
        return int((self.logits > float("-inf")).sum())

    def show(
        self, stage: str, say: str, question=None, u: float | None = None, chosen: int | None = None, *, code: str
    ) -> None:
        probs = self.probs
        rows = [
            {
                "id": token,
                "word": self.word(token),
                "logit": number(float(self.logits[0, token])),
                "prob": round(probs[token], 3),
            }
            for token in self.shown
        ]
        listed = [index for index, token in enumerate(self.shown) if token == chosen]
        state: dict[str, Any] = {"chosen": listed[0] if listed else None, "u": u, "kept": self.kept}
        text = self.tokenizer.decode([*self.asked.prompt_ids, *self.asked.output_ids])
        self.tape.frame(
            say,
            question,
            code,
            stage=stage,
            rows=rows,
            rest=round(1 - sum(probs[token] for token in self.shown), 3) + 0.0,
            text=text,
            **state,
        )


def number(value: float) -> float | None:
    """Round to two decimals. None for a token that cannot be chosen."""
    return None if value == float("-inf") else round(value, 2)


def record(tape: Tape) -> None:
    from mini_engine.engine.sampler import FILTERS, PENALTIES

    row = Row(tape)
    best = row.word(row.shown[0])
    row.show(
        "logits",
        f"The model's logits after “{PROMPT}”: {row.logits.shape[-1]:,} of them, of which the best {SHOWN} are shown. "
        f"A bar is the probability that softmax gives a token. Greedy would take “{best}” every time.",
        code=MODEL,
    )
    for change, asks in PENALTIES + FILTERS:
        if asks(row.asked.params):
            stage(row, change)
    drawing(row)
    again(row)


def stage(row: Row, change) -> None:
    """Run and show one step of the sampler."""
    before, kept = row.logits.clone(), row.kept
    name: str = change.__name__
    change(row.logits, [row.asked])
    say, asked = sentence(row, name, before, kept), question(row, name, before, kept)
    row.show(STAGES.get(name, name), say, asked, code=f"{PROCESSORS}::{name}")


def changed(row: Row, before) -> list[int]:
    """Return the shown tokens whose logits have changed."""
    return [token for token in row.shown if float(before[0, token]) != float(row.logits[0, token])]


def sentence(row: Row, name: str, before, kept: int) -> str:
    best = int(row.logits[0].argmax())
    if name == "penalise_repetition":
        said = [
            f"“{row.word(token)}” {before[0, token]:.2f} → {row.logits[0, token]:.2f}" for token in changed(row, before)
        ]
        return (
            "Repetition penalty: the logit of every token in the prompt or the answer is divided by 1.3 (or "
            f"multiplied, if negative). {'; '.join(said)}."
        )
    if name == "divide_by_temperature":
        old = float(before.softmax(dim=-1)[0, best])
        return (
            "Temperature: every logit is divided by 0.7. Differences grow, so the best tokens gain: "
            f"“{row.word(best)}” goes from {old:.3f} to {row.probs[best]:.3f}. A temperature above 1 does the opposite."
        )
    lost = kept - row.kept
    gone = f"{plural(lost, 'token')} {'gets' if lost == 1 else 'get'} the logit −∞; {row.kept} remain"
    if name == "keep_top_k":
        return f"Top-k: keep only the 8 best. {gone} and share the probability of the others."
    if name == "keep_top_p":
        return f"Top-p: keep the best tokens that together reach 0.85, including the one that gets there. {gone}."
    if name == "keep_min_p":
        return f"Min-p: remove every token less than half as likely as the best. {gone}."
    return f"{gone}."


def question(row: Row, name: str, before, kept: int):
    if name == "penalise_repetition" and (hit := changed(row, before)):
        why = f"Only tokens of the prompt or the answer are penalised, and “{row.word(hit[0])}” is in the prompt."
        wrong = [row.word(token) for token in row.shown if token not in hit][:2]
        return ask(
            "Repetition penalty 1.3 comes first. Whose logit falls?", row.word(hit[0]), (*wrong, "every token's"), why
        )
    if name == "keep_top_k":
        why = "All other logits become −∞ and stay −∞ through every later step."
        return ask(
            f"Top-k 8 comes next. How many of the {kept:,} tokens can still be drawn?",
            row.kept,
            ("0", "100", f"{kept:,}"),
            why,
        )
    return None


def number_of(row: Row) -> float:
    """Return the number in [0, 1) that decides this row's draw."""
    from mini_engine.engine.sampler import uniform

    return uniform(row.asked.seed, row.position)


def chosen_by(row: Row, neighbours: int = 0) -> int:
    """Return what the sampler chooses for this row behind `neighbours` greedy rows in the batch."""
    import torch

    from mini_engine.engine.sampler import choose
    from mini_engine.engine.sampling_params import Row, SamplingParams

    others = [Row(SamplingParams(temperature=0), row.asked.prompt_ids) for _ in range(neighbours)]
    return int(choose(torch.cat([row.raw] * (neighbours + 1)), [*others, row.asked])[-1])


def drawing(row: Row) -> None:
    u, token = number_of(row), chosen_by(row)
    row.show(
        "draw",
        f"The draw: the probabilities of the {row.kept} remaining tokens, laid end to end from 0 to 1 in the order of "
        "the vocabulary.",
        code=f"{SAMPLER}::draw",
    )
    why = "Each token owns an interval as long as its probability, and the number falls into one of them."
    words = [row.word(other) for other in row.shown if row.logits[0, other] > float("-inf")]
    row.show(
        "draw",
        f"The number is a hash of seed 7 and position {row.position}: {u:.3f}. It falls into “{row.word(token)}”.",
        ask(f"The number is {u:.3f}. Into which token's interval does it fall?", row.word(token), words[:3], why),
        u=round(u, 3),
        chosen=token,
        code=f"{SAMPLER}::uniform",
    )


def again(row: Row) -> None:
    """Show the same draw in a batch with seven others, and then the next draw."""
    u, token, beside = number_of(row), chosen_by(row), chosen_by(row, neighbours=7)
    same = "the same number, so the same token" if beside == token else f"“{row.word(beside)}”: the batch leaked in"
    row.show(
        "draw",
        f"The same request in a batch of 8: {same}. No generator and no state: only seed and position matter.",
        ask(
            "The same request runs in a batch with seven others. Which token is drawn?",
            row.word(beside),
            ("it depends on the others",),
            "A hash of seed and position takes the place of a generator. Neither batch nor order is an input.",
        ),
        u=round(u, 3),
        chosen=beside,
        code=f"{SAMPLER}::draw_tokens",
    )
    row.answer.append(token)
    row.model_logits()
    row.show(
        "logits",
        f"“{row.word(token)}” is appended and fed to the model, which returns logits for position {row.position}.",
        code=MODEL,
    )
    from mini_engine.engine.sampler import process

    process(row.logits, [row.asked])
    u, token = number_of(row), chosen_by(row)
    row.show(
        "draw",
        f"After all steps {row.kept} {'token remains' if row.kept == 1 else 'tokens remain'}. Position {row.position} "
        f"has the number {u:.3f}: “{row.word(token)}”.",
        u=round(u, 3),
        chosen=token,
        code=f"{SAMPLER}::choose",
    )
