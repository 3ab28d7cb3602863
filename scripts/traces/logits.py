"""Course machinery. Lesson 4's trace: one row of real logits becomes a token, and what the draw depends on."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

import torch

from lessons.l4_sampler.row import Row
from mini_engine.engine.sampler import FILTERS, PENALTIES, choose, process, uniform
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.no_cache import NoCache, Recompute

PROMPT = "This is the word. The"
SHOWN = 11  # the best tokens; all others share one row
MODEL = "mini_engine/model/causal_lm.py::CausalLM.forward"
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
KEEPS = {
    "keep_top_k": "Top-k: keep only the 8 best. {}.",
    "keep_top_p": "Top-p: keep the best that together reach 0.85. {}.",
    "keep_min_p": "Min-p: remove what is less than half as likely as the best. {}.",
}


class Logits(Tape):
    """A request's row of logits `[1, vocab]`, between two steps of the sampler. raw: as the model gave them."""

    def __init__(self) -> None:
        stages = ["logits", *STAGES.values(), "draw"]
        title = "From logits to a token"
        super().__init__("l4-logits", "l4_sampler/logits.trace.js", "logits", title, 7, stages=stages, name="A")
        self.answer: list[int] = []
        self.row = Row(SamplingParams(**WISHES), self.tokenizer.encode(PROMPT), self.answer)

    @property
    def ids(self) -> list[int]:
        return [*self.row.prompt_ids, *self.answer]

    def model_logits(self) -> None:
        """Compute the model's own logits of the next token, and choose the tokens to show."""
        ids = self.ids
        with torch.inference_mode():
            rows = torch.tensor([len(ids) - 1])
            self.raw = self.model(torch.tensor(ids), NoCache(), Recompute().plan(ids), rows=rows).clone()
        self.logits = self.raw.clone()
        self.shown = self.logits[0].topk(SHOWN).indices.tolist()

    def word(self, token: int) -> str:
        return self.words([token])[0]

    @property
    def kept(self) -> int:
        """The number of tokens that can still be chosen."""
        return int((self.logits > float("-inf")).sum())

    def state(self) -> dict[str, Any]:
        probs, kept = self.probs(self.logits), self.kept
        rows = [
            {"id": token, "word": self.word(token), "logit": number(self.logits[0, token]), "prob": round(prob, 3)}
            for token, prob in ((token, probs[token]) for token in self.shown)
        ]
        rest = round(1 - sum(probs[token] for token in self.shown), 3) + 0.0
        text = self.tokenizer.decode(self.ids)
        return {"stage": "draw", "rows": rows, "rest": rest, "text": text, "kept": kept, "u": None, "chosen": None}

    def probs(self, logits) -> list[float]:
        return logits.softmax(dim=-1)[0].tolist()

    def record(self) -> None:
        self.model_logits()
        self.show(
            f"The {SHOWN} best of {self.logits.shape[-1]:,} logits after “{PROMPT}”. Bars: softmax. "
            f"Greedy takes “{self.word(self.shown[0])}”.",
            MODEL,
            stage="logits",
        )
        for change, asks in PENALTIES + FILTERS:
            if asks(self.row.params):
                self.change(change)
        self.draw()
        self.batch()
        self.next_token()

    def change(self, change) -> None:
        """Run and show one step of the sampler."""
        before, kept, name = self.logits.clone(), self.kept, change.__name__
        change(self.logits, [self.row])
        code, stage = f"{PROCESSORS}::{name}", STAGES.get(name, name)
        self.show(self.sentence(name, before, kept), code, self.question(name, before, kept), stage=stage)

    def changed(self, before) -> list[int]:
        """Return the shown tokens whose logits have changed."""
        return [token for token in self.shown if float(before[0, token]) != float(self.logits[0, token])]

    def sentence(self, name: str, before, kept: int) -> str:
        if name == "penalise_repetition":
            said = [
                f"“{self.word(token)}” {before[0, token]:.2f} → {self.logits[0, token]:.2f}"
                for token in self.changed(before)
            ]
            return f"Repetition penalty: logits of tokens in the text are divided by 1.3. {'; '.join(said)}."
        if name == "divide_by_temperature":
            best = int(self.logits[0].argmax())
            old, new = self.probs(before)[best], self.probs(self.logits)[best]
            return (
                f"Temperature: logits are divided by 0.7, so the best gain: “{self.word(best)}” {old:.3f} → {new:.3f}."
            )
        lost = kept - self.kept
        gone = f"{plural(lost, 'token')} {'gets' if lost == 1 else 'get'} −∞; {self.kept} remain"
        return KEEPS.get(name, "{}.").format(gone)

    def question(self, name: str, before, kept: int):
        if name == "penalise_repetition" and (hit := self.changed(before)):
            why = f"Only tokens of the prompt or the answer are penalised, and “{self.word(hit[0])}” is in the prompt."
            wrong = [self.word(token) for token in self.shown if token not in hit][:2]
            text = "Repetition penalty 1.3 comes first. Whose logit falls?"
            return ask(text, self.word(hit[0]), (*wrong, "every token's"), why)
        if name == "keep_top_k":
            why = "All other logits become −∞ and stay −∞ through every later step."
            text = f"Top-k 8 comes next. How many of the {kept:,} tokens can still be drawn?"
            return ask(text, self.kept, ("0", "100", f"{kept:,}"), why)
        return None

    @property
    def u(self) -> float:
        """The number in [0, 1) that decides this row's draw."""
        return uniform(self.row.seed, len(self.ids))

    def chosen(self, neighbours: int = 0) -> int:
        """Return the sampler's choice for this row after `neighbours` greedy rows in the batch."""
        others = [Row(SamplingParams(temperature=0), self.row.prompt_ids) for _ in range(neighbours)]
        return int(choose(torch.cat([self.raw] * (neighbours + 1)), [*others, self.row])[-1])

    def show_draw(self, token: int, say: str, code: str, question=None) -> None:
        """Show where the draw's number falls."""
        chosen = self.shown.index(token) if token in self.shown else None
        self.show(say, f"{SAMPLER}::{code}", question, u=round(self.u, 3), chosen=chosen)

    def draw(self) -> None:
        self.token = self.chosen()
        self.show(
            f"The draw: the {self.kept} tokens' probabilities end to end from 0 to 1, in the vocabulary's order.",
            f"{SAMPLER}::draw",
        )
        why = "Each token owns an interval as long as its probability, and the number falls into one of them."
        words = [self.word(other) for other in self.shown if self.logits[0, other] > float("-inf")]
        text = f"The number is {self.u:.3f}. Into which token's interval does it fall?"
        self.show_draw(
            self.token,
            f"The number is a hash of seed 7 and position {len(self.ids)}: {self.u:.3f}. It falls into "
            f"“{self.word(self.token)}”.",
            "uniform",
            ask(text, self.word(self.token), words[:3], why),
        )

    def batch(self) -> None:
        """Show the same draw in a batch with seven others."""
        beside = self.chosen(neighbours=7)
        word = self.word(beside)
        same = "the same number, so the same token" if beside == self.token else f"“{word}”: the batch leaked in"
        text = "The same request runs in a batch with seven others. Which token is drawn?"
        why = "A hash of seed and position takes the place of a generator. Neither batch nor order is an input."
        self.show_draw(
            beside,
            f"In a batch of 8: {same}. Only seed and position matter.",
            "draw_tokens",
            ask(text, word, ("it depends on the others",), why),
        )

    def next_token(self) -> None:
        self.answer.append(self.token)
        self.model_logits()
        word, position = self.word(self.token), len(self.ids)
        said = f"“{word}” is appended and fed to the model, which returns logits for position {position}."
        self.show(said, MODEL, stage="logits")
        process(self.logits, [self.row])
        token = self.chosen()
        remain = f"{self.kept} {'token remains' if self.kept == 1 else 'tokens remain'}"
        said = f"After all steps {remain}. Position {position} has the number {self.u:.3f}: “{self.word(token)}”."
        self.show_draw(token, said, "choose")


def number(value: Any) -> float | None:
    """Round to two decimals. None for a token that cannot be chosen."""
    return None if value == float("-inf") else round(float(value), 2)
