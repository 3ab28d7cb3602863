"""Lesson 8. Runs a chat, a shared system prompt, branches, and a pool that is too small; compares with cold runs."""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import make_parser, with_prompts
from scripts.smoke.paths import batched
from scripts.smoke.run import Outcome, run_smoke
from scripts.smoke.scenarios import Scenario, run_scenarios
from scripts.smoke.trial import Opened, Trial


class Scenarios(Scenario):
    """Four ways to share KV. `begin` makes the engine that all requests of one go to."""

    def common(self) -> list[int]:
        """Return a common beginning of five whole blocks, made from the prompts."""
        tokens, length = [token for ids in self.prompts for token in ids], 5 * self.args.block_size
        return (tokens * length)[:length]

    def chat(self):
        """Run a chat; each turn's prompt is the whole conversation so far."""
        longest, history = sum(map(len, self.prompts)) + len(self.prompts) * self.args.max_new_tokens, []
        self.begin([[0] * longest] * 2)
        for ids in self.prompts:
            history = self.ask(self.shared, [history + ids])[0].token_ids

    def system_prompt(self):
        """Run all prompts after one system prompt at once, then the first again: its prompt is cached by then."""
        asked = [self.common() + ids for ids in self.prompts]
        self.begin(asked)
        self.ask(self.shared, asked)
        self.ask(self.shared, asked[:1])

    def branches(self):
        """Run prompts that diverge inside a block, then continue one answer in two ways."""
        asked = [self.common()[: 5 * self.args.block_size // 2] + ids for ids in self.prompts]
        self.begin(asked * 2)
        first = self.ask(self.shared, asked)[0].token_ids
        self.ask(self.shared, [first + ids for ids in self.prompts[:2]])

    def too_small(self):
        """Alternate between beginnings in a pool that cannot keep them all, so every hit must survive evictions."""
        start = self.common()
        asked = [start[shift:] + start[:shift] + self.prompts[0] for shift in range(4)]
        self.begin(asked, share=0.6)
        for ids in asked + asked[::-1]:
            self.ask(self.shared, [ids])


SCENARIOS = {"chat": Scenarios.chat, "shared system prompt": Scenarios.system_prompt}
SCENARIOS |= {"branching": Scenarios.branches, "eviction": Scenarios.too_small}


def generate(model, prompts, args) -> Outcome:
    """Run the prompts together, to find where values differ."""
    return batched(Trial("prompts", args, prompts, Opened(), model))


def arguments():
    return make_parser(__doc__, block_size=8, kernel=True)


def main(argv=None) -> int:
    argv = with_prompts(argv, arguments(), COURSE_PROMPTS[-3:])
    return run_smoke(8, partial(run_scenarios, SCENARIOS, Scenarios), arguments(), argv, one_alone=generate)


if __name__ == "__main__":
    sys.exit(main())
